"""Which page holds what: accounting without tensors, under one bound on the pages in use.

Pages have a fixed size and a number. Two areas:

    0                   never written, all zero
    1 .. shared         prefixes: counted by holders, found again by their tokens (`SharedPages`)
    behind it           what decoding sequences have of their own: row r of level o (`RowPages`)

A decoding sequence reads the full pages of its prefix where they lie, beside the others that began alike, and goes on
in pages of its own. Level o holds the o-th own page of every sequence that has one, without gaps: the keys of a level
are then one block of memory that attention reads in place, and a step gathers nothing. When a sequence ends, the last
row of each of its levels moves into the hole: one copy of a page now and then instead of one of all in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from nearpolicy.models.attention import PAGE

EMPTY = 0


class Budget:
    """How many pages may be in use at once, in both areas together."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.used = 0

    @property
    def free(self) -> int:
        return self.num_pages - self.used

    def take(self, count: int) -> None:
        if count > self.free:
            raise RuntimeError(f"{count} pages wanted, {self.free} of {self.num_pages} are free")
        self.used += count

    def give(self, count: int) -> None:
        self.used -= count


class SharedPages:
    """Pages of prefixes. What nobody holds any more stays findable until its room is needed, or its weights go."""

    ROOT = 0
    """The place in the tree before the first page."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._unused = list(range(budget.num_pages, 0, -1))
        self._holders = [0] * (budget.num_pages + 1)
        self._found: dict[tuple[int, bytes], tuple[int, int]] = {}
        """(place of the page before, tokens) -> (place, page). Places are never used twice: an exact key."""
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Findable pages that nobody holds, the longest idle first."""
        self._places = self.ROOT

    def allocate(self, count: int) -> list[int]:
        self._budget.take(count)
        pages = []
        for _ in range(count):
            if not self._unused:
                self._forget(next(iter(self._idle)))
            pages.append(self._unused.pop())
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more holder of pages that stay as they are."""
        for page in pages:
            if self._holders[page] == 0:
                self._budget.take(1)
                del self._idle[page]
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # of a prefix that nobody needs, the end is forgotten first
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._budget.give(1)
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._unused.append(page)

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def find(self, place: int, tokens: bytes) -> tuple[int, int] | None:
        """(place, page) of the page that continues ``place`` with these tokens."""
        return self._found.get((place, tokens))

    def remember(self, place: int, tokens: bytes, page: int) -> int:
        """The page is computed: others may find it. Returns the place after it."""
        key = (place, tokens)
        if key not in self._found:
            self._places += 1
            self._found[key] = (self._places, page)
            self._key_of[page] = key
        return self._found[key][0]

    def in_use(self) -> set[int]:
        """Held or findable."""
        return {page for page, holders in enumerate(self._holders) if holders} | self._key_of.keys()

    def forget_all(self) -> None:
        """Nothing computed so far is found again (K26); pages stay with those who hold them."""
        for page in list(self._key_of):
            self._forget(page)

    def _forget(self, page: int) -> None:
        del self._found[self._key_of.pop(page)]
        if page in self._idle:
            del self._idle[page]
            self._unused.append(page)


class HasRows(Protocol):
    """A decoding sequence: the row of its own page in each level."""

    rows: list[int]


S = TypeVar("S", bound=HasRows)


class RowPages(Generic[S]):
    """The own pages of decoding sequences, level by level, each level without gaps."""

    def __init__(self, budget: Budget, max_rows: int, max_levels: int) -> None:
        self._budget = budget
        self._first = budget.num_pages + 1
        self._max_rows = max_rows
        self.levels: list[list[S]] = [[] for _ in range(max_levels)]
        """Who has which row. Level 0 holds everyone: it is the order of rows in a decoding step."""
        self.copies: dict[int, int] = {}
        """Page -> the page whose content it takes before the next forward pass."""
        self.changes = 0
        """Grows with every change of who has which row."""

    @property
    def num_pages(self) -> int:
        """Of both areas and the empty one: how far numbers go."""
        return self._first + self._max_rows * len(self.levels)

    def page(self, level: int, row: int) -> int:
        return self._first + level * self._max_rows + row

    def pages_of(self, sequence: S) -> list[int]:
        return [self.page(level, row) for level, row in enumerate(sequence.rows)]

    def append(self, sequence: S, content_of: int | None = None) -> None:
        """The sequence's next page, with the content of another one or none."""
        self._budget.take(1)
        level = len(sequence.rows)
        row = len(self.levels[level])
        self.levels[level].append(sequence)
        sequence.rows.append(row)
        self.changes += 1
        if content_of is not None:
            self.copies[self.page(level, row)] = content_of

    def drop(self, sequence: S) -> None:
        """Give back everything; the last row of each level takes the place."""
        self._budget.give(len(sequence.rows))
        for level, row in enumerate(sequence.rows):
            held = self.levels[level]
            last = held.pop()
            target, source = self.page(level, row), self.page(level, len(held))
            self.copies.pop(target, None)
            if last is not sequence:
                held[row] = last
                last.rows[level] = row
                origin = self.copies.pop(source, source)  # a copy that is still to come takes the short way
                if origin != target:
                    self.copies[target] = origin
        sequence.rows.clear()
        self.changes += 1

    def take_copies(self) -> dict[int, int]:
        """What is to be copied now, all sources before any target is written."""
        copies, self.copies = self.copies, {}
        return copies


def page_tokens(tokens: Sequence[int], page: int) -> bytes:
    """The tokens of a full page as a key."""
    return np.asarray(tokens[page * PAGE : (page + 1) * PAGE], dtype=np.int32).tobytes()


def pages_for(length: int) -> int:
    """Pages that ``length`` positions take."""
    return -(-length // PAGE)
