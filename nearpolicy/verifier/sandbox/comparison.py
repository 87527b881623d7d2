"""Whether what a program gave is what a test expects. Pure functions over text and plain values.

text     trailing white space is ignored; a number that is expected with a decimal point has a tolerance
values   types are compared exactly: True is not 1, a tuple is no list; expected floats have a tolerance
"""

from __future__ import annotations

import math
import re
from typing import Any

TOLERANCE = 1e-6
"""Relative, and absolute below 1."""
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LONGEST_NUMBER = 400
"""Characters; a longer one is compared as text."""


def same_text(expected: str, found: str) -> bool:
    """``1 2`` is ``1 2 `` and a newline, and not ``12``; 2.718281828 is 2.7182818, and not 2.7183; whole numbers are
    compared digit by digit."""
    wanted, given = _lines(expected), _lines(found)
    return len(wanted) == len(given) and all(map(_same_line, wanted, given))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(expected: str, found: str) -> bool:
    if expected == found:
        return True
    wanted, given = expected.split(), found.split()
    return (
        len(wanted) == len(given)
        and any(_DECIMAL.fullmatch(word) for word in wanted)
        and all(a == b or _close_words(a, b) for a, b in zip(wanted, given, strict=True))
    )


def _close_words(expected: str, found: str) -> bool:
    if max(len(expected), len(found)) > _LONGEST_NUMBER:
        return False
    return bool(_DECIMAL.fullmatch(expected) and _NUMBER.fullmatch(found)) and close(float(expected), float(found))


def close(expected: float, found: float) -> bool:
    """Within the tolerance. Infinities equal themselves, NaN equals nothing."""
    if math.isinf(expected) or math.isinf(found):
        return expected == found
    return abs(expected - found) <= TOLERANCE * max(1.0, abs(expected))


def same_value(expected: Any, found: Any) -> bool:
    """Values as `values.loads` makes them. Lengths are compared before elements."""
    if isinstance(expected, float) and type(found) in (int, float):
        return _close_to_float(expected, found)
    if type(expected) is not type(found):
        return False
    match expected:
        case list() | tuple():
            return len(expected) == len(found) and all(map(same_value, expected, found))
        case dict():
            return len(expected) == len(found) and _same_items(expected, found)
        case set() | frozenset():
            return len(expected) == len(found) and set(map(_typed, expected)) == set(map(_typed, found))
    return bool(expected == found)


def _close_to_float(expected: float, found: float) -> bool:
    try:
        return close(expected, float(found))
    except OverflowError:  # an int beyond all floats
        return False


def _same_items(expected: dict, found: dict) -> bool:
    """Key by key; 1, 1.0 and True are one key to a dict and three here."""
    types = {key: type(key) for key in found}
    own = {key: key for key in found}
    return all(
        key in found and types[key] is type(key) and same_value(key, own[key]) and same_value(value, found[key])
        for key, value in expected.items()
    )


def _typed(member: Any) -> tuple[type, Any]:
    """A member of a set with its type, all the way down: (1,) and (True,) are one member to a set and two here."""
    if isinstance(member, tuple | frozenset):
        return type(member), type(member)(map(_typed, member))
    return type(member), member
