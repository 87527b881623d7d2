"""Sampled tokens by fate as a run goes on, so that every step can tell them without asking the database.

What the store's calls say is counted when they are made; the database holds the same as soon as they are committed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping

from nearpolicy.records import Fate, Group, Row
from nearpolicy.store.recycled import Resolved
from nearpolicy.store.schema import IN_FLIGHT

Key = tuple[int, int]
"""Admission, attempt."""


class TokenCounts:
    """Not for threads: whoever tells a store of groups."""

    def __init__(self, counts: Mapping[Fate, int], waiting: Mapping[Key, int], replayed: Mapping[int, int]) -> None:
        """``counts``: of groups that have ended. ``waiting``: tokens of stored groups that have not, or that were
        recycled. ``replayed``: by step."""
        self._counts, self._waiting, self._replayed = Counter(counts), dict(waiting), dict(replayed)

    @classmethod
    def of(cls, database: sqlite3.Connection) -> TokenCounts:
        """What a store holds, of any schema."""
        counts = {Fate(fate): n for fate, n in database.execute("SELECT fate, sum(tokens) FROM fates GROUP BY fate")}
        waiting = {(index, attempt): tokens for index, attempt, tokens in database.execute(IN_FLIGHT)}
        has_replayed = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'replayed'").fetchone()
        by_step = "SELECT step, sum(tokens) FROM replayed GROUP BY step"
        return cls(counts, waiting, dict(database.execute(by_step).fetchall()) if has_replayed else {})

    def is_held(self, group: Group) -> bool:
        """Whether the store holds it, and it has not ended; False also of a group without tokens that it held before
        the run went on."""
        return _key(group) in self._waiting

    def filled(self, group: Group) -> None:
        self._waiting[_key(group)] = group.num_sampled

    def ended(self, groups: Iterable[Group], fates: Iterable[Mapping[Fate, int]]) -> None:
        """``fates``: of all rollouts of all these groups."""
        for group in groups:
            self._waiting.pop(_key(group), None)
        for of_rollout in fates:
            self._counts.update(of_rollout)

    def discarded(self, group: Group, fate: Fate) -> None:
        self.ended([group], [{fate: group.num_sampled}])

    def recycled(self, groups: Iterable[Group]) -> None:
        """Aborted before, and in flight again."""
        for group in groups:
            self._counts[Fate.ABORTED] -= group.num_sampled - self._waiting.get(_key(group), 0)
            self._waiting[_key(group)] = group.num_sampled

    def given_up(self, groups: Iterable[Group]) -> None:
        """Recycled before, and aborted after all."""
        for group in groups:
            self._counts[Fate.ABORTED] += self._waiting.pop(_key(group), 0)

    def resolved(self, found: Iterable[Resolved]) -> None:
        """The next attempts are stored, and counted apart."""
        for each in found:
            if each.were_aborted:
                self._counts[Fate.ABORTED] -= sum(each.moved.values())
            else:
                del self._waiting[each.index, each.attempt]
                self._counts[Fate.ABORTED] += sum(each.left.values())

    def replayed(self, step: int, rows: Iterable[Row]) -> None:
        self._replayed[step] = sum(row.num_trained for row in rows if row.replayed)

    def undone(self, first: int) -> None:
        """Steps from this one on do not count; what became of their tokens is as it was."""
        self._replayed = {step: tokens for step, tokens in self._replayed.items() if step < first}

    def told(self) -> dict[Fate, int]:
        """Tokens by fate; fates without any are left out."""
        apart = {Fate.IN_FLIGHT: sum(self._waiting.values()), Fate.REPLAYED: sum(self._replayed.values())}
        found = {**self._counts, **apart}
        return {fate: tokens for fate, tokens in found.items() if tokens}


def _key(group: Group) -> Key:
    return group.index, group.admission.attempt
