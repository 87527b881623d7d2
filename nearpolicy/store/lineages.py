"""Which weights a (lineage, version) names, and which of them count.

    lineage 0   0 - 1 - 2 - 3 - 4 - 5         rolled back to version 3: lineage 1 begins with version 4
                            |
    lineage 1               +-- 4 - 5 - 6     what counts: 0.0 0.1 0.2 0.3 1.4 1.5 1.6

A rollback opens a lineage, and so does a run that is taken up and learns recorded batches to other bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nearpolicy.records import Branch


class Lineages:
    """The branches of one run."""

    def __init__(self, branches: Iterable[Branch]) -> None:
        self._branches = {branch.lineage: branch for branch in branches}

    @property
    def newest(self) -> int:
        return max(self._branches, default=0)

    def next(self, first: int, kind: str, reason: str) -> Branch:
        """Of the newest lineage, from the version ``first`` on."""
        return Branch(lineage=self.newest + 1, parent=self.newest, first=first, kind=kind, reason=reason)

    def with_branch(self, branch: Branch) -> Lineages:
        return Lineages([*self._branches.values(), branch])

    def of(self, version: int) -> int:
        """The lineage whose weights count as this version."""
        lineage = self.newest
        while (branch := self._branches.get(lineage)) is not None and version < branch.first:
            lineage = branch.parent
        return lineage

    def stretches(self) -> Iterator[tuple[int, int, int | None]]:
        """(lineage, first, last) of the versions that count, newest first; the newest one has no last."""
        lineage, last = self.newest, None
        while (branch := self._branches.get(lineage)) is not None:
            yield lineage, branch.first, last
            last = branch.first - 1 if last is None else min(last, branch.first - 1)
            lineage = branch.parent
        yield lineage, 0, last

    def counts(self, lineage: int, version: int) -> bool:
        return self.of(version) == lineage
