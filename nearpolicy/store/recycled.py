"""Which stored tokens the next attempt at an admission goes on from, and what becomes of them.

    aborted                    the run was stopped
     +-> recycled: in flight   it is taken up, and the next attempt begins with them
          +-> moved            that attempt is stored, whatever became of it: they are in it, and nowhere else
          +-> aborted          it is stored without them, or their weights do not count any more

A rollout moves as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from nearpolicy.records import Admission, Finish, Group, Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The next attempt is stored."""

    index: int
    attempt: int
    """The one whose tokens were kept."""
    moved: Mapping[int, int]
    """Sample -> tokens."""
    left: Mapping[int, int]
    """Likewise, of those that the next attempt does not hold."""
    were_aborted: bool
    """They had been given up before it was stored."""


@dataclass(slots=True)
class _Kept:
    group: Group
    taken: bool = False
    withdrawn: bool = False


class Recycled:
    """Groups by admission. Not for threads: whoever tells a store of groups."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def keep(self, groups: Iterable[Group]) -> None:
        self._kept = {group.index: _Kept(group) for group in groups}

    def oldest_versions(self) -> dict[int, int]:
        """By admission, of what has not been handed out."""
        return {i: kept.group.oldest_version for i, kept in self._kept.items() if not kept.taken}

    def take(self, admission: Admission) -> Group | None:
        """What this attempt goes on from; once."""
        kept = self._kept.get(admission.index)
        if kept is None or kept.taken or admission.attempt <= kept.group.admission.attempt:
            return None
        kept.taken = True
        return kept.group

    def withdraw(self, newest: int) -> list[Group]:
        """Give up those that hold a token of this version or a newer one. Attempts that go on from them already may
        still be stored."""
        stale = [kept for kept in self._kept.values() if not kept.withdrawn and kept.group.newest_version >= newest]
        for kept in stale:
            kept.withdrawn = True
            if not kept.taken:
                del self._kept[kept.group.index]
        return [kept.group for kept in stale]

    def resolve(self, group: Group) -> Resolved | None:
        """``group`` is stored now; None if it is not the attempt after one that was kept."""
        kept = self._kept.get(group.index)
        if kept is None or group.admission.attempt <= kept.group.admission.attempt:
            return None
        del self._kept[group.index]
        now = {rollout.sample: rollout for rollout in group.rollouts} if kept.taken else {}
        moved, left = {}, {}
        for rollout in kept.group.rollouts:
            place = moved if goes_on(rollout, now.get(rollout.sample)) else left
            place[rollout.sample] = rollout.num_sampled
        return Resolved(
            index=group.index,
            attempt=kept.group.admission.attempt,
            moved=moved,
            left=left,
            were_aborted=kept.withdrawn,
        )


def can_go_on(group: Group) -> Group | None:
    """The rollouts of an aborted attempt that the next one may go on from: one turn, and at least one token of it; None
    if there is none."""
    chosen = [
        place
        for place, rollout in enumerate(group.rollouts)
        if len(rollout.segments) == 1 and rollout.num_sampled and rollout.finish is not Finish.FAILED
    ]
    if not chosen:
        return None
    return replace(
        group,
        rollouts=tuple(group.rollouts[place] for place in chosen),
        verdicts=tuple(group.verdicts[place] for place in chosen),
        rewards=tuple(group.rewards[place] for place in chosen),
        baseline=None,
    )


def goes_on(before: Rollout, now: Rollout | None) -> bool:
    """Whether a rollout begins with all of an earlier one, bit for bit."""
    if now is None or not now.segments:
        return False
    [old], new = before.segments, now.segments[0]
    return all(np.array_equal(a, b[: len(a)]) for a, b in zip(_tokens(old), _tokens(new), strict=True))


def _tokens(segment: Segment) -> tuple[np.ndarray, ...]:
    return segment.token_ids, segment.versions, np.asarray(segment.behavior_logprobs).view(np.int32)
