"""What a run says of itself while it works, for `nearpolicy why`, and what it says when nothing moves.

A thread writes ``status.json`` into the run folder every `EVERY_S` seconds: process, step, waits, what each role told
last, where the tasks of the event loop stand. On SIGUSR1 the interpreter writes the stacks of all threads into
``stacks.txt``, also while every thread is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import platform
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nearpolicy.waits import waits

STATUS, STACKS = "status.json", "stacks.txt"
EVERY_S = 2.0
_TOP = 5


class Watch:
    """Watches the run whose event loop calls `start`; use `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        last_events: Callable[[], Mapping[str, tuple[str, float]]],
        say: Callable[[str], None],
        quiet_s: float,
    ) -> None:
        """``last_events``: role -> (kind, seconds ago). ``quiet_s``: after so long without any event of a role, say who
        waits for whom."""
        self._folder = folder
        self._last_events = last_events
        self._say = say
        self._quiet_s = quiet_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._stacks: Any = None
        self._told = False
        self.step = 0
        """Steps completed."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stacks = (self._folder / STACKS).open("w")
        with contextlib.suppress(AttributeError, ValueError, OSError):  # a system without the signal
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(AttributeError, ValueError):
            faulthandler.unregister(signal.SIGUSR1)
        if self._stacks is not None:
            self._stacks.close()
        for name in (STATUS, STACKS):
            (self._folder / name).unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            status = self.status()
            with contextlib.suppress(OSError):  # a full disk is told of by those who need it
                draft = self._folder / f".{STATUS}.tmp"
                draft.write_text(json.dumps(status))
                draft.replace(self._folder / STATUS)
            self._tell_if_nothing_moves(status)

    def _tell_if_nothing_moves(self, status: Mapping[str, Any]) -> None:
        quiet = min((seconds for _, seconds in self._last_events().values()), default=0.0)
        if quiet < self._quiet_s:
            self._told = False
        elif not self._told:
            self._told = True
            self._say(
                f"nothing has moved for {quiet:.0f} s: {'; '.join(in_words(status)[:_TOP]) or 'nobody waits'}. "
                f"`nearpolicy why {self._folder}` shows stacks"
            )

    def status(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "node": platform.node(),
            "pid": os.getpid(),
            "wall": time.time(),
            "step": self.step,
            "waits": [{"who": w.who, "for": w.what, "seconds": round(now - w.since, 1)} for w in waits()],
            "last_events": {
                role: {"kind": kind, "seconds_ago": round(seconds, 1)}
                for role, (kind, seconds) in self._last_events().items()
            },
            "tasks": self._tasks(),
        }

    def _tasks(self) -> list[dict[str, Any]]:
        """Where tasks stand, those that stand in one place together."""
        places: Counter[str] = Counter()
        for _ in range(3):
            try:
                for task in asyncio.all_tasks(self._loop):
                    places[_place(task)] += 1
                break
            except RuntimeError:  # tasks came and went meanwhile
                places.clear()
        return [{"count": count, "at": place} for place, count in places.most_common(20)]


def _place(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    if not stack:
        return "done"
    frame = stack[-1]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"


def in_words(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each who waits for the same, the longest wait first."""
    together: dict[tuple[str, str], list[float]] = {}
    for wait in status["waits"]:
        together.setdefault((wait["who"], wait["for"]), []).append(wait["seconds"])
    return [
        f"{who}{f' ({len(seconds)} of them)' if len(seconds) > 1 else ''} waits for {what} since {max(seconds):.0f} s"
        for (who, what), seconds in together.items()
    ]
