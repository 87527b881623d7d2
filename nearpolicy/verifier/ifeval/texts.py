"""What a word, a sentence and a paragraph are, and what of a text is there to be seen. All in linear time.

No expression here is searched for again inside what it has already looked through: a repetition that may fail at its
end begins only where the character before it does not belong to it, or is bounded.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator

_UNSEEN = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f"  # control characters, but not white space
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"  # zero width, joiners, directions, fillers
)


def seen(text: str) -> str:
    """A text without what nobody sees: a word with a zero-width space in it is the word. Lines end with ``\\n``."""
    return _UNSEEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


_WORD = re.compile(r"\w+")


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores: ``don't`` is two. A vowel sign belongs to the letter it is written on,
    so a word of an Indian script is one."""
    return sum(1 for _ in _WORD.finditer(_without_marks(text)))


def _without_marks(text: str) -> str:
    if text.isascii():
        return text
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


_SPELT = re.compile(r"(?:\w\.){2,}|\w+(?:[-'\u2019]\w+)*")


def spelt_words(text: str) -> Iterator[str]:
    """Words as they are spelt: ``don't``, ``COVID-19`` and ``U.S.`` are one each."""
    return (match[0] for match in _SPELT.finditer(text))


def paragraphs(text: str) -> list[str]:
    """What blank lines separate; none of them is blank."""
    parts = itertools.groupby(text.split("\n"), key=lambda line: bool(line.strip()))
    return ["\n".join(lines) for written, lines in parts if written]


# Sentences

_END = re.compile(
    r"""
      [\u3002\uff01\uff1f]                            # Chinese and Japanese: whatever follows
    | (?<![.!?\u2026\u0964\u0965\u061f\u06d4])        # from the first mark of a row, so that no row is read twice
      (?P<marks>[.!?\u2026\u0964\u0965\u061f\u06d4]++)
      (?P<closing>["'\u2019\u201d\u00bb)\]}*_~`]{0,8})
      (?=\s|\Z)
    """,
    re.VERBOSE,
)
_LOOK_BACK = 24
"""Characters before a full stop that tell whether it ends a sentence."""
_OPENING = "\"'\u2018\u201c([{*_~`"
_NUMBERING = re.compile(r"(?:\A|\n)[\s>#*_-]*(?:\d{1,3}|[A-Za-z])\Z")
_DOTTED = re.compile(r"(?:\w\.)+\w\Z")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TITLES = _words("mr mrs ms mx dr prof rev capt lt sgt st mt sen gov messrs mme mlle")
"""A name follows, so a full stop behind one ends nothing."""
_SHORT_FORMS = _words(
    "jr sr etc vs cf al approx dept inc ltd co vol pp ed eds ave blvd tel ext jan feb aug sep sept oct nov dec"
)
"""The full stop behind one also ends a sentence where a capital letter follows."""


def count_sentences(text: str) -> int:
    """Stretches with a word in them, each up to a full stop, exclamation or question mark before white space.

    A line break ends no sentence, and text behind the last mark is one. Marks that end none: those of abbreviations,
    initials (``J. Doe``), numbering (``1.`` at the beginning of a line), dots before a small letter (``well... no``).
    """
    count, begin = 0, 0
    for match in _END.finditer(text):
        if _ends_sentence(text, match):
            count += _WORD.search(text, begin, match.end()) is not None
            begin = match.end()
    return count + (_WORD.search(text, begin) is not None)


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    marks, after = match["marks"], _next_character(text, match.end())
    if marks is None or not after:
        return True
    if marks == "\u2026" or (len(marks) > 1 and set(marks) == {"."}):
        return not after.islower()
    if marks != ".":
        return True
    start = match.start()
    before = text[max(0, start - _LOOK_BACK) : start]
    if not before[-1:].isalnum():
        return True
    if _NUMBERING.search(before if start <= _LOOK_BACK else "\x00" + before):  # \A is the beginning of the text only
        return False
    word = before.split()[-1].lstrip(_OPENING)
    if word.lower() in _TITLES or (len(word) == 1 and word.isalpha() and word != "I" and after.isupper()):
        return False
    if word.lower() in _SHORT_FORMS or _DOTTED.match(word):
        return after.isupper()
    return True


def _next_character(text: str, place: int) -> str:
    """The first character behind white space, quotes and brackets; empty at the end. Looks a few characters ahead."""
    return text[place : place + _LOOK_BACK].lstrip(" \t\n" + _OPENING)[:1]
