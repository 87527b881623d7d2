"""A worker of the sandbox: enters its isolation once, then runs one program after another, each in a copy of itself.

    socket 3: where things lie
              request + descriptors -> (if it lasts: "started" + a descriptor of the run ->) "ended", with what the
              kernel knows of it

It knows no test, no expected output and no secret; it reports how a run ended and never what that means. It lives no
longer than the process that started it. The standard library alone is used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nearpolicy.verifier.sandbox import harness, kernel
from nearpolicy.verifier.sandbox.isolation import (
    FOLDER,
    PACKAGES,
    Confinement,
    OwnFolder,
    enter_namespaces,
    leave_users,
    limit,
    readable_without_namespaces,
)

CONTROL = 3
NICENESS = 5
"""Runs give way to engine and learner."""
_REPLACED = (signal.SIGHUP, signal.SIGTERM, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR1,
             signal.SIGUSR2, signal.SIGXCPU, signal.SIGPOLL, signal.SIGQUIT, signal.SIGPWR,
             *range(signal.SIGRTMIN, signal.SIGRTMAX + 1))  # fmt: skip
"""Signals that end a process, but not process 1 of a namespace unless it asks for it."""
_SHORT_S = 0.005
"""A run that has ended by then was never told of: it is a word less for each of two processes."""
_BACKSTOP_S = 1.0
"""Beyond a run's wall limit, which the other side watches: then it is gone, or too busy."""
_WARM = """
    abc array ast base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum
    fractions functools hashlib heapq inspect io itertools json math operator os pathlib queue random re statistics
    string struct sys textwrap threading time traceback types typing unicodedata uuid
"""
_SAMPLE = b"import sys\ndef f(x):\n    return [y for y in x if y]\nclass C:\n    pass\nprint(sum(f([1, 2])))\n"


def main(packages: list[str]) -> None:
    """``worker ISOLATION SLOT PARENT``. packages: folders and files to import from; forgotten once they are loaded."""
    isolation, slot, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.argv[:] = sys.orig_argv[:] = []
    control = socket.socket(fileno=CONTROL)
    for place in range(CONTROL + 1, _PLACES):
        os.dup2(0, place)
    try:
        _end_with(parent)
        os.nice(NICENESS)
        _warm()
        worker = _isolated(isolation, slot, packages)
    except Exception as error:
        control.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(json.dumps({"ready": worker.held_bytes}).encode())
    worker.serve(control)


def _end_with(parent: int | None) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _warm() -> None:
    """Load and run once what programs use, so that no run pays for it; then keep the collector away from it."""
    for name in _WARM.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sink = open(os.devnull, "w")  # noqa: SIM115
    with contextlib.redirect_stdout(sink):
        exec(compile(_SAMPLE, "warm", "exec"), {})
    sink.close()


def _isolated(isolation: str, slot: int, packages: list[str]) -> _Worker:
    """This process behind its walls; in namespaces the one that goes on is a child of it."""
    spaces = isolation == "namespaces"
    shared_user = os.getuid() != 0 and not spaces
    process = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    if spaces:
        enter_namespaces(slot, packages)
        sys.path.append(PACKAGES)
    else:
        leave_users(slot, keep_reading=isolation == "landlock")
        sys.path.extend(dict.fromkeys(os.path.dirname(path) for path in packages))
    _preload(packages)
    held = _address_space(process)
    os.close(process)
    if spaces and (pid := os.fork()):
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _end_with(None)
    confinement = None
    if spaces:
        confinement = Confinement(writable=os.path.dirname(FOLDER), readable=["/"])
    elif isolation == "landlock":
        confinement = Confinement(
            writable=None,
            readable=readable_without_namespaces(packages),
            capabilities=kernel.READ_ANY_FILE if kernel.holds(kernel.READ_ANY_FILE) else 0,
        )
    if not spaces:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    _prepare_harness()
    if spaces:
        for number in _REPLACED:
            signal.signal(number, lambda caught, _: os._exit(128 + caught))
    packages.clear()  # paths of this machine
    gc.collect()
    gc.freeze()
    return _Worker(confinement, spaces=spaces, shared_user=shared_user, held_bytes=held)


def _prepare_harness() -> None:
    """With an input that is memory and outputs that are pipes, as those of a run will be; then with none again."""
    nothing = os.dup(0)
    memory, pipe = os.memfd_create("input"), os.pipe()
    for place, descriptor in enumerate((memory, pipe[1], pipe[1])):
        os.dup2(descriptor, place)
    harness.prepare()
    for place in range(3):
        os.dup2(nothing, place)
    _close(nothing, memory, *pipe)


def _preload(packages: Sequence[str]) -> None:
    for path in packages:
        name = os.path.basename(path).removesuffix(".py")
        if name.isidentifier():  # and not a folder of libraries, such as numpy.libs
            importlib.import_module(name)
        if name == "numpy":
            importlib.import_module("numpy.random")  # which would seed itself in each run


def _address_space(process: int) -> int:
    statm = os.open("statm", os.O_RDONLY, dir_fd=process)
    try:
        return int(os.read(statm, 100).split()[0]) * os.sysconf("SC_PAGESIZE")
    finally:
        os.close(statm)


class _Worker:
    def __init__(self, confinement: Confinement | None, *, spaces: bool, shared_user: bool, held_bytes: int) -> None:
        self._confinement = confinement
        self._spaces = spaces
        self._shared_user = shared_user
        self.held_bytes = held_bytes
        self._clone = kernel.Clone(kernel.CLONE_NEWPID if spaces else 0)
        self._folder = OwnFolder() if spaces else None

    def serve(self, control: socket.socket) -> None:
        """Until the other side is gone."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 8)
            if not message:
                return
            if self._folder is not None:
                self._folder.begin()
            self._serve(control, json.loads(message), descriptors)

    def _serve(self, control: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        passed, passes = os.pipe()
        try:
            pid, run = self._clone()
        except OSError as error:
            _close(passed, passes, *descriptors)
            control.send(json.dumps({"ended": True, "failure": str(error)}).encode())
            return
        if pid == 0:
            os.close(passed)
            self._run(request, descriptors, passes)
        _close(passes, *descriptors)
        killed = None
        if not select.select([run], [], [], _SHORT_S)[0]:
            socket.send_fds(control, [b'{"started": true}'], [run])
            killed = _watched(control, pid, run, request["limits"])
        _, status, usage = os.wait4(pid, 0)
        if not self._spaces and (self._confinement is None or request["limits"]["processes"] > 1):
            _sweep()
        words = os.read(passed, 400)
        _close(run, passed)
        ended = {"ended": True, "status": os.waitstatus_to_exitcode(status), "killed": killed}
        if not words.startswith(b"+"):
            ended["failure"] = words.decode(errors="replace") or "the run was lost while it was being set up"
        ended |= {"cpu_s": usage.ru_utime + usage.ru_stime, "max_rss_mib": usage.ru_maxrss / 1024}
        # Process 1 of a namespace can be killed by nobody in it; the kernel does it at the limit of processor time.
        within = ended["cpu_s"] < request["limits"]["cpu_s"]
        ended["felled"] = self._spaces and killed is None and status == signal.SIGKILL and within
        control.send(json.dumps(ended).encode())

    def _run(self, request: dict[str, Any], descriptors: list[int], passes: int) -> None:
        """In the copy: never returns."""
        status = 1
        try:
            try:
                program = self._shut_in(request, descriptors, passes)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.write(passes, f"{type(error).__name__}: {error}"[:400].encode())
                os._exit(1)
            os.write(_PLACES - 1, b"+")
            os.close(_PLACES - 1)
            status = harness.run(request["kind"], program, **request["job"])
        finally:
            os._exit(status)

    def _shut_in(self, request: dict[str, Any], descriptors: list[int], passes: int) -> bytes:
        program, *streams = descriptors
        text = _contents(program)
        # The socket to the other side is overwritten here: a run has no way to speak for its worker.
        for place, descriptor in enumerate(streams):
            os.dup2(descriptor, place, inheritable=True)
        for place in range(len(streams), _PLACES - 1):
            os.close(place)
        os.dup2(passes, _PLACES - 1, inheritable=False)
        if self._spaces:
            os.chdir(FOLDER)
        limits = request["limits"]
        processes = limits["processes"]
        limit(
            cpu_s=limits["cpu_s"], memory_mib=limits["memory_mib"], processes=processes,
            shared_user=self._shared_user, held_bytes=self.held_bytes,
        )  # fmt: skip
        if self._confinement is not None:
            self._confinement.apply(processes=processes > 1)
        kernel.close_from(_PLACES)
        return text


_PLACES = 8
"""Descriptors below are set aside for a run: its streams, and last the pipe that says whether it was set up."""


def _contents(memory: int) -> bytes:
    """All of it; it is sealed."""
    size = os.fstat(memory).st_size
    text = os.pread(memory, size, 0)
    while len(text) < size:
        text += os.pread(memory, size - len(text), len(text))
    return text


def _watched(control: socket.socket, pid: int, run: int, limits: dict[str, Any]) -> str | None:
    """Wait for the end of a run; what it was killed for, if it was.

    The kernel counts processor time in whole seconds, so it is read here; the next look is when it may have been used
    up at the earliest.
    """
    poll = select.poll()
    poll.register(run, select.POLLIN)
    poll.register(control, select.POLLIN)
    clock = (~pid << 3) | 2  # of the whole process, see clock_getcpuclockid(3)
    cores = os.cpu_count() or 1
    # Test code has a clock on the other side alone, which stops while it waits for what it asked for.
    wall_s = math.inf if limits["wall_s"] is None else limits["wall_s"]
    begin = time.monotonic()
    killed = None
    while True:
        left = limits["cpu_s"] - _clock(clock)
        wait = max(0.002, left / cores)
        for descriptor, _ in poll.poll(min(wait, wall_s) * 1000):
            if descriptor == run:
                return killed
            os._exit(0)  # the other side is gone: nothing else comes during a run
        if killed is None and _clock(clock) >= limits["cpu_s"]:
            killed = "cpu"
        elif killed is None and time.monotonic() - begin > wall_s + _BACKSTOP_S:
            killed = "wall"
        if killed is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(run, signal.SIGKILL)
            poll.unregister(control)
            poll.poll()
            return killed


def _clock(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:  # it has just ended
        return 0.0


def _sweep() -> None:
    """End what a run has left, where no namespace does so. None is taken back before all are dead: a dead process that
    is still there counts, so that they use up what they may start."""
    me = os.getpid()
    while True:
        while living := [pid for pid, parent, state in _processes() if parent == me and state not in "ZX"]:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _processes() -> Iterator[tuple[int, int, str]]:
    """(id, id of the parent, state) of each that there is."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"{entry.path}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                yield int(entry.name), int(parent), state.decode()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
