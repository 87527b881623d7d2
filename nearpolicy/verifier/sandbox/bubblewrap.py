"""The plain way: bubblewrap and a new interpreter for every run. Slow, and it explains the fast one.

    bwrap: namespaces, a read-only root, an own /box --> python: limits, Landlock, filter, harness --> the program

The program arrives in sealed memory, results leave by the same pipes as from a worker. Only the exit code in
bubblewrap's own report proves that the program ran: a set-up that fails ends with status 1 like a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nearpolicy.verifier.sandbox.isolation import (
    _DEVICES,
    _SYSTEM,
    FOLDER,
    FOLDER_MIB,
    PACKAGES,
    hidden_folders,
    interpreter_folders,
)
from nearpolicy.verifier.sandbox.runs import Ended, OnFrame, Run
from nearpolicy.verifier.sandbox.zygotes import ENVIRONMENT, Running, interpreter

_CODE = Path(__file__).parent
_INSIDE = "/sandbox/nearpolicy/verifier/sandbox"
_BOOT = """
import json, os, sys
job = json.loads(sys.argv[1])
sys.path.insert(0, "/sandbox")
sys.path.append("/packages")
from nearpolicy.verifier.sandbox import harness
from nearpolicy.verifier.sandbox.isolation import Confinement, limit
sys.path.remove("/sandbox")
with open(5, "rb") as file:
    program = file.read()
os.closerange(5 if job["kind"] == "tests" else 4, 64)  # bubblewrap's report among them
limit(**job["limits"])
Confinement(writable="/box", readable=["/"]).apply(processes=job["limits"]["processes"] > 1)
harness.prepare()
os._exit(harness.run(job["kind"], program, **job["job"]))
"""
_HELD_MIB = 32
"""Address space of a new interpreter with the harness."""
_PROGRAM, _REPORT, _PLACES = 5, 6, 20
"""Descriptors of bubblewrap, above the streams of a run."""


def available() -> str | None:
    return shutil.which("bwrap")


class Bubblewrap:
    """A `Sandbox`; every run is a process of its own from start to end."""

    def __init__(self, places: int, packages: Sequence[str] = ()) -> None:
        self._places = {False: asyncio.Semaphore(places), True: asyncio.Semaphore(places)}
        self._packages = list(packages)

    async def run(self, run: Run, on_frame: OnFrame | None = None) -> Ended:
        async with self._places[on_frame is not None]:
            running = Running(run, on_frame)
            try:
                return await self._run(run, running)
            except OSError as error:
                return Ended(failure=f"bubblewrap could not be started: {error}")
            finally:
                running.close()

    async def close(self) -> None:
        """Nothing outlives a run."""

    async def _run(self, run: Run, running: Running) -> Ended:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                # Not on a thread: who is cancelled meanwhile would leave a process that nobody knows.
                process = _spawned(self._command(run), _placed(running, writing))
            finally:
                os.close(writing)
            try:
                pidfd = os.pidfd_open(process)
                running.started(pidfd)
                status, cpu_s, rss = await _end_of(process, pidfd)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, process, 0)
                raise
            report = _read(reading)
        finally:
            os.close(reading)
        running.ended()
        message = {"cpu_s": cpu_s, "max_rss_mib": rss, "status": _program_status(report)}
        if message["status"] is None:
            message["status"] = status
            if running.stopped is None:
                message["failure"] = f"bubblewrap did not get to the program (status {status})"
        ended = running.outcome(message)
        # bubblewrap does not always wait for what it counts: the kernel's own limit shows as a SIGKILL then.
        if ended.status == -signal.SIGKILL and ended.stopped is None and ended.wall_s >= run.limits.cpu_s:
            ended = replace(ended, stopped="cpu")
        return ended

    def _command(self, run: Run) -> list[str]:
        limits = run.limits
        # The kernel does not count the processes of root, whatever namespace they are in: then there is but one.
        processes = limits.processes if os.getuid() != 0 else 1
        known = {
            "cpu_s": limits.cpu_s, "memory_mib": limits.memory_mib, "processes": processes,
            "shared_user": False, "held_bytes": _HELD_MIB * 2**20,
        }  # fmt: skip
        job = json.dumps({"kind": run.kind, "job": dict(run.job), "limits": known})
        python = [interpreter(), "-s", "-S", "-P", "-B", "-c", _BOOT, job]
        return [str(available()), *self._options(), "--json-status-fd", str(_REPORT), "--", *python]

    def _options(self) -> list[str]:
        options = ["--unshare-all", "--disable-userns", "--unshare-user", "--die-with-parent", "--new-session"]
        options += ["--hostname", "sandbox"]
        options += ["--cap-drop", "ALL", "--clearenv", "--uid", "1000", "--gid", "1000"]
        for name, value in ENVIRONMENT.items():
            options += ["--setenv", name, value]
        for path in _SYSTEM:
            if os.path.islink(path):
                options += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                options += ["--ro-bind", path, path]
        for path in hidden_folders():
            options += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        for path in interpreter_folders():
            options += ["--ro-bind", path, path]
        options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        for path in self._packages:
            options += ["--ro-bind", path, f"{PACKAGES}/{os.path.basename(path)}"]
        for name in ("harness", "values", "isolation", "kernel", "syscalls"):
            options += ["--ro-bind", f"{_CODE}/{name}.py", f"{_INSIDE}/{name}.py"]
        options += ["--dir", "/dev"]
        for name in _DEVICES:
            options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        options += [
            "--size",
            str(FOLDER_MIB * 2**20),
            "--tmpfs",
            FOLDER,
            "--symlink",
            FOLDER,
            "/tmp",
            "--chdir",
            FOLDER,
        ]
        return [*options, "--remount-ro", "/"]


def _placed(running: Running, report: int) -> dict[int, int]:
    """Place -> descriptor of the process."""
    program, stdin, *streams = running.descriptors
    return dict(enumerate([stdin, *streams])) | {_PROGRAM: program, _REPORT: report}


def _spawned(command: list[str], places: dict[int, int]) -> int:
    """A process with these descriptors at these places, and no others."""
    # First out of the way of all places, then into them.
    high = {place: fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _PLACES) for place, each in places.items()}
    try:
        actions = [(os.POSIX_SPAWN_DUP2, each, place) for place, each in high.items()]
        return os.posix_spawn(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=actions, setsid=True)
    finally:
        for each in high.values():
            os.close(each)


async def _end_of(process: int, pidfd: int) -> tuple[int, float, float]:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(pidfd)
    _, status, usage = os.wait4(process, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _read(pipe: int) -> bytes:
    """What is in a pipe now."""
    found = b""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while more := os.read(pipe, 1 << 16):
            found += more
    return found


def _program_status(report: bytes) -> int | None:
    """The exit code in bubblewrap's report; beyond 128 it stands for a signal."""
    for line in report.splitlines():
        with contextlib.suppress(ValueError):
            code = json.loads(line).get("exit-code")
            if code is not None:
                return 128 - code if code > 128 else code
    return None
