"""What runs mean: a program, its tests -> one of seven verdicts. All of it after the run is dead, and outside.

Expected results stay here. What a run prints, and the status it ends with, can lose it a point and never win one; only
a comparison on this side passes. The first test that is not passed decides.
"""

from __future__ import annotations

import asyncio
import enum
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nearpolicy.machine import signal_name
from nearpolicy.verifier.sandbox import values
from nearpolicy.verifier.sandbox.comparison import same_text, same_value
from nearpolicy.verifier.sandbox.harness import LENGTH, is_exception
from nearpolicy.verifier.sandbox.runs import Ended, Limits, Run, Sandbox


class CodeVerdict(enum.StrEnum):
    """How a program did on its tests."""

    PASSED = "passed"
    """It ended by itself with status 0, every time, and every result is right."""
    WRONG_ANSWER = "wrong_answer"
    """It ended by itself with status 0 and a result is not right."""
    RUNTIME_ERROR = "runtime_error"
    """It ended with another status or by a signal, raised, or left no result that can be read."""
    TIME_LIMIT = "time_limit"
    """It reached its limit of processor time or of time, whatever it had printed before."""
    MEMORY_LIMIT = "memory_limit"
    """It died of its limit of memory."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than it may."""
    SANDBOX_FAILURE = "sandbox_failure"
    """It could not be run: nothing is known about it, and it has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of all runs of a grading together; memory is that of the largest."""

    runs: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mib: float = 0.0

    def plus(self, ended: Ended) -> Usage:
        return Usage(
            runs=self.runs + 1,
            cpu_s=self.cpu_s + ended.cpu_s,
            wall_s=self.wall_s + ended.wall_s,
            memory_mib=max(self.memory_mib, ended.memory_mib),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The verdict on a program."""

    verdict: CodeVerdict
    reason: str | None = None
    """For a person; names a test by its number only."""
    passed: int = 0
    """Tests passed; in order up to the first that was not, unless all were asked for."""
    tests: int = 0
    usage: Usage = Usage()
    stdout: bytes = b""
    stderr: bytes = b""
    """What the run that decided printed: for a person, never for a score."""


class CannotSplitError(Exception):
    """Test code that cannot run apart from the program; the message says what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """Tests of one kind for one program."""

    tests: tuple[StdinTest, ...] | tuple[CallTest, ...] | tuple[str, ...]
    """Inputs and outputs, calls and results, or test code."""
    entry: str | None = None
    """The function that is tested; needed for calls."""
    setup: str = ""
    """Test code that runs before the tests."""
    together: bool = False
    """Test code in one process with the program: the weaker trust."""
    command: tuple[str, ...] = ()
    """Of another language: what runs ``file``, which the program is written to."""
    file: str = "program"


_AT_ONCE = 1 << 16
"""Bytes of a result that are judged here; more is judged beside the event loop, which goes on meanwhile."""
_LEAST_S = 0.1
"""Wall limit of a run that begins when next to nothing is left of a grading's time."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,60}")
_Graded = tuple[CodeVerdict, str | None]
_PASSED: _Graded = (CodeVerdict.PASSED, None)


async def grade(
    sandbox: Sandbox, program: str, task: CodeTask, limits: Limits, *, packages: bool = False, every_test: bool = False,
    most_s: float | None = None,
) -> Grade:  # fmt: skip
    """``every_test``: go on after a test that is not passed, to know how many are. ``most_s``: time of all runs of the
    program together, after which no further one begins; waiting for a place is not counted.

    Raises `CannotSplitError` for test code that needs the weaker trust.
    """
    grading = _Grading(sandbox, program.encode("utf-8", "replace"), task, limits, packages, most_s)
    return await grading.run(every_test)


class _Grading:
    def __init__(self, sandbox: Sandbox, program: bytes, task: CodeTask, limits: Limits, packages: bool,
                 most_s: float | None) -> None:  # fmt: skip
        self._sandbox = sandbox
        self._program = program
        self._task = task
        self._limits = limits
        self._packages = packages
        self._most_s = most_s
        self._usage = Usage()
        self._last = Ended()
        self._asked_s = 0.0
        """How long test code waited for calls of the program."""

    async def run(self, every_test: bool) -> Grade:
        task = self._task
        if task.tests and isinstance(task.tests[0], str):
            return self._graded(*await (self._together() if task.together else self._test_code()))
        first, passed = _PASSED, 0
        decided = self._last
        for number, test in enumerate(task.tests, start=1):
            spent = self._spent()
            verdict, reason = spent or await self._one(test)
            if verdict is CodeVerdict.PASSED:
                passed += 1
                continue
            if first is _PASSED or verdict is CodeVerdict.SANDBOX_FAILURE:
                first, decided = (verdict, f"test {number}" + (f": {reason}" if reason else "")), self._last
            if not every_test or verdict is CodeVerdict.SANDBOX_FAILURE or spent:
                break
        self._last = decided
        return self._graded(first, passed)

    def _graded(self, found: _Graded, passed: int) -> Grade:
        verdict, reason = found
        return Grade(
            verdict=verdict, reason=reason, passed=passed, tests=len(self._task.tests), usage=self._usage,
            stdout=self._last.stdout, stderr=self._last.stderr,
        )  # fmt: skip

    def _spent(self) -> _Graded | None:
        """The verdict once all time is used up: a program that sleeps would else outlast the time there is to judge it,
        and have no reward where it would get none."""
        if self._most_s is None or self._usage.wall_s < self._most_s:
            return None
        return CodeVerdict.TIME_LIMIT, f"all runs together: {self._most_s:g} s"

    async def _one(self, test: Any) -> _Graded:
        if isinstance(test, StdinTest):
            ended = await self._run(*self._form(), stdin=test.stdin.encode("utf-8", "replace"))
            found = unfinished(ended, self._limits)
            if found is None and not await _aside(ended.stdout, _same_output, test.stdout, ended.stdout):
                found = (CodeVerdict.WRONG_ANSWER, None)
            return found or _PASSED
        asked = values.dumps({"entry": self._task.entry, "args": list(test.args), "kwargs": dict(test.kwargs)})
        ended = await self._run("call", {}, stdin=asked)
        found, answer = await _aside(ended.frame, called, ended, self._limits)
        if found is None and not await _aside(ended.frame, same_value, test.result, answer["returned"]):
            found = (CodeVerdict.WRONG_ANSWER, None)
        return found or _PASSED

    def _form(self) -> tuple[str, dict[str, Any]]:
        task = self._task
        return ("command", {"file": task.file, "command": list(task.command)}) if task.command else ("program", {})

    async def _run(self, kind: str, job: dict[str, Any], *, stdin: bytes = b"", program: bytes | None = None,
                   on_frame: Callable[[bytes], Awaitable[bytes]] | None = None) -> Ended:  # fmt: skip
        limits = self._limits
        if self._most_s is not None:
            limits = replace(limits, wall_s=min(limits.wall, max(self._most_s - self._usage.wall_s, _LEAST_S)))
        run = Run(
            kind=kind, program=self._program if program is None else program, stdin=stdin, job=job, limits=limits,
            packages=self._packages,
        )  # fmt: skip
        ended = await self._sandbox.run(run, on_frame)
        if on_frame is not None:  # what it asked for is counted already, and waiting for a place is nobody's time
            ended = replace(ended, wall_s=max(0.0, ended.wall_s - self._asked_s))
        self._usage = self._usage.plus(ended)
        self._last = ended
        return ended

    # Test code

    async def _test_code(self) -> tuple[_Graded, int]:
        """In a sandbox of its own, with a stand-in for the program: its calls come out here and go into other ones."""
        ends: list[_Graded] = []

        async def on_frame(frame: bytes) -> bytes:
            try:
                asked = await _aside(frame, values.loads, frame)
            except ValueError:
                return b""
            if not isinstance(asked, dict) or "entry" not in asked:
                return b""  # the end; it is judged when the run is dead
            found, reply = await self._call(asked)
            if found is not None:
                ends.append(found)
            return LENGTH.pack(len(reply)) + reply

        code = values.dumps([self._task.setup, *self._task.tests])
        tester = await self._run("tests", {"entry": self._task.entry}, program=code, on_frame=on_frame)
        return self._end(tester, ends)

    async def _call(self, asked: Any) -> tuple[_Graded | None, bytes]:
        """The verdict on a call of test code that gave no answer, or None, and what the test code is told."""
        if (spent := self._spent()) is not None:
            return spent, values.dumps({})
        begin = time.perf_counter()
        ended = await self._run("call", {}, stdin=values.dumps(asked))
        self._asked_s += time.perf_counter() - begin
        found, answer = await _aside(ended.frame, partial(called, may_raise=True), ended, self._limits)
        return found, await _aside(ended.frame, values.dumps, answer)

    async def _together(self) -> tuple[_Graded, int]:
        code = values.dumps([self._program.decode("utf-8", "replace"), self._task.setup, *self._task.tests])
        return self._end(await self._run("together", {"entry": self._task.entry}, program=code), [])

    def _end(self, tester: Ended, ends: Sequence[_Graded]) -> tuple[_Graded, int]:
        """What the end of test code says; ``ends``: how calls ended that ended the test."""
        if ends:
            return ends[0], 0
        found = unfinished(tester, self._limits)
        if found is not None:
            return found, 0
        try:
            end = values.loads(tester.frame or b"")
            told, number = end["end"], end["test"]
        except (ValueError, TypeError, KeyError):
            told, number = None, None
        # In one process with the program these are the program's words.
        if type(number) is not int or not 0 <= number <= len(self._task.tests):
            return (CodeVerdict.RUNTIME_ERROR, "the tests did not come to their end"), 0
        passed = max(0, number - 1)
        where = f"test {number}" if number else "the preparation of the tests"
        match told:
            case "passed":
                return _PASSED, len(self._task.tests)
            case "cannot_split":
                raise CannotSplitError(str(end.get("reason"))[:200])
            case "failed":
                return (CodeVerdict.WRONG_ANSWER, where), passed
            case "memory":
                return (CodeVerdict.MEMORY_LIMIT, where), passed
        return (CodeVerdict.RUNTIME_ERROR, f"{where}: the program raised"), passed


async def _aside(data: bytes | None, judge: Callable[..., Any], *what: Any) -> Any:
    """What ``judge`` says; on a thread if there is much to be looked at."""
    return judge(*what) if len(data or b"") <= _AT_ONCE else await asyncio.to_thread(judge, *what)


def _same_output(expected: str, found: bytes) -> bool:
    return same_text(expected, found.decode("utf-8", "replace"))


def unfinished(ended: Ended, limits: Limits) -> _Graded | None:
    """The verdict on a run that did not end by itself with status 0; None if it did."""
    if ended.failure is not None:
        return CodeVerdict.SANDBOX_FAILURE, ended.failure
    if ended.stopped == "output":
        return CodeVerdict.OUTPUT_LIMIT, f"more than {limits.output_kib} KiB"
    if ended.stopped == "cpu" or ended.cpu_s >= limits.cpu_s:
        return CodeVerdict.TIME_LIMIT, f"cpu: {limits.cpu_s:g} s"
    if ended.stopped == "wall":
        return CodeVerdict.TIME_LIMIT, f"wall: {limits.wall:g} s"
    if ended.stopped is not None:
        return CodeVerdict.RUNTIME_ERROR, ended.stopped
    if ended.status == 0:
        return None
    last = ended.stderr.rstrip().rpartition(b"\n")[2]
    if ended.status > 0 and (last == b"MemoryError" or last.startswith(b"MemoryError:")):
        return CodeVerdict.MEMORY_LIMIT, f"{limits.memory_mib} MiB"
    return CodeVerdict.RUNTIME_ERROR, _status(ended.status, last)


def _status(status: int, last_line: bytes) -> str:
    """With the name of an exception, if the last line of stderr looks like one: for a person, who may be deceived."""
    if status >= 0:
        raised = re.match(rb"[A-Za-z_][A-Za-z0-9_.]{0,60}(?=:|$)", last_line)
        return f"exit status {status}" + (f", {raised[0].decode()}" if raised and status == 1 else "")
    return f"signal {signal_name(-status)}"


def called(ended: Ended, limits: Limits, *, may_raise: bool = False) -> tuple[_Graded | None, dict[str, Any]]:
    """(the verdict on a call that gave no value, {}), or (None, {"returned": the value}).

    With ``may_raise`` an exception is an answer too: {"raised", "builtin", "message"}.
    """
    found = unfinished(ended, limits)
    if found is not None:
        return found, {}
    try:
        answer = values.loads(ended.frame or b"")
        if "returned" in answer:
            return None, {"returned": answer["returned"]}
        if "unfit" in answer:
            return (CodeVerdict.RUNTIME_ERROR, "the result is no plain value"), {}
        raised = {name: str(answer[name])[:200] for name in ("raised", "builtin", "message")}
    except (ValueError, TypeError, KeyError):
        return (CodeVerdict.RUNTIME_ERROR, "no result came back"), {}
    if raised["builtin"] == "MemoryError":
        return (CodeVerdict.MEMORY_LIMIT, f"{limits.memory_mib} MiB"), {}
    if may_raise and is_exception(raised["builtin"]):
        return None, raised
    name = _NAME.match(raised["raised"])  # the program's word, for a person: nothing else of it gets into records
    return (CodeVerdict.RUNTIME_ERROR, f"raised {name[0] if name else 'an exception'}"), {}
