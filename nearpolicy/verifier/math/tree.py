"""What an answer says: expressions, which have a value, and the shapes that answers are given in.

Trees are immutable and small: `notation.LONGEST` and `grammar.DEEPEST` bound them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """A decimal or integer, exactly as written: 0.333 is 333/1000."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base: 132_5."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """pi, e, i or infty."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation on values: + * / ^ neg, one of `notation.FUNCTIONS`, or one that means nothing by itself
    (``f(x)``)."""

    operation: str
    arguments: tuple[Expression, ...]


Expression = Number | Based | Symbol | Constant | Apply


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, and the unit or label beside it."""

    expression: Expression
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Words, with a single blank between them and in lower case."""

    words: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of a multiple choice with what it stands for: (B) 12."""

    letter: str
    content: Answer


@dataclass(frozen=True, slots=True)
class Several:
    """Answers side by side, in any order: 3, 5 and 7. ``offered``: as alternatives, with 'or'."""

    items: tuple[Answer, ...]
    offered: bool = False


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A point, a vector or an interval: which one the brackets do not tell."""

    left: str
    items: tuple[Answer, ...]
    right: str


@dataclass(frozen=True, slots=True)
class Set:
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Reals:
    """All real numbers."""


@dataclass(frozen=True, slots=True)
class Region:
    """cup, cap or setminus of sets and intervals."""

    operation: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain: sides[0] operators[0] sides[1] ...; operators are = neq < > leq geq approx in."""

    sides: tuple[Answer, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """3:5, or a time of day."""

    terms: tuple[Answer, ...]
    unit: str = ""


Answer = Value | Text | Choice | Several | Bracketed | Set | Reals | Region | Relation | Matrix | Ratio
