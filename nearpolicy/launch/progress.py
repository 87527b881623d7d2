"""How far an evaluation is: a bar in a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 30.0
"""Seconds between two lines where there is no terminal."""


@contextmanager
def progress(total: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Gives a function to call once for each of ``total`` answers."""
    with _bar(total) if sys.stdout.isatty() else _lines(total, say) as advance:
        yield advance


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    from rich import progress as rich

    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("answers"), rich.TimeRemainingColumn())
    with rich.Progress(*columns, transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda: shown.advance(task)


@contextmanager
def _lines(total: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    begin = said = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, said
        done += 1
        now = time.monotonic()
        if now - said >= EVERY_S and done < total:
            said = now
            say(f"  {done:,} of {total:,} answers after {now - begin:.0f} s")

    yield advance
