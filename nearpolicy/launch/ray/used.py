"""Rows of a step as its learner has used them, on their way back to who sent them: which differ from what was sent, how
many tokens of each were trained, and, in a parcel, which and with what advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearpolicy.distant import Loading, Parcel, placed
from nearpolicy.messages import from_runs, runs
from nearpolicy.records import Row

_Key = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class Used:
    """One row, without its segment. ``arrays``: what is trained of it and its advantages, as runs or as the place in
    the parcel; None if the row is as it was sent."""

    key: _Key
    """Group, sample, whether it is replayed."""
    num_trained: int = 0
    num_useful: int = 0
    arrays: tuple[Any, Any] | None = None


def told_rows(rows: Sequence[Row], given: Sequence[Row]) -> tuple[list[Used], bytes]:
    """``given``: the rows as they came. The bytes are those of the parcel; empty if there is nothing in it."""
    as_sent, loading, told = {id(row) for row in given}, Loading(), []
    for row in rows:
        if id(row) in as_sent:
            told.append(Used(_key(row)))
        else:
            arrays = _loaded(loading, row.trained), _loaded(loading, row.advantages)
            told.append(Used(_key(row), row.num_trained, row.num_useful, arrays))
    return told, loading.data()


def rows_told(told: Sequence[Used], parcel: Parcel | None, known: Sequence[Row]) -> tuple[Row, ...]:
    """With the segments, the same objects, of the ``known`` rows that they came from."""
    left: dict[_Key, list[Row]] = {}
    for row in reversed(known):
        left.setdefault(_key(row), []).append(row)
    rows = []
    for used in told:
        row = left[used.key].pop()
        if used.arrays is not None:
            trained, advantages = (_told(array, parcel) for array in used.arrays)
            row = Row.counted(
                used.num_trained,
                used.num_useful,
                group=row.group,
                sample=row.sample,
                segment=row.segment,
                trained=trained,
                advantages=advantages,
                replayed=row.replayed,
            )
        rows.append(row)
    return tuple(rows)


def _key(row: Row) -> _Key:
    return row.group, row.sample, row.replayed


def _loaded(loading: Loading, array: np.ndarray) -> Any:
    short = runs(array)
    return short if type(short) is tuple else (loading.add([array]), array.shape, array.dtype)


def _told(array: Any, parcel: Parcel | None) -> Any:
    if type(array[0]) is str:
        return from_runs(array)
    return placed(parcel, *array)
