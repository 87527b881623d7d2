"""Who waits for whom, since when: every wait of a run has a name here while it lasts.

    with waiting("learner", "a batch"):
        await ...

One table per process, as with logging: a wait is entered where it happens, and read where somebody asks why a run
stands still (`nearpolicy why`). It costs a dictionary entry.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait that goes on."""

    who: str
    what: str
    """What it waits for."""
    since: float
    """By the monotonic clock."""


_waits: dict[int, Wait] = {}
_numbers = itertools.count()


class waiting:
    """Inside, ``who`` waits for ``what``. From any thread. A class, since there are several waits to each of thousands
    of groups, and a context that is made of a generator costs more."""

    __slots__ = ("_number", "_wait")

    def __init__(self, who: str, what: str) -> None:
        self._wait = who, what

    def __enter__(self) -> None:
        self._number = next(_numbers)
        _waits[self._number] = Wait(*self._wait, time.monotonic())

    def __exit__(self, *error: object) -> None:
        del _waits[self._number]


def waits() -> list[Wait]:
    """Those that go on, the longest first."""
    return sorted(_waits.copy().values(), key=lambda wait: wait.since)
