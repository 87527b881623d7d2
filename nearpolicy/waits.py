"""Who waits for whom, since when: every wait of a run has a name here while it lasts.

    with waiting("learner", "a batch"):
        await ...

One table per process, as with logging: a wait is entered where it happens, and read where somebody asks why a run
stands still (`nearpolicy why`). It costs a dictionary entry.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def waiting(who: str, what: str) -> Iterator[None]:
    """Inside, ``who`` waits for ``what``. From any thread."""
    number = next(_numbers)
    _waits[number] = Wait(who, what, time.monotonic())
    try:
        yield
    finally:
        del _waits[number]


def waits() -> list[Wait]:
    """Those that go on, the longest first."""
    return sorted(_waits.copy().values(), key=lambda wait: wait.since)
