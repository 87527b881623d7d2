"""Sets of real numbers: intervals, inequalities and their unions as one sorted list of pieces."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nearpolicy.verifier.math import evaluation
from nearpolicy.verifier.math.formulas import UNKNOWN_FUNCTIONS
from nearpolicy.verifier.math.tree import (
    Answer,
    Apply,
    Bracketed,
    Expression,
    Reals,
    Region,
    Relation,
    Set,
    Several,
    Symbol,
    Value,
)

_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval; a point is one that is closed on both sides."""

    low: Any
    low_closed: bool
    high: Any
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    pieces: tuple[Piece, ...]
    """Sorted, apart from each other."""
    variable: Expression | None = None
    """What is said to lie in the set, if that is said."""


_ALL = Piece(-_INFINITE, False, _INFINITE, False)


def as_region(answer: Answer) -> RealSet | None:
    """The set of real numbers that an answer describes; None if it describes none, or its ends are no numbers."""
    match answer:
        case Reals():
            return RealSet((_ALL,))
        case Bracketed(left, (Value() as low, Value() as high), right):
            ends = _end(low), _end(high)
            if None in ends or not ends[0] <= ends[1]:
                return None
            return RealSet((Piece(ends[0], left == "[", ends[1], right == "]"),))
        case Set(items):
            points = [_end(item) if isinstance(item, Value) else None for item in items]
            if None in points:
                return None
            return RealSet(_merged([Piece(point, True, point, True) for point in points]))
        case Region(operation, parts):
            return _combined(operation, [as_region(part) for part in parts])
        case Several(items, offered):
            if not all(isinstance(item, Relation) for item in items):
                return None
            return _combined("cup" if offered else "cap", [as_region(item) for item in items])
        case Relation():
            return _solutions(answer)
    return None


def same_region(one: RealSet, other: RealSet) -> bool:
    if None not in (one.variable, other.variable) and one.variable != other.variable:
        return False
    return len(one.pieces) == len(other.pieces) and all(map(_same_piece, one.pieces, other.pieces))


def _same_piece(one: Piece, other: Piece) -> bool:
    closed = (one.low_closed, one.high_closed) == (other.low_closed, other.high_closed)
    return closed and _same_end(one.low, other.low) and _same_end(one.high, other.high)


def _same_end(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return one == other
    return evaluation.same_number(one, other)


def _end(value: Value) -> Any | None:
    """The end of an interval as a number."""
    infinity = evaluation.infinity_of(value.expression)
    return infinity * _INFINITE if infinity else evaluation.real_value(value.expression)


_MIRRORED = {"<": ">", ">": "<", "leq": "geq", "geq": "leq", "neq": "neq"}


def _solutions(relation: Relation) -> RealSet | None:
    """The numbers that fulfil an inequality in one variable: x < 2, 2 > x, 1 < x <= 4, x != 3, x in (1, 4]."""
    match relation:
        case Relation((Value(variable), region), ("in",)):
            found = as_region(region)
            return RealSet(found.pieces, variable) if found else None
        case Relation((Value(left), Value(right)), (operator,)) if operator in _MIRRORED:
            if evaluation.symbols_of(left) and not evaluation.symbols_of(right):
                return _side_of(left, operator, Value(right))
            if evaluation.symbols_of(right) and not evaluation.symbols_of(left):
                return _side_of(right, _MIRRORED[operator], Value(left))
        case Relation((low, middle, high), (first, second)):
            parts = [as_region(Relation((low, middle), (first,))), as_region(Relation((middle, high), (second,)))]
            return _combined("cap", parts)
    return None


def _side_of(variable: Expression, operator: str, bound: Value) -> RealSet | None:
    if not (isinstance(variable, Symbol) or (isinstance(variable, Apply) and variable.operation in UNKNOWN_FUNCTIONS)):
        return None  # to be solved, and not read off
    end = _end(bound)
    if end is None:
        return None
    below, above = Piece(-_INFINITE, False, end, operator == "leq"), Piece(end, operator == "geq", _INFINITE, False)
    pieces = {"<": (below,), "leq": (below,), ">": (above,), "geq": (above,), "neq": (below, above)}[operator]
    return RealSet(pieces, variable)


def _combined(operation: str, parts: list[RealSet | None]) -> RealSet | None:
    known = [part for part in parts if part is not None]
    variables = [part.variable for part in known if part.variable is not None]
    if len(known) < len(parts) or len(set(variables)) > 1:
        return None
    combine = {"cup": _union, "cap": _intersection, "setminus": _without}[operation]
    pieces = functools.reduce(combine, (part.pieces for part in known))
    return RealSet(pieces, variables[0] if variables else None)


Pieces = tuple[Piece, ...]


def _union(one: Pieces, other: Pieces) -> Pieces:
    return _merged([*one, *other])


def _merged(pieces: list[Piece]) -> Pieces:
    """Sorted, with overlapping and touching pieces made one."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.low, not each.low_closed)):
        last = found[-1] if found else None
        if last is None or piece.low > last.high or not (piece.low < last.high or piece.low_closed or last.high_closed):
            found.append(piece)
        elif piece.high > last.high or (piece.high == last.high and piece.high_closed):
            found[-1] = Piece(last.low, last.low_closed, piece.high, piece.high_closed)
    return tuple(found)


def _intersection(one: Pieces, other: Pieces) -> Pieces:
    found = []
    for a in one:
        for b in other:
            low, low_open = max((a.low, not a.low_closed), (b.low, not b.low_closed))
            high, high_closed = min((a.high, a.high_closed), (b.high, b.high_closed))
            if low < high or (low == high and not low_open and high_closed):
                found.append(Piece(low, not low_open, high, high_closed))
    return _merged(found)


def _without(one: Pieces, other: Pieces) -> Pieces:
    for hole in other:
        outside = (
            Piece(-_INFINITE, False, hole.low, not hole.low_closed),
            Piece(hole.high, not hole.high_closed, _INFINITE, False),
        )
        one = _intersection(one, outside)
    return one
