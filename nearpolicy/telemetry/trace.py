"""The first steps of a run as a trace that Perfetto (or chrome://tracing) opens: one track per role, every decode step,
phases of the learner and of publication, waits with their causes, steps as marks.

The format is Chrome's trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SLOTS = 64
"""Tracks of a role whose work overlaps (verification): one each for as many as run at once."""


class Trace:
    """Collects what roles tell until ``num_steps`` steps have been logged; then writes the file, once."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self._path = path
        self._left = num_steps
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[tuple[str, int], int] = {}
        """(role, place among those that overlap) -> number of its track."""
        self._ends: dict[str, list[float]] = {}
        """By role: when the last event of each of its tracks ended."""

    def add(
        self, role: str, kind: str, start: float, seconds: float | None, about: Mapping[str, Any], instance: int = 0
    ) -> None:
        """``start`` and ``seconds`` as in `nearpolicy.records.Event`; no seconds make a mark."""
        if not self._left:
            return
        lane = f"{role} {instance}" if instance else role
        event = {"name": kind, "cat": role, "pid": 1, "ts": round(start * 1e6, 1), "args": dict(about)}
        if seconds is None:
            event |= {"ph": "i", "s": "t", "tid": self._track(lane, 0)}
        else:
            event |= {"ph": "X", "dur": round(seconds * 1e6, 1), "tid": self._free_track(lane, start, start + seconds)}
        self._events.append(event)

    def step(self, step: int, now: float) -> None:
        """A step has been logged."""
        if not self._left:
            return
        self._events.append(
            {"name": f"step {step}", "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": round(now * 1e6, 1), "args": {}}
        )
        self._left -= 1
        if not self._left:
            self._write()

    def close(self) -> None:
        """The run ended, perhaps before so many steps."""
        if self._left:
            self._left = 0
            self._write()

    def _free_track(self, lane: str, start: float, end: float) -> int:
        ends = self._ends.setdefault(lane, [])
        place = next((i for i, busy_until in enumerate(ends) if busy_until <= start + 1e-6), len(ends))
        if place == len(ends) and place < _SLOTS:
            ends.append(end)
        else:
            place = min(place, _SLOTS - 1)
            ends[place] = max(ends[place], end)
        return self._track(lane, place)

    def _track(self, lane: str, place: int) -> int:
        return self._tracks.setdefault((lane, place), len(self._tracks) + 1)

    def _write(self) -> None:
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 1,
                "tid": tid,
                "args": {"name": f"{lane} ({place})" if place else lane},
            }
            for (lane, place), tid in self._tracks.items()
        ]
        names.append({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "nearpolicy"}})
        self._path.write_text(json.dumps({"traceEvents": names + self._events, "displayTimeUnit": "ms"}), "utf-8")
