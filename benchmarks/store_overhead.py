"""What the record costs a run: `python -m benchmarks.store --overhead recipes/tiny.yaml [run.steps=3 ...]`.

The recipe is run once, in a folder that is removed again, with a store that keeps time: how long each call kept the
thread that made it (also while it waited for the interpreter), and the processor time of the writer's thread. Both
together, as a share of the wall time of training, are the most that the record can have cost: in truth the writer runs
beside the roles. Calls outside training (evaluations before and after) are counted too.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from nearpolicy.store.commits import Commits
from nearpolicy.store.writer import SqliteStore

CALLS = (
    "admitted", "filled", "consumed", "discarded", "retried", "lost", "published", "event", "evaluated", "note",
    "checkpointed", "flush",
)  # fmt: skip


@dataclass
class Times:
    """Of one run."""

    in_calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By the thread that made them."""
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    longest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    writer_cpu: float = 0.0


TIMES = Times()


class TimedCommits(Commits):
    def _write(self) -> None:
        super()._write()
        TIMES.writer_cpu += time.thread_time()  # of the writer's thread, which is this one


class TimedStore(SqliteStore):
    """Keeps time of all that it is told."""


def _timed(name: str) -> Callable[..., Any]:
    method = getattr(SqliteStore, name)

    @wraps(method)
    def timed(self: TimedStore, *arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            spent = time.perf_counter() - begin
            TIMES.in_calls[threading.current_thread().name] += spent
            TIMES.calls[name] += 1
            TIMES.longest[name] = max(TIMES.longest[name], spent)

    return timed


for _name in CALLS:
    setattr(TimedStore, _name, _timed(_name))


def overhead(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from nearpolicy.config import load_recipe
    from nearpolicy.launch import runtime, session
    from nearpolicy.store import writer

    runtime.SqliteStore, writer.Commits = TimedStore, TimedCommits
    with tempfile.TemporaryDirectory() as folder:
        config = load_recipe(recipe, [*overrides, f"run.dir={folder}/run"])
        summary = session.run_session(session.Session(config=config))
    wall, in_calls = summary["wall_s"], sum(TIMES.in_calls.values())
    return {
        "recipe": str(recipe), "overrides": list(overrides), "steps": summary["steps"], "wall_s": wall,
        "calls_s": {thread: round(spent, 4) for thread, spent in TIMES.in_calls.items()},
        "calls": dict(TIMES.calls),
        "longest_call_ms": {name: round(1e3 * spent, 2) for name, spent in TIMES.longest.items()},
        "writer_cpu_s": round(TIMES.writer_cpu, 3),
        "share_of_wall": round((in_calls + TIMES.writer_cpu) / wall, 4),
    }  # fmt: skip
