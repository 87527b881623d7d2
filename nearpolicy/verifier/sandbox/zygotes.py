"""The trusted side of workers: starts them, gives each one run at a time, and takes the time.

    program, input (sealed memory) --> worker --> run          what the run prints --> pipes
    "started", a descriptor of it  <--                         if it lasts: pipes --> here; wall limit and caps, killed
                                                               from here by that descriptor
    "ended", as the kernel says    <--                         only then: what is left in the pipes, up to the caps

Nothing a run can write reaches the socket between this process and a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nearpolicy.errors import NearpolicyError
from nearpolicy.machine import descendants
from nearpolicy.verifier.sandbox.capture import Capture, Frames
from nearpolicy.verifier.sandbox.isolation import FOLDER
from nearpolicy.verifier.sandbox.runs import STDERR_CAP, STDERR_KEPT, Ended, OnFrame, Run

START_LIMIT_S = 60.0
LOST_S = 5.0
"""Beyond its wall limit a run has ended, or its worker is lost."""
STARVED_SHARE = 0.5
"""Of the wall limit: a run that waited this long for a processor, and computed for less, was starved."""
_Capture = TypeVar("_Capture", bound=Capture)
_MODULES = ("values", "kernel", "syscalls", "isolation", "harness", "worker")
_BOOT = """
import json, os, sys, types
def load():
    told = json.loads(os.read(3, 1 << 16))
    package = "nearpolicy.verifier.sandbox"
    for name in ("nearpolicy", "nearpolicy.verifier", package):
        sys.modules[name] = types.ModuleType(name)
    for name in {modules}:
        with open(told["folder"] + "/" + name + ".py", encoding="utf-8") as file:
            text = file.read()
        module = sys.modules[package + "." + name] = types.ModuleType(package + "." + name)
        setattr(sys.modules[package], name, module)
        exec(compile(text, "sandbox/" + name + ".py", "exec"), module.__dict__)
    return module, told.pop("packages")
os.dup2({control}, 3)
if {control} != 3: os.close({control})
module, packages = load()
module.main(packages)
"""
"""Not by import, nor with paths as arguments: what is loaded so does not say where on this machine it lies."""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "UTC", "HOME": FOLDER, "TMPDIR": FOLDER,
    "PATH": "/usr/local/bin:/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
"""All that a run finds there: the same program and the same input give the same verdict."""


class WorkerRefused(NearpolicyError):
    """A worker could not be started in the isolation asked for; the message says why."""


class WorkerLost(NearpolicyError):
    """A worker ended, or did not answer."""


def interpreter() -> str:
    """The Python below a virtual environment: runs get the standard library and what is named, no more."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class Worker:
    """A started worker. `run` is for one caller at a time."""

    def __init__(self, process: subprocess.Popen, control: socket.socket, with_packages: bool) -> None:
        self.with_packages = with_packages
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[tuple[dict[str, Any], list[int]]] = asyncio.Queue()
        self.runs = 0
        self._loop.add_reader(control, self._hear)

    @classmethod
    async def start(cls, isolation: str, slot: int, packages: Sequence[str]) -> Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            ours.send(json.dumps({"folder": str(Path(__file__).parent), "packages": list(packages)}).encode())
            worker = cls(_executed(theirs, isolation, slot), ours, bool(packages))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                message, _ = await worker._messages.get()
        except TimeoutError:
            message = {"refused": f"a worker was not ready within {START_LIMIT_S:g} s"}
        except BaseException:
            await worker.close()
            raise
        if "ready" not in message:
            await worker.close()
            raise WorkerRefused(message.get("refused", "a worker ended while it was starting"))
        return worker

    def _hear(self) -> None:
        try:
            text, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except BlockingIOError:
            return
        except OSError:
            text, descriptors = b"", []
        if not text:
            self._loop.remove_reader(self._control)
        self._messages.put_nowait((json.loads(text) if text else {"lost": True}, descriptors))

    async def run(self, run: Run, on_frame: OnFrame | None = None) -> Ended:
        """`WorkerLost` if the worker is gone; then the run is too."""
        self.runs += 1
        running = Running(run, on_frame)
        try:
            self._send(run, running)
            message, descriptors = await self._next(LOST_S)
            if descriptors:
                running.started(descriptors[0])
                message = await self._last_word(running)
            running.ended()
        finally:
            running.close()
        if "ended" not in message:
            raise WorkerLost("a worker of the sandbox ended under a run")
        return running.outcome(message)

    def _send(self, run: Run, running: Running) -> None:
        limits = run.limits
        request = {
            "kind": run.kind,
            "job": dict(run.job),
            "limits": {
                "cpu_s": limits.cpu_s, "wall_s": limits.wall if not running.asks else None,
                "memory_mib": limits.memory_mib, "processes": limits.processes,
            },
        }  # fmt: skip
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], running.descriptors)
        except OSError as error:
            raise WorkerLost(f"a worker of the sandbox is gone: {error}") from error

    async def _next(self, seconds: float) -> tuple[dict[str, Any], list[int]]:
        try:
            async with asyncio.timeout(seconds):
                return await self._messages.get()
        except TimeoutError:
            if not self._messages.empty():  # it did, while this process was too busy to hear
                return self._messages.get_nowait()
            raise WorkerLost("a worker of the sandbox does not answer") from None

    async def _last_word(self, running: Running) -> dict[str, Any]:
        """How the run ended; lost if nothing is said once it must be over."""
        while True:
            try:
                return (await self._next(LOST_S))[0]
            except WorkerLost:
                if running.is_overdue:
                    raise

    def kill(self) -> None:
        """At once, with its run; who waits for that hears that it is lost."""
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control)
        self._control.close()
        while not self._messages.empty():
            for unheard in self._messages.get_nowait()[1]:
                os.close(unheard)
        self._messages.put_nowait(({"lost": True}, []))
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._process.wait)


def _executed(control: socket.socket, isolation: str, slot: int) -> subprocess.Popen:
    boot = _BOOT.format(control=control.fileno(), modules=_MODULES)
    arguments = [isolation, str(slot), str(os.getpid())]
    return subprocess.Popen(
        [interpreter(), "-s", "-S", "-P", "-B", "-u", "-c", boot, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(control.fileno(),),
        env=ENVIRONMENT,
        start_new_session=True,
        cwd="/",
    )


def sealed(name: str, data: bytes) -> int:
    """A descriptor of memory that nobody can write to any more."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Running:
    """The descriptors and the clock of one run."""

    def __init__(self, run: Run, on_frame: OnFrame | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._run = run
        self._begin = time.perf_counter()
        self._pidfd = self._replies = self._reply = -1
        self._timer: asyncio.TimerHandle | None = None
        self._left_s = run.limits.wall
        self._due = math.inf
        self.stopped: str | None = None
        self._starved = False
        self._wall_s = 0.0
        self._answering: set[asyncio.Task] = set()
        self._waiting = 0
        """Questions of test code that are not answered yet."""
        self._on_frame = on_frame
        self._last: bytes | None = None
        self._captures: list[Capture] = []
        self._memory: list[int] = []
        try:
            self._open()
        except BaseException:  # there may be no more descriptors: then those that there were are given back
            self.close()
            raise

    def _open(self) -> None:
        cap = self._run.limits.output_kib * 1024
        self.stdout = self._captured(Capture(cap, cap, self._too_much))
        self.stderr = self._captured(Capture(STDERR_KEPT, STDERR_CAP, self._too_much, last=True))
        self.results = self._captured(Frames(cap, self._too_much, self._asked if self.asks else None))
        if self.asks:
            self._replies, self._reply = os.pipe2(os.O_CLOEXEC)
            self._listen()
        self._memory.append(sealed("program", self._run.program))
        self._memory.append(sealed("input", self._run.stdin))

    def _captured(self, capture: _Capture) -> _Capture:
        self._captures.append(capture)
        return capture

    def _listen(self) -> None:
        for capture in self._captures:
            capture.listen()

    @property
    def asks(self) -> bool:
        """Whether it is test code, which asks for calls and is answered."""
        return self._on_frame is not None

    @property
    def is_overdue(self) -> bool:
        return self._loop.time() > self._due + LOST_S

    @property
    def descriptors(self) -> list[int]:
        streams = [self.stdout.writing, self.stderr.writing, self.results.writing]
        return [*self._memory, *streams, *([self._replies] if self._replies >= 0 else [])]

    def started(self, pidfd: int) -> None:
        """Told only of a run that lasts; what a shorter one wrote waits in the pipes."""
        self._pidfd = pidfd
        self._drop_theirs()
        if not self.asks:
            self._listen()
        if not self._waiting:
            self._clock_on()

    def _clock_on(self) -> None:
        self._due = self._loop.time() + self._left_s
        self._timer = self._loop.call_at(self._due, self._too_long)

    def _clock_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._left_s = max(0.0, self._due - self._loop.time())
        self._timer, self._due = None, math.inf

    def _drop_theirs(self) -> None:
        for descriptor in self._memory:
            os.close(descriptor)
        self._memory = []
        for capture in self._captures:
            capture.close_writing()
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1

    def _asked(self, frame: bytes) -> None:
        self._last = frame
        self._waiting += 1
        self._clock_off()  # it waits for runs that have limits of their own, and for a place for them
        task = self._loop.create_task(self._answer(frame))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, frame: bytes) -> None:
        assert self._on_frame is not None
        try:
            reply = await self._on_frame(frame)
            if reply and self._reply >= 0:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(os.write, self._reply, reply)
        finally:
            self._waiting -= 1
            if not self._waiting and self._pidfd >= 0:
                self._clock_on()

    def _too_long(self) -> None:
        if _has_ended(self._pidfd):  # in time, and this process was too busy to hear of it
            return
        limits = self._run.limits
        self._starved = is_starved(*_processor_times(self._pidfd, limits.processes > 1), limits.wall)
        self._stop("wall")

    def _too_much(self) -> None:
        self._stop("output")

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def ended(self) -> None:
        """The run is dead: what it has written is in the pipes."""
        self._wall_s = time.perf_counter() - self._begin
        self._drop_theirs()
        for capture in self._captures:
            capture.finish()

    def close(self) -> None:
        """Whatever happened; harmless after `ended`."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._answering:
            task.cancel()
        self._drop_theirs()
        for capture in self._captures:
            capture.close()
        for descriptor in (self._reply, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._reply = self._pidfd = -1

    def outcome(self, message: dict[str, Any]) -> Ended:
        failure = message.get("failure")
        starved = failure is None and self.stopped == "wall" and self._starved
        if starved:
            failure = "the run got next to no processor time before its wall limit"
        if failure is None and self.stopped is None and message.get("felled"):
            failure = "the run was killed from outside, perhaps because the machine had no memory left"
        return Ended(
            status=message.get("status", 0),
            stdout=self.stdout.kept,
            stderr=self.stderr.kept,
            frame=self._last if self._on_frame is not None else self.results.first,
            stopped=self.stopped or message.get("killed"),
            failure=failure,
            starved=starved,
            cpu_s=message.get("cpu_s", 0.0),
            wall_s=self._wall_s,
            memory_mib=message.get("max_rss_mib", 0.0),
        )


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_starved(computed_s: float, waited_s: float, wall_s: float) -> bool:
    """Whether a run mostly waited for a processor. A sleeping program does not wait for one; a program whose threads
    keep each other waiting has computed meanwhile."""
    return waited_s > STARVED_SHARE * wall_s and computed_s < STARVED_SHARE * wall_s


def _processor_times(pidfd: int, several: bool) -> tuple[float, float]:
    """Seconds that a run has computed, in all threads and, if it may have ``several``, in all processes, and that the
    one of them waited that waited longest; as the kernel's scheduler counts them. Zeros if it does not tell."""
    try:
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        pid = int(next(line for line in info.splitlines() if line.startswith("Pid:")).split()[1])
        times = [_schedule(each) for each in (pid, *(descendants(pid) if several else ()))]
        threads = [thread for of_process in times for thread in of_process]
        return sum(int(thread[0]) for thread in threads) / 1e9, max(int(thread[1]) for thread in threads) / 1e9
    except (OSError, ValueError, StopIteration):
        return 0.0, 0.0


def _schedule(pid: int) -> list[list[str]]:
    found = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.append((task / "schedstat").read_text().split())
    return found
