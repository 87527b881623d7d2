"""What a run says to its record, as data: it can wait in a queue, and travel to another process.

An admission, a group and an event stand for themselves, since there are many of each. Everything else is a `Call`: a
verb and what it is about. Groups that the store holds already are not said a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nearpolicy.errors import NearpolicyError
from nearpolicy.records import Admission, Batch, Event, Group, Prompt, Row, StepReport
from nearpolicy.store.payload import Trained, encode_json

Key = tuple[int, int]
"""Admission, attempt."""


class Call(NamedTuple):
    """``verb``: a method of `nearpolicy.store.statements.Statements`, which gets ``arguments``."""

    verb: str
    arguments: tuple[Any, ...]


Said = Admission | Group | Event | Call


class PackedPrompt(NamedTuple):
    """A prompt on its way to another process, without what does not leave its own."""

    task: str
    data: bytes


def prompt_data(prompt: Prompt | PackedPrompt) -> bytes:
    """All of it that is stored, but for its task."""
    if isinstance(prompt, PackedPrompt):
        return prompt.data
    return encode_json({"id": prompt.id, "text": prompt.text, "messages": prompt.messages, "columns": prompt.columns})


class Left(NamedTuple):
    """A group that ends without a step."""

    admission: Admission
    sampled: Mapping[int, int]
    """Sample -> tokens."""
    unsaid: Group | None
    """The group itself, unless the store holds it."""

    @property
    def key(self) -> Key:
        return key_of(self.admission)


def left(group: Group, *, is_held: bool) -> Left:
    sampled = {rollout.sample: rollout.num_sampled for rollout in group.everything}
    return Left(group.admission, sampled, None if is_held else group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step has used, without the tokens."""

    step: int
    places: int
    version: int
    updates: int
    groups: Sequence[Key]
    """In the order of their places."""
    trained: Sequence[tuple[Key, Sequence[Trained]]]
    """Rows of a group."""
    replayed: Sequence[tuple[Key, int, Trained]]
    """Each row that was trained once more, of which group, and how many of its tokens."""


def step_of(batch: Batch, report: StepReport) -> Step:
    rows = report.rows or batch.rows
    return Step(
        step=batch.step,
        places=batch.places,
        version=report.version,
        updates=report.updates,
        groups=[key_of(group.admission) for group in batch.groups],
        trained=_trained(batch.groups, [row for row in rows if not row.replayed]),
        replayed=_replayed(batch.replayed, [row for row in rows if row.replayed]),
    )


def _trained(groups: Sequence[Group], rows: Sequence[Row]) -> list[tuple[Key, list[Trained]]]:
    by_index = {group.index: group for group in groups}
    by_group: dict[int, list[Trained]] = {}
    for row in rows:
        by_group.setdefault(row.group, []).append(_trained_of(by_index[row.group], row))
    return [(key_of(by_index[index].admission), placed) for index, placed in by_group.items()]


def _replayed(groups: Sequence[Group], rows: Sequence[Row]) -> list[tuple[Key, int, Trained]]:
    by_index = {group.index: group for group in groups}
    found = [(by_index[row.group], row) for row in rows]
    return [(key_of(group.admission), row.num_trained, _trained_of(group, row)) for group, row in found]


def _trained_of(group: Group, row: Row) -> Trained:
    return Trained(int(row.sample), _segment_index(group, row), row.trained, row.advantages)


def _segment_index(group: Group, row: Row) -> int:
    rollout = next(r for r in group.rollouts if r.sample == row.sample)
    for place, segment in enumerate(rollout.segments):
        if segment is row.segment:
            return place
    raise NearpolicyError(f"a row of group {row.group}, sample {row.sample} trains a segment that is not the group's")


def key_of(admission: Admission) -> Key:
    return int(admission.index), int(admission.attempt)
