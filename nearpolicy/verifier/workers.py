"""Worker processes that score under a deadline, and survive what they score.

    score() -> idle slot -> its process: submission -> (limit? -> control runs, same slot) -> verdict
                               |  dead or over the deadline: process group killed, a new process started in the slot

Each process holds at most one call, so killing one loses no other: what waits, waits here. Every call ends within
``(1 + retries) * (timeout_s + a start)`` for the submission and the same for each control run. Only a process that
*died* is tried again; a deadline is not, because the same call would block again.

Processes are started by exec, never by fork, and in the thread of the event loop: they die when that thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nearpolicy.verifier
from nearpolicy.errors import NearpolicyError, VerifierError, described
from nearpolicy.machine import descendants, signal_name
from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.functions import RewardFunctionError
from nearpolicy.verifier.messages import LENGTH, Setup, frame, verdict_of
from nearpolicy.verifier.rewards import Sample

HOPELESS_CALLS = 8
"""Calls of a scorer, per worker, that end without an answer before there has ever been one: then none will come."""
BACK_OFF_S = 0.05
"""Before a call is tried again the first time, then twice as long each time: what killed a worker may pass."""
START_LIMIT_S = 120.0
"""Until a new process is ready; a user function may import a large library first."""
_PACKAGE_ROOT = str(Path(nearpolicy.verifier.__file__).resolve().parents[2])


class WorkerDied(NearpolicyError):
    """A worker process ended under a call, or could not be started; the message says how."""


class WorkerProcess:
    """One started process and the socket to it."""

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: bytes) -> WorkerProcess:
        """A process that is ready for calls. `RewardFunctionError` if it refuses its setup, `WorkerDied` if it ends."""
        worker, answer = await cls.launched("nearpolicy.verifier.worker_main", setup, START_LIMIT_S)
        if answer["status"] == "refused":
            await worker.end()
            raise RewardFunctionError(
                f"in a worker process, {answer['message']}. "
                f"Make it importable there, or set `verifier.in_process: true` to call it in this process"
            )
        return worker

    @classmethod
    async def launched(cls, module: str, setup: bytes, limit_s: float) -> tuple[WorkerProcess, Mapping[str, Any]]:
        """A process that runs ``module``, and its answer to its setup; `WorkerDied` if there is none."""
        ours, theirs = socket.socketpair()
        with theirs:
            # The connection first: nothing can come between the start of a process and the code that will end it.
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                worker = cls(_executed(module, theirs.fileno()), reader, writer)
            except OSError as error:
                writer.close()
                raise WorkerDied(f"a worker process could not be started: {error}") from error
        try:
            async with asyncio.timeout(limit_s):
                return worker, await worker.exchange(setup)
        except TimeoutError:
            await worker.end()
            raise WorkerDied(f"a worker process was not ready within {limit_s:g} s") from None
        except BaseException:
            await worker.end()
            raise

    async def exchange(self, request: bytes) -> Any:
        """Send a message, await the answer; `WorkerDied` if the process ends first, or says what cannot be read."""
        try:
            self._writer.write(frame(request))
            await self._writer.drain()
            [length] = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            answer = await self._reader.readexactly(length)
        except (OSError, EOFError) as error:
            self.kill()
            raise WorkerDied(f"a worker process {await self._how_it_ended()}") from error
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            await self.end()
            raise WorkerDied(f"a worker process gave an answer that is no JSON: {described(error, 120)}") from error

    @property
    def alive(self) -> bool:
        # Not `poll`, which would reap it: until it is reaped, `kill` can still reach what it has left behind.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, flags) is None

    def kill(self) -> None:
        """At once, with all that it started; only while not reaped, so that its group id cannot mean another's."""
        self._writer.transport.abort()
        if self._process.returncode is None:
            # It takes in what its children leave behind (`machine.adopt_orphans`): those in sessions of their own too.
            started = descendants(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it and wait until the system has taken it back."""
        self.kill()
        await asyncio.to_thread(self._process.wait)

    async def _how_it_ended(self) -> str:
        code = await asyncio.to_thread(self._process.wait)
        return f"was killed by signal {signal_name(-code)}" if code < 0 else f"exited with status {code}"


def _executed(module: str, descriptor: int) -> subprocess.Popen:
    # -P: its working folder must not shadow modules. -u: what a process printed before it was killed is still seen.
    return subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", module, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(descriptor,),
        env=_environment(),
        start_new_session=True,  # a process group of its own, to kill with all that user code starts
    )


def _environment() -> dict[str, str]:
    """Ours, with this package importable and one computing thread: a worker has one processor at most."""
    paths = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


class _Slot:
    """A place for one process, which is replaced when it is lost."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._closed = False
        self.starting = asyncio.create_task(WorkerProcess.start(setup))

    async def ask(self, request: bytes, timeout_s: float) -> Mapping[str, Any]:
        """One call. The deadline counts from the moment a process is there; after it the process is replaced."""
        process = await self._process()
        try:
            async with asyncio.timeout(timeout_s):
                return await process.exchange(request)
        except TimeoutError:
            self._replace(process)
            return {"status": "limit", "limit": "time_limit", "seconds": timeout_s}
        except BaseException:  # it died; or our caller was cancelled, and the process is busy with nobody's call
            self._replace(process)
            raise

    async def _process(self) -> WorkerProcess:
        if self.starting.done() and not self.starting.exception() and not self.starting.result().alive:
            self._replace(self.starting.result())
        starting = self.starting
        await asyncio.wait([starting])  # and not `await starting`: a start outlives a caller who is cancelled
        if self._closed:
            raise WorkerDied("the worker processes have been closed")
        if error := starting.exception():
            self.starting = asyncio.create_task(WorkerProcess.start(self._setup))
            raise WorkerDied(str(error)) from error
        return starting.result()

    def _replace(self, process: WorkerProcess) -> None:
        process.kill()
        if not self._closed:
            self.starting = asyncio.create_task(_restart(process, self._setup))

    async def close(self) -> None:
        self._closed = True
        self.starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, NearpolicyError, OSError):
            await (await self.starting).end()


async def _restart(lost: WorkerProcess, setup: bytes) -> WorkerProcess:
    await lost.end()
    return await WorkerProcess.start(setup)


class WorkerPool:
    """Scores samples in worker processes; every call ends in a verdict, however the process ends."""

    def __init__(self, scorers: Mapping[str, bytes], *, workers: int, timeout_s: float, retries: int) -> None:
        """``scorers``: key -> pickled scorer, as in `messages.Setup`."""
        self._setup = pickle.dumps(Setup(sys_path=tuple(sys.path), scorers=dict(scorers)))
        self._workers = workers
        self._timeout_s = timeout_s
        self._retries = retries
        self._slots: list[_Slot] = []
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        self._closed = False
        self._answered: set[str] = set()
        """Scorers that have given an answer."""
        self._unanswered: Counter[str] = Counter()
        """Calls of the others that ended without one."""

    async def start(self) -> None:
        """Returns when every process is ready; `RewardFunctionError` if a scorer cannot be loaded there."""
        self._slots = [_Slot(self._setup) for _ in range(self._workers)]
        try:
            await asyncio.gather(*(slot.starting for slot in self._slots))
        except BaseException:
            await self.close()
            raise
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def close(self) -> None:
        """Kills all processes. Calls under way end as failed; their slots wake the waiters, who end alike."""
        if not self._closed:
            self._closed = True
            await asyncio.gather(*(slot.close() for slot in self._slots))

    async def score(self, key: str, sample: Sample, controls: Sequence[Sample], started: Callable[[], None]) -> Verdict:
        """The verdict of scorer ``key``.

        controls: see `rewards.controls`. started: called when the sample has a slot.
        """
        slot = await self._idle.get()
        try:
            started()
            return await judge(lambda each: self._counted(slot, key, each), sample, controls)
        finally:
            self._idle.put_nowait(slot)

    async def _counted(self, slot: _Slot, key: str, sample: Sample) -> Mapping[str, Any]:
        """One answer; `VerifierError` if this scorer has been asked often and has never given one.

        A failed verdict is an answer, and what it costs is decided by group. A scorer that hangs or dies every time is
        told here, because it would keep evaluation and training waiting for a time limit per completion.
        """
        answer = await self._ask(slot, key, sample)
        if answer["status"] in ("verdict", "contract"):
            self._answered.add(key)
        elif key not in self._answered and not self._closed:
            self._unanswered[key] += 1
            if self._unanswered[key] >= HOPELESS_CALLS * self._workers:
                raise VerifierError(_never_answers(key, self._unanswered[key], answer))
        return answer

    async def _ask(self, slot: _Slot, key: str, sample: Sample) -> Mapping[str, Any]:
        """One answer, with retries for processes that die."""
        try:
            request = pickle.dumps((key, sample))
        except Exception as error:
            return {"status": "died", "message": f"the row cannot travel to a worker process: {described(error)}"}
        attempts = 0
        while True:
            if self._closed:
                return {"status": "died", "message": "the verifier was closed before this call ended"}
            attempts += 1
            try:
                return await slot.ask(request, self._timeout_s)
            except WorkerDied as error:
                if attempts > self._retries and not self._closed:
                    return {"status": "died", "message": f"{error} ({attempts} attempts)"}
                await asyncio.sleep(BACK_OFF_S * 2 ** (attempts - 1))


def _never_answers(key: str, calls: int, answer: Mapping[str, Any]) -> str:
    task, _, source = key.partition("/")
    if answer["status"] == "died":
        why, remedy = answer["message"], "Try it on one completion by hand"
    else:
        why = f"{answer['limit']} after {answer['seconds']:.3g} s"
        remedy = "Mend it, or raise verifier.timeout_s if it needs longer"
    return f"reward {source!r} of task {task!r} answered none of its first {calls} calls, the last: {why}. {remedy}"


async def judge(
    ask: Callable[[Sample], Awaitable[Mapping[str, Any]]], sample: Sample, controls: Sequence[Sample]
) -> Verdict:
    """What an answer means.

    Only here does something that went wrong become a 0: when control runs prove the submission to be its cause.
    """
    answer = await ask(sample)
    match answer["status"]:
        case "verdict":
            return verdict_of(answer)
        case "contract":
            raise RewardFunctionError(answer["message"])
        case "died":
            return Verdict.failed(answer["message"])
    limit, seconds = answer["limit"], answer["seconds"]
    doubt = await _doubt(ask, controls)
    if doubt is None:
        return Verdict(outcome=Outcome.SCORED, value=0.0, reason=limit, seconds=seconds)
    reason = f"{limit}: no answer after {seconds:.3g} s; {doubt}"
    return Verdict(outcome=Outcome.FAILED, reason=reason, seconds=seconds)


async def _doubt(ask: Callable[[Sample], Awaitable[Mapping[str, Any]]], controls: Sequence[Sample]) -> str | None:
    """Why a limit may not be the submission's fault; None if every control run was answered as it must be."""
    if not controls:
        return "nothing is known to be right to compare with"
    right, *others = controls
    check = await ask(right)
    if check["status"] != "verdict" or not (verdict_of(check).value or 0.0) > 0:
        found = check.get("limit") or check.get("reason") or check.get("message") or f"it scored {check.get('value')}"
        return f"nor did the right answer pass in its place ({found})"
    for other in others:
        check = await ask(other)
        if check["status"] != "verdict":
            found = check.get("limit") or check.get("message")
            return f"nor could the right answer be compared with another one ({found})"
    return None
