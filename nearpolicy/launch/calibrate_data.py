"""Labelled answers for ``nearpolicy calibrate``: pairs of which one is better, or single answers with a right score.

    llmbar    {input, output_1, output_2, label: 1 or 2}
    pandalm   {instruction, input, response1, response2, annotator1..3: 0, 1 or 2, cmp_key}
    pairs     {prompt, answer_1, answer_2, label: 0 (alike), 1 or 2; maker_1, maker_2}
    chosen    {prompt, chosen, rejected}
    items     {prompt, answer, label: a number or truth value}

Files are JSON (a list) or JSON lines, gzip-compressed if the name ends in .gz. Keys beyond these are columns of the
row, which a reward may read.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearpolicy.errors import DataError, described


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one question."""

    prompt: str
    answers: tuple[str, str]
    gold: int
    """1 or 2: the better one; 0: neither."""
    makers: tuple[str | None, str | None] = (None, None)
    """Who wrote them."""
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One answer and its right score."""

    prompt: str
    answer: str
    gold: float
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """What a file holds."""

    form: str
    pairs: tuple[Pair, ...] = ()
    items: tuple[Item, ...] = ()
    left_out: int = 0
    """Rows on whose label those who labelled them do not agree."""


def read_labelled(path: Path, limit: int | None, seed: int) -> Labelled:
    """``limit`` rows of a file, chosen by ``seed``, in its order; `DataError` names the row that cannot be read."""
    rows = _rows(path)
    form, make = _form_of(path, rows[0])
    made: list[Pair | Item | None] = []
    for number, row in enumerate(rows, start=1):
        try:
            made.append(make(row, number))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} row {number}: is no row of the form {form}: {described(error)}") from None
    found = [each for each in made if each is not None]
    if limit is not None and limit < len(found):
        found = [found[i] for i in sorted(random.Random(seed).sample(range(len(found)), limit))]
    if not found:
        raise DataError(f"{path}: no row has a label that can be used")
    return Labelled(
        form=form,
        pairs=tuple(each for each in found if isinstance(each, Pair)),
        items=tuple(each for each in found if isinstance(each, Item)),
        left_out=sum(each is None for each in made),
    )


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {described(error)}") from None
    try:
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is neither a JSON list nor, by its name, JSON lines (.jsonl): {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: holds no list of objects")
    return rows


Make = Callable[[Mapping[str, Any], int], Pair | Item | None]


def _form_of(path: Path, row: Mapping[str, Any]) -> tuple[str, Make]:
    for form, (keys, make) in _FORMS.items():
        if keys <= row.keys():
            return form, make
    forms = "; ".join(f"{form}: {', '.join(sorted(keys))}" for form, (keys, _) in _FORMS.items())
    raise DataError(f"{path}: its first row has {', '.join(row)}, which is none of the forms: {forms}")


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise TypeError(f"{key} is {type(row[key]).__name__}, not text")
    return row[key]


def _rest(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}


def _gold(value: Any, allowed: Sequence[int]) -> int:
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"the label is {value!r}; use {', '.join(map(str, allowed))}")
    return int(value)


def _llmbar(row: Mapping[str, Any], number: int) -> Pair:
    return Pair(
        prompt=_text(row, "input"),
        answers=(_text(row, "output_1"), _text(row, "output_2")),
        gold=_gold(row["label"], (1, 2)),
        columns=_rest(row, "input", "output_1", "output_2", "label"),
    )


def _pandalm(row: Mapping[str, Any], number: int) -> Pair | None:
    """The label of most annotators; None if all three differ. Answers that read like a truth value or a number became
    one when the public file was made."""
    votes = [_gold(row[f"annotator{i}"], (0, 1, 2)) for i in (1, 2, 3)]
    majority = [label for label in (0, 1, 2) if votes.count(label) >= 2]
    if not majority:
        return None
    asked = (_text(row, "instruction"), _text(row, "input"))
    first, _, second = str(row.get("cmp_key", "")).partition("_")
    return Pair(
        prompt="\n\n".join(filter(None, asked)),
        answers=(str(row["response1"]), str(row["response2"])),
        gold=majority[0],
        makers=(first or None, second or None),
        columns={},
    )


def _pairs(row: Mapping[str, Any], number: int) -> Pair:
    used = ("prompt", "answer_1", "answer_2", "label", "maker_1", "maker_2")
    return Pair(
        prompt=_text(row, "prompt"),
        answers=(_text(row, "answer_1"), _text(row, "answer_2")),
        gold=_gold(row["label"], (0, 1, 2)),
        makers=(row.get("maker_1"), row.get("maker_2")),
        columns=_rest(row, *used),
    )


def _chosen(row: Mapping[str, Any], number: int) -> Pair:
    """The better one is first in every other row: a label that never changes could not be agreed with."""
    answers = (_text(row, "chosen"), _text(row, "rejected"))
    first = number % 2 == 1
    return Pair(
        prompt=_text(row, "prompt"),
        answers=answers if first else (answers[1], answers[0]),
        gold=1 if first else 2,
        columns=_rest(row, "prompt", "chosen", "rejected"),
    )


def _item(row: Mapping[str, Any], number: int) -> Item:
    if not isinstance(row["label"], bool | int | float):
        raise ValueError(f"the label is {row['label']!r}; use a number")
    rest = _rest(row, "prompt", "answer", "label")
    return Item(prompt=_text(row, "prompt"), answer=_text(row, "answer"), gold=float(row["label"]), columns=rest)


_FORMS: Mapping[str, tuple[frozenset[str], Make]] = {
    "llmbar": (frozenset({"input", "output_1", "output_2", "label"}), _llmbar),
    "pandalm": (frozenset({"instruction", "input", "response1", "response2", "annotator1"}), _pandalm),
    "pairs": (frozenset({"prompt", "answer_1", "answer_2", "label"}), _pairs),
    "chosen": (frozenset({"prompt", "chosen", "rejected"}), _chosen),
    "items": (frozenset({"prompt", "answer", "label"}), _item),
}
