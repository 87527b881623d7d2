"""Which rows of a step do what: add to the loss, stand in which minibatch, count as used. No tensors, no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nearpolicy.objectives.objective import TokenObjective
from nearpolicy.records import Batch, Row


def trained_rows(rows: Sequence[Row]) -> list[int]:
    """Indices of the rows with a trained token."""
    return [i for i, row in enumerate(rows) if row.trained.any()]


def useful_rows(rows: Sequence[Row], wanted: Sequence[int], objective: TokenObjective) -> list[int]:
    """Those of ``wanted`` whose tokens can contribute to the loss: whole rollouts, so that none is cut."""
    trained = [i for i in wanted if rows[i].trained.any()]
    if not objective.skips_zero_advantage:
        return trained
    with_signal = {(rows[i].group, rows[i].sample) for i in trained if rows[i].advantages.any()}
    return [i for i in trained if (rows[i].group, rows[i].sample) in with_signal]


def as_used(row: Row, applied: np.ndarray, objective: TokenObjective) -> Row:
    """The row with only those tokens trained that an applied update has seen ([T] bool), or that need none."""
    skipped = objective.skips_zero_advantage and not row.advantages.any()
    if skipped or np.array_equal(applied, row.trained):
        return row
    return replace(row, trained=applied, advantages=np.where(applied, row.advantages, 0.0))


def minibatches(batch: Batch, rows: Sequence[Row], count: int) -> list[list[int]]:
    """Row indices of ``count`` equal parts of the step's places, in order; replayed groups are dealt out."""
    by_place = {group.index: place for place, group in enumerate(batch.groups)}
    per_part = batch.places / count
    part_of = {index: int(place / per_part) for index, place in by_place.items()}
    part_of |= {group.index: place % count for place, group in enumerate(batch.replayed)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, row in enumerate(rows):
        parts[part_of[row.group]].append(i)
    return parts


def segment_places(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """(group, sample, place of the segment) of each row."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    places = []
    for row in rows:
        key = (row.group, row.sample)
        places.append((*key, counts[key]))
        counts[key] += 1
    return places
