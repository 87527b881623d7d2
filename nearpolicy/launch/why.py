"""``nearpolicy why RUN``: who waits for whom, since when, and where each thread stands; or how the run ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.launch.watch import EVERY_S, STACKS, STATUS, in_words
from nearpolicy.launch.words import count

if TYPE_CHECKING:
    from nearpolicy.store.folder import RunFolder

STACKS_WITHIN_S = 5.0
LOOK_EVERY_S = 0.1
_OLD_S = 5 * EVERY_S
_ENDS_WITHIN_S = 15.0
"""What the actors of a controller that has died take to end, with room to spare."""


def command(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Say why a run stands where it stands: waits, roles, stacks; of one that has ended, what is left to do."""
    from nearpolicy.store.reader import RunReader

    with RunReader(run) as reader:  # refuses what is no run
        found = alive(run) if is_written(reader.folder.lock) else None
        lines = ended(reader) if found is None else living(run, found)
    for line in lines:
        print(line)
    print(json.dumps({"alive": found is not None, **(found or {})}))


def is_written(lock: Path) -> bool:
    """Whether a process holds the folder."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def let_go(folder: RunFolder) -> bool:
    """Whether nobody writes the run. If its controller has died on this machine, and the record's actor has not noticed
    yet, that is waited for."""
    return comes_free(folder, _ENDS_WITHIN_S, worth_waiting=lambda: _has_died_here(alive(folder.path)))


def comes_free(folder: RunFolder, within_s: float, *, worth_waiting: Callable[[], bool] = lambda: True) -> bool:
    """Whether nobody writes the run, or nobody does any more in time."""
    until = time.monotonic() + within_s
    while is_written(folder.lock):
        if not worth_waiting() or time.monotonic() > until:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _has_died_here(status: Mapping[str, Any]) -> bool:
    if status.get("node") != platform.node():
        return False
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def alive(run: Path) -> dict[str, Any] | None:
    """What the run said of itself last; an empty mapping if it has not said anything yet."""
    try:
        return json.loads((run / STATUS).read_text())
    except (OSError, ValueError):
        return {}


def living(run: Path, status: Mapping[str, Any]) -> list[str]:
    if not status:
        return ["the run is setting up; it says more once its records are open"]
    age = time.time() - status["wall"]
    lines = [f"process {status['pid']}, {count(status['step'], 'step')} done"]
    if age > _OLD_S:
        lines.append(f"it has said nothing for {age:.0f} s: the process is stopped, or one long call holds it")
    lines += ["who waits:"] + [f"  {line}" for line in in_words(status)] if status["waits"] else ["nobody waits"]
    lines.append("what each role told last:")
    for role, event in sorted(status["last_events"].items(), key=lambda item: item[1]["seconds_ago"]):
        lines.append(f"  {role}: {event['kind']}, {event['seconds_ago'] + age:.0f} s ago")
    lines.append("where tasks of the event loop stand:")
    lines += [f"  {task['count']} at {task['at']}" for task in status["tasks"]]
    lines.append("threads:")
    if status["node"] != platform.node():
        return [*lines, f"  ask on {status['node']}, where the process is"]
    return [*lines, *(f"  {line}" for line in stacks(run, status["pid"]))]


def stacks(run: Path, pid: int) -> list[str]:
    """Of all threads, as the interpreter writes them when it is asked."""
    file = run / STACKS
    try:
        before = file.stat().st_size
        os.kill(pid, signal.SIGUSR1)
    except (OSError, AttributeError) as error:
        return [f"cannot be asked for: {error}"]
    deadline = time.monotonic() + STACKS_WITHIN_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = file.stat().st_size
        if now > before and now == size:
            break
        size = now
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")[before:].splitlines() or ["none came: the process is stopped"]
    return ["the run has just ended"]


def ended(run: Any) -> list[str]:
    """How a run ended that nobody writes any more."""
    from nearpolicy.store.position import position_of

    found, summary = position_of(run), run.summary()
    if summary is not None and summary["steps"] == found.steps and not run.unfinished():
        lines = [f"the run has {summary['ended']}: {count(found.steps, 'step')} of {summary['steps_asked']}"]
        if summary["ended"] == "finished":
            return lines
    else:
        ready, under_way = count(len(found.ready), "group"), count(len(found.unfinished), "group")
        lines = [f"the run's process has died after {count(found.steps, 'step')}"]
        lines.append(f"{ready} wait for a step, {under_way} were under way")
    last: dict[str, Any] = {event.role: event for event in run.events()}
    lines += [f"  {role}: {event.kind} at {event.time:.1f} s" for role, event in sorted(last.items())]
    lines.append(f"go on with it: nearpolicy train --resume {run.folder.path}")
    return lines
