"""Hostile programs with their expected verdicts, and everything they might reach planted where they would find it.

A case is a program that begins with ``# key: value`` lines: task, kind (stdin or function), entry, tests (JSON), hack,
expected verdict (``a or b``), limits (JSON or -). Uses the standard library alone, so that another interpreter, and
another user, can run it: ``python hostile.py ISOLATION PLACES REPEATS FILE...`` prints one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nearpolicy.verifier.sandbox import kernel
from nearpolicy.verifier.sandbox.bubblewrap import Bubblewrap, available
from nearpolicy.verifier.sandbox.grading import CallTest, CodeTask, StdinTest, grade
from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.runs import Limits
from nearpolicy.verifier.sandbox.zygotes import Worker, WorkerRefused

CASES = Path(__file__).parent / "cases"
MARKER = "sbx_probe_marker.txt"
PLACES_OUTSIDE = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/")


@functools.cache
def why_not(isolation: str) -> str | None:
    """Why a path of isolation is not to be had on this machine; None if it is."""

    async def started() -> None:
        await (await Worker.start(isolation, 0, [])).close()

    if isolation == "bubblewrap":
        return None if available() else "bwrap is not installed"
    if isolation == "landlock" and kernel.landlock_version() == 0:
        return "this kernel has no Landlock"
    try:
        asyncio.run(started())
    except WorkerRefused as error:
        return f"{isolation} is not to be had here: {error}"
    return None


def header(file: Path) -> dict[str, str]:
    found = {}
    for line in file.read_text().splitlines():
        if not line.startswith("# "):
            break
        key, _, value = line[2:].partition(":")
        found[key] = value.strip()
    return found


def task_of(case: dict[str, str], port: int) -> tuple[CodeTask, Limits]:
    tests = json.loads(case["tests"].replace("{LISTENER_PORT}", str(port)))
    limits = Limits(**json.loads(case["limits"])) if case.get("limits", "-") != "-" else Limits()
    if case["kind"] == "stdin":
        return CodeTask(tests=tuple(StdinTest(**test) for test in tests)), limits
    calls = tuple(CallTest(args=tuple(test["args"]), result=test["result"]) for test in tests)
    return CodeTask(tests=calls, entry=case["entry"]), limits


class Planted:
    """What must not be reached, and what was."""

    def __init__(self) -> None:
        self.canary = "SBX-CANARY-" + secrets.token_hex(8)
        self.beside_the_tests = [{"args": [2, 3], "note": self.canary}]
        self.port = 0
        self.signals = 0
        self._listeners: list[socket.socket] = []

    @contextlib.contextmanager
    def stand(self) -> Iterator[Planted]:
        folder = Path(tempfile.mkdtemp(prefix="sbx-tests-"))
        (folder / "tests.json").write_text(json.dumps({"secret": self.canary}))
        os.environ["SBX_SECRET_CANARY"] = self.canary
        before = signal.signal(signal.SIGURG, self._signalled)
        with (
            socket.socket() as tcp,
            socket.socket(type=socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_UNIX) as near,
        ):
            tcp.bind(("127.0.0.1", 0))
            self.port = tcp.getsockname()[1]
            udp.bind(("127.0.0.1", self.port))
            near.bind("\0sbx-listener")
            self._listeners = [tcp, udp, near]
            for each in self._listeners:
                each.setblocking(False)
            tcp.listen()
            near.listen()
            try:
                yield self
            finally:
                signal.signal(signal.SIGURG, before)
                del os.environ["SBX_SECRET_CANARY"]
                (folder / "tests.json").unlink()
                folder.rmdir()

    def _signalled(self, *_: object) -> None:
        self.signals += 1

    def reached(self, printed: bytes) -> list[str]:
        """In words; what was left behind is removed."""
        found = [f"printed {word}" for word in ("SBX-LEAK", self.canary) if word.encode() in printed]
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recvfrom(100)
                else:
                    listener.accept()[0].close()
                found.append(f"reached the listener {listener.getsockname()}")
        for place in {*PLACES_OUTSIDE, str(Path(__file__).parent)}:
            with contextlib.suppress(OSError):
                Path(place, MARKER).unlink()
                found.append(f"left a file in {place}")
        return found + ([f"sent {self.signals} signals"] if self.signals else [])


def children() -> set[int]:
    """Processes whose group or parent is ours or a worker's: all of this user's that name the sandbox."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and b"nearpolicy.verifier.sandbox" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


async def judged(isolation: str, places: int, repeats: int, files: list[Path]) -> dict[str, dict]:
    """File -> verdicts of all repeats, what was reached, seconds of the slowest, most memory held."""
    sandbox = Bubblewrap(places) if isolation == "bubblewrap" else Workers(isolation, places)
    found: dict[str, dict] = {}
    try:
        with Planted().stand() as planted:

            async def one(file: Path) -> None:
                case = header(file)
                task, limits = task_of(case, planted.port)
                begin = time.perf_counter()
                result = await grade(sandbox, file.read_text(), task, limits)
                mine = found.setdefault(
                    file.name, {"verdicts": [], "reasons": [], "reached": [], "seconds": 0.0, "memory_mib": 0.0}
                )
                mine["verdicts"].append(str(result.verdict))
                mine["reasons"].append(result.reason)
                mine["reached"] += planted.reached(result.stdout + result.stderr + str(result.reason).encode())
                mine["seconds"] = max(mine["seconds"], time.perf_counter() - begin)
                mine["memory_mib"] = max(mine["memory_mib"], result.usage.memory_mib)

            gate = asyncio.Semaphore(places)

            async def admitted(file: Path) -> None:
                async with gate:
                    await one(file)

            await asyncio.gather(*(admitted(file) for _ in range(repeats) for file in files))
    finally:
        await sandbox.close()
    return found


if __name__ == "__main__":
    isolation, places, repeats, *names = sys.argv[1:]
    print(json.dumps(asyncio.run(judged(isolation, int(places), int(repeats), [Path(name) for name in names]))))
