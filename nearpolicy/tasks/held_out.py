"""Held-out questions: chosen by their text, never by a seed of the generator, and never seen in training."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence

from nearpolicy.errors import DataError

_NUMBER = r"(?:(?<!\S)-|(?<=\()-)?\d+(?:\.\d+)?"
_PURE = {
    sign: re.compile(rf"(?<![\w.]){_NUMBER}(?:\s*{pattern}\s*-?\d+(?:\.\d+)?)+(?!\w|\.\d)")
    for sign, pattern in (("+", r"\+"), ("*", r"[*×·]"))
}
_JOINS = ("+", "-", "*", "/", "×", "·", "÷", "^", "%")
"""An operator beside a sum makes it a part of something larger, where the order may matter."""


def question_key(text: str) -> str:
    """Equal for questions that differ in case, white space, Unicode form or the order within a pure sum or product.

    >>> question_key("What is  3 + 41?") == question_key("what is 41 + 3?")
    True
    >>> question_key("What is 3 - 41?") == question_key("What is 41 - 3?")
    False
    """
    text = " ".join(unicodedata.normalize("NFKC", text).lower().split())
    for sign, pattern in _PURE.items():
        text = pattern.sub(lambda match, sign=sign: _with_operands_in_order(match, sign), text)
    return text


def _with_operands_in_order(match: re.Match[str], sign: str) -> str:
    before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip()
    if before.endswith(_JOINS) or after.startswith(_JOINS):
        return match.group()
    operands = re.findall(r"-?\d+(?:\.\d+)?", match.group())
    return f" {sign} ".join(sorted(operands, key=lambda operand: (float(operand), operand)))


def split_held_out(keys: Sequence[str], count: int, *, seed: int, task: str) -> tuple[list[int], list[int]]:
    """Places of the rows to train on and of ``count`` held-out rows; rows that repeat a question are in neither.

    The choice depends on seed, task and the questions themselves, not on their order: rows that are added or moved
    do not reshuffle it. Training rows keep their order."""
    first: dict[str, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    if count and len(first) <= count:
        raise DataError(
            f"task {task}: held_out is {count}, but there are only {len(first)} different questions in {len(keys)} "
            "rows, and at least one must be left to train on; ask for fewer, or make the source larger"
        )

    def draw(key: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{task}\0{key}".encode(errors="surrogatepass"), digest_size=16).digest()

    chosen = sorted(first, key=draw)[:count]
    kept_away = set(chosen)
    return [place for key, place in first.items() if key not in kept_away], [first[key] for key in chosen]
