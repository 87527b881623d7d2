"""Who waits for whom: the share of its time that the learner spent on waiting for batches, from one publication to the
next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

NEVER_WAITS, WAITS_TOO_LONG = 0.01, 0.05
"""Shares of the learner's time: below the first it is the bottleneck, above the second generation is."""


class Pace:
    """Measured since the last publication."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._waited_s = 0.0
        self._begin = clock()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """The learner, as long as the context lasts."""
        begin = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - begin

    def begin_anew(self) -> float | None:
        """The share up to now; None if no time has passed."""
        passed, waited = self._clock() - self._begin, self._waited_s
        self._begin, self._waited_s = self._begin + passed, 0.0
        return waited / passed if passed > 0 else None
