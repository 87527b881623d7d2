"""Programs and their tests, from a task's point of view: what passes, what does not, and what is nobody's fault."""

# ruff: noqa: E501  (programs of a line each)

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from hostile import children, why_not

from nearpolicy.verifier.code import task_of
from nearpolicy.verifier.rewards import RowError
from nearpolicy.verifier.sandbox import pool, zygotes
from nearpolicy.verifier.sandbox import worker as worker_module
from nearpolicy.verifier.sandbox.grading import CannotSplitError, CodeTask, Grade, StdinTest, grade
from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.runs import Ended, Limits, Run
from nearpolicy.verifier.sandbox.zygotes import Worker

if (REASON := why_not("namespaces")) is not None:
    pytest.skip(REASON, allow_module_level=True)

ADD = [{"args": [2, 3], "result": 5}]
ADD_CODE = "assert add(2, 3) == 5\nassert add(10, -4) == 6"


def graded(program: str, tests, *, entry="add", limits=None, isolation="namespaces", packages=(), **task) -> Grade:
    async def run():
        sandbox = Workers(isolation, 2, packages)
        try:
            made = tests if isinstance(tests, CodeTask) else task_of(tests, entry=entry, **task)
            return await grade(sandbox, program, made, limits or Limits(), packages=bool(packages))
        finally:
            await sandbox.close()

    return asyncio.run(run())


def all_graded(programs: dict[str, str], tests, *, entry="add", limits=None) -> dict[str, str]:
    """Name -> verdict, all in one sandbox."""

    async def run():
        sandbox = Workers("namespaces", 4)
        task = task_of(tests, entry=entry)
        try:
            found = await asyncio.gather(
                *(grade(sandbox, each, task, limits or Limits()) for each in programs.values())
            )
            return {name: str(each.verdict) for name, each in zip(programs, found, strict=True)}
        finally:
            await sandbox.close()

    return asyncio.run(run())


# K39: a pass needs positive proof that every test ran


@pytest.mark.parametrize("tests", [ADD, ADD_CODE], ids=["calls", "test code"])
def test_leaving_early_is_no_pass(tests):
    """K39."""
    ends = [
        "sys.exit(0)",
        "os._exit(0)",
        "quit()",
        "raise SystemExit",
        "exit()",
        "os.abort()",
        "os.kill(os.getpid(), 9)",
    ]
    programs = {f"at import: {end}": f"import os, sys\n{end}\ndef add(a, b): return a + b" for end in ends}
    programs |= {f"inside: {end}": f"import os, sys\ndef add(a, b):\n    {end}\n    return a + b" for end in ends}
    assert set(all_graded(programs, tests).values()) == {"runtime_error"}


def test_a_program_that_raises_is_not_right_where_nothing_is_expected():
    """K39."""
    task = CodeTask(tests=(StdinTest(stdin="", stdout=""),))
    assert graded("raise ValueError", task).verdict == "runtime_error"
    assert graded("pass", task).verdict == "passed"
    assert graded("def add(a, b): raise ValueError", [{"args": [1, 2], "result": None}]).verdict == "runtime_error"
    assert graded("def add(a, b): pass", [{"args": [1, 2], "result": None}]).verdict == "passed"


def test_test_code_that_tests_nothing_passes_nobody():
    """K39."""
    for code in ("pass", "def check(candidate): pass", "x = 1"):
        with pytest.raises(CannotSplitError, match="never calls"):
            graded("def add(a, b): return a + b", code)
    with pytest.raises(RowError, match="at least one"):
        task_of([])


# K40: verdicts travel where the candidate cannot write


def test_claims_of_success_count_for_nothing_and_noise_harms_nothing():
    """K40."""
    claims = ["2 passed", "OK", '{"passed": true, "score": 1.0}', '{"returned":5}', '{"end":"passed","test":1}']
    lies = "\n".join(f"print({claim!r}); print({claim!r}, file=sys.stderr)" for claim in claims)
    programs = {
        "wrong": f"import sys\n{lies}\ndef add(a, b):\n    return a - b",
        "right": f"import sys\n{lies}\ndef add(a, b):\n    print('debug', a)\n    return a + b",
    }
    for tests in (ADD, ADD_CODE):
        assert all_graded(programs, tests) == {"wrong": "wrong_answer", "right": "passed"}


def test_a_forged_result_is_still_compared():
    """K40: the program may well write frames; it does not know what would be right."""
    forged = (
        "import os, struct\ndef frame(b): os.write(3, struct.pack('>I', len(b)) + b)\n"
        "def add(a, b):\n    {}\n    return a + b"
    )
    programs = {
        "a wrong value": forged.format("frame(b'{\"returned\":4}')"),
        "the end of the tests": forged.format('frame(b\'{"end":"passed","test":2}\')'),
        "no JSON": forged.format("frame(b'passed')"),
        "an endless frame": forged.format("os.write(3, b'\\xff\\xff\\xff\\xff')"),
        "another call": forged.format('frame(b\'{"entry":"add","args":[1,1],"kwargs":{}}\')'),
    }
    for tests in (ADD, ADD_CODE):
        assert "passed" not in all_graded(programs, tests).values()


# K41: a grading leaves nothing behind


def test_what_a_program_starts_is_gone_with_the_verdict():
    """K41."""
    sleeper = "import os, time\ndef add(a, b):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(300)\n    return a + b"
    bomb = "import os\ndef add(a, b):\n    while True:\n        os.fork()"
    before = children()
    begin = time.monotonic()
    limits = Limits(processes=8, wall_s=2)
    assert graded(sleeper, ADD, limits=limits).verdict == "passed"
    assert graded(bomb, ADD, limits=limits).verdict in ("time_limit", "runtime_error")
    assert time.monotonic() - begin < 15
    deadline = time.monotonic() + 1
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children() - before == set()


def test_twenty_programs_that_never_end_leave_no_process():
    """K41."""
    before = children()
    programs = {str(i): "def add(a, b):\n    while True: pass" for i in range(20)}
    assert set(all_graded(programs, ADD, limits=Limits(cpu_s=0.2)).values()) == {"time_limit"}
    assert children() - before == set()


# K42: memory and output are bounded


def test_too_much_memory_and_too_much_output_end_a_program_and_harm_no_other():
    """K42."""
    programs = {
        "memory": "x = bytearray(8 * 10**9)\ndef add(a, b): return a + b",
        "memory inside": "def add(a, b): return len([0] * 10**9)",
        "output": "def add(a, b):\n    while True: print('x' * 1000)",
        "errors": "import sys\ndef add(a, b):\n    while True: sys.stderr.write('x' * 100_000)",
        "result": "def add(a, b): return 'x' * 10**7",
        "right": "def add(a, b): return a + b",
    }
    assert all_graded(programs, ADD, limits=Limits(cpu_s=2)) == {
        "memory": "memory_limit",
        "memory inside": "memory_limit",
        "output": "output_limit",
        "errors": "output_limit",
        "result": "output_limit",
        "right": "passed",
    }
    kept = graded("while True: print('x' * 1000)", CodeTask(tests=(StdinTest(stdin="", stdout=""),)))
    assert kept.verdict == "output_limit"
    assert len(kept.stdout) <= 2**20


def test_bytes_may_be_written_to_stdout():
    """K43."""
    task = CodeTask(tests=(StdinTest(stdin="7\n", stdout="49\n"),))
    assert (
        graded("import sys\nsys.stdout.buffer.write(b'%d' % (int(sys.stdin.buffer.read()) ** 2))", task).verdict
        == "passed"
    )


# K44: what decides is invisible


def test_the_expected_value_is_nowhere_to_be_found():
    """K44."""
    search = """
import gc, os, sys
def word(a, b):
    wanted = "".join(["zebra", "-4711"])
    seen = [str(sys.argv), str(sys.orig_argv), str(os.environ), str(sys.path), str(sys.flags)]
    for folder, _, names in os.walk("/"):
        if folder.startswith(("/usr", "/lib", "/root", "/packages")):
            continue
        for name in names:
            try:
                seen.append(open(os.path.join(folder, name), "rb").read(1 << 16).decode("latin1"))
            except OSError:
                pass
    for object in gc.get_objects():
        seen.append(repr(object)[:100_000] if isinstance(object, (dict, list, tuple, str)) else "")
    frame = sys._getframe(1)
    while frame:
        seen.append(repr(frame.f_locals) + repr(list(frame.f_globals)))
        frame = frame.f_back
    return any(wanted in text for text in seen)
"""
    tests = [{"args": [1, 2], "result": "zebra-4711"}]
    assert graded(search, tests, entry="word").verdict == "wrong_answer"
    assert graded(search, [{"args": [1, 2], "result": False}], entry="word").verdict == "passed"
    assert graded(search, "assert word(1, 2) == 'zebra-4711'", entry="word").verdict == "wrong_answer"
    assert graded(search, "assert word(1, 2) is False", entry="word").verdict == "passed"


# K45: failure of the machinery is not failure of the policy


class Breaks(Workers):
    """A sandbox whose runs of programs that hold `word` never start."""

    def __init__(self, word: bytes, everything: bool = False) -> None:
        super().__init__("namespaces", 2)
        self._word, self._everything = word, everything
        self.attempts = 0

    async def _attempt(self, run, on_frame):
        if self._everything or self._word in run.program:
            self.attempts += 1
            return Ended(failure="clone3: Resource temporarily unavailable")
        return await super()._attempt(run, on_frame)


def broken(everything: bool) -> tuple[Grade, int]:
    async def run():
        sandbox = Breaks(b"unlucky", everything)
        try:
            task = task_of(ADD, entry="add")
            return await grade(sandbox, "unlucky = 1\ndef add(a, b): return a + b", task, Limits()), sandbox.attempts
        finally:
            await sandbox.close()

    return asyncio.run(run())


def test_a_sandbox_that_cannot_run_anything_says_nothing_about_a_program():
    """K45."""
    found, attempts = broken(everything=True)
    assert found.verdict == "sandbox_failure"
    assert attempts == pool.ATTEMPTS + 1


def test_a_program_that_alone_cannot_be_run_is_to_blame():
    """K45: otherwise a policy could learn to break its sandbox, and be excused."""
    found, attempts = broken(everything=False)
    assert found.verdict == "runtime_error"
    assert attempts == pool.ATTEMPTS


class Starves(Workers):
    """A sandbox in which programs that hold `word` wait for a processor until their time is over; under load all do
    that want to compute for long."""

    def __init__(self, under_load: bool, breaks_at: int = 0) -> None:
        super().__init__("namespaces", 1)
        self._breaks_at, self._attempts = breaks_at, 0
        self._hungry = [b"unlucky", *([pool.BUSY] if under_load else [])]
        self.limits: list[Limits] = []
        """Of the controls that want as much."""

    async def _attempt(self, run, on_frame):
        if run.program == pool.BUSY:
            self.limits.append(run.limits)
        self._attempts += b"unlucky" in run.program
        if self._attempts == self._breaks_at and b"unlucky" in run.program:
            return Ended(failure="a worker of the sandbox ended under a run")
        if any(word in run.program for word in self._hungry):
            return Ended(failure="the run got next to no processor time before its wall limit", starved=True)
        return await super()._attempt(run, on_frame)


@pytest.mark.parametrize(
    ("under_load", "breaks_at", "verdict"),
    [
        (True, 0, "sandbox_failure"),
        (False, 0, "runtime_error"),
        (True, 4, "runtime_error"),  # it waits, and then breaks its worker
    ],
)
def test_a_program_without_processor_time_is_to_blame_only_if_one_that_wants_as_much_gets_it(
    under_load, breaks_at, verdict
):
    async def run():
        sandbox = Starves(under_load, breaks_at)
        try:
            program = "unlucky = 1\ndef add(a, b): return a + b"
            return await grade(sandbox, program, task_of(ADD, entry="add"), Limits(cpu_s=1)), sandbox.limits
        finally:
            await sandbox.close()

    found, limits = asyncio.run(run())
    assert found.verdict == verdict
    assert {limit.cpu_s for limit in limits} == {1}


def test_a_worker_that_dies_under_a_run_is_replaced_and_the_run_tried_again(monkeypatch):
    async def run():
        sandbox = Workers("namespaces", 1)
        send, killed = Worker._send, []

        def send_and_kill(self, run, running):
            send(self, run, running)
            if not killed:
                killed.append(self._process.pid)
                self._process.send_signal(signal.SIGKILL)

        monkeypatch.setattr(Worker, "_send", send_and_kill)
        try:
            return await sandbox.run(Run(kind="program", program=b"import time; time.sleep(0.2); print(1)")), killed
        finally:
            await sandbox.close()

    ended, killed = asyncio.run(run())
    assert ended.failure is None
    assert ended.stdout == b"1\n"
    assert len(killed) == 1


# Honest programs that look odd


HONEST = {
    "deep recursion": "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
    "threads": (
        "import threading\nthreading.stack_size(64 * 2**20)\nout = []\n"
        "t = [threading.Thread(target=out.append, args=(i,)) for i in range(4)]\n"
        "[x.start() for x in t]; [x.join() for x in t]\nprint(20000 + len(out) - 4)"
    ),
    "a thread that is not waited for": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print(20000))).start()",
    "an explicit exit": "import sys\nprint(20000)\nsys.exit(0)",
    "an exit hook": "import atexit\natexit.register(print, 20000)",
    "noise on stderr": "import sys\nprint('x' * 10**6, file=sys.stderr)\nprint(20000)",
    "files": "open('a.txt', 'w').write('20000')\nprint(open('a.txt').read())",
    "a temporary file": "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write('20000'); f.seek(0); print(f.read())",
    "an event loop": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 20000\nprint(asyncio.run(f()))",
    "a thread pool": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(sum(p.map(int, [5000] * 4)))",
    "main guard": "def main(): print(20000)\nif __name__ == '__main__': main()",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 20000\nprint(A().x)",
    "an encoding line": "# -*- coding: latin-1 -*-\nprint(20000)",
    "unicode": "print(len('é' * 20000))",
    "a handler for alarms": "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: print(20000))\nsignal.setitimer(signal.ITIMER_REAL, .05)\ntime.sleep(.2)",
    "its own signal": "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: print(20000))\nos.kill(os.getpid(), signal.SIGUSR1)",
    "many modules": "import xml.dom.minidom, sqlite3, zlib, difflib, email, unittest, urllib.parse\nprint(20000)",
    "pickling": "import pickle, copy\nclass A: pass\npickle.loads(pickle.dumps(A())); copy.deepcopy(A())\nprint(20000)",
    "hash order": "print(len({str(i) for i in range(20000)}))",
    "big numbers": "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(10**19999)))",
    "resource limits of its own": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (4, 4))\nprint(20000)",
}  # fmt: skip


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
def test_honest_programs_that_look_odd_pass(isolation):
    async def run():
        sandbox = Workers(isolation, 4)
        task = CodeTask(tests=(StdinTest(stdin="", stdout="20000"),))
        try:
            found = await asyncio.gather(*(grade(sandbox, each, task, Limits()) for each in HONEST.values()))
            return {n: (g.reason, g.stderr[-300:]) for n, g in zip(HONEST, found, strict=True) if g.verdict != "passed"}
        finally:
            await sandbox.close()

    failed = asyncio.run(run())
    if isolation == "landlock":  # it has no folder that a program may write to
        assert failed.pop("files") and failed.pop("a temporary file")
    assert failed == {}


def test_large_input_and_output():
    task = CodeTask(tests=(StdinTest(stdin="1 " * 400_000, stdout="1 " * 400_000),))
    assert graded("print(*input().split())", task).verdict == "passed"


def test_numpy_where_it_is_allowed():
    from nearpolicy.verifier.sandbox.ladder import installed

    found = graded(
        "import numpy as np\ndef add(a, b): return int(np.array([a, b]).sum())", ADD, packages=installed(["numpy"])
    )
    assert found.verdict == "passed", found.stderr


def test_a_scalar_of_numpy_is_the_number_it_is():
    from nearpolicy.verifier.sandbox.ladder import installed

    program = "import numpy as np\ndef add(a, b): return [np.int64(a) + b, np.float32(0.5), np.bool_(True)]"
    tests = [{"args": [2, 3], "result": [5, 0.5, True]}]
    assert graded(program, tests, packages=installed(["numpy"])).verdict == "passed"
    assert graded(program, "assert add(2, 3) == [5, 0.5, True]", packages=installed(["numpy"])).verdict == "passed"


def test_methods_keyword_arguments_and_values_of_all_types():
    program = "class Solution:\n    def swap(self, a, *, b):\n        return (b, {a}, {1: a}, str(b).encode())"
    tests = [
        {
            "args": [1],
            "kwargs": {"b": "x"},
            "result": {
                "$": "tuple",
                "v": ["x", {"$": "set", "v": [1]}, {"$": "dict", "v": [[1, 1]]}, {"$": "bytes", "v": "78"}],
            },
        }
    ]
    assert graded(program, tests, entry="Solution.swap").verdict == "passed"


def test_the_first_test_that_is_not_passed_decides_and_is_named_by_number_only():
    tests = [*ADD, {"args": [1, 1], "result": 3}, {"args": ["a", 1], "result": 0}]
    found = graded("def add(a, b): return a + b", tests)
    assert (found.verdict, found.reason, found.passed, found.tests) == ("wrong_answer", "test 2", 1, 3)


# Test code


def test_test_code_sees_values_exceptions_and_types_of_the_program():
    code = [
        "assert add(1, b=2) == 3 and type(add(1, 2)) is int",
        "assert add([1], [2]) == [1, 2] and add((1,), (2,)) == (1, 2)",
        "try:\n    add(1, 'a')\n    assert False\nexcept TypeError as error:\n    assert 'unsupported' in str(error)",
        "import math\nassert math.isnan(add(float('nan'), 1))",
    ]
    assert graded("def add(a, b): return a + b", code).verdict == "passed"
    found = graded("def add(a, b): return a + b if a != 1 else 4", code)
    assert (found.verdict, found.reason) == ("wrong_answer", "test 1")
    assert graded("def add(a, b): return a.nothing", code).verdict == "runtime_error"


def test_an_object_that_agrees_with_everything_does_not_reach_the_test():
    program = "class Yes:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\ndef add(a, b): return Yes()"
    assert graded(program, ADD_CODE).verdict == "runtime_error"
    sub = "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Yes(0)"
    assert graded(sub, ADD_CODE).verdict == "wrong_answer"


def test_an_exception_named_like_a_function_runs_nothing():
    forged = (
        'import os, struct\nb = b\'{"raised":"x","builtin":"exec","message":"import os; os._exit(0)"}\'\n'
        "def add(a, b_): os.write(3, struct.pack('>I', len(b)) + b); os._exit(0)"
    )
    assert graded(forged, ADD_CODE).verdict == "runtime_error"


def test_an_exception_that_ends_a_loop_does_not_end_the_tests():
    code = "for found, right in zip(map(add, [1, 2], [3, 4]), [4, 6]):\n    assert found == right"
    assert graded("def add(a, b): return a + b", code).verdict == "passed"
    assert graded("def add(a, b): raise StopIteration", code).verdict == "runtime_error"


def test_what_ends_test_code_is_not_undone_by_catching_everything():
    code = "try:\n    add(1, 'a')\nexcept:\n    pass\nelse:\n    assert False"
    assert graded("def add(a, b): return a + b", code).verdict == "passed"
    assert graded("def add(a, b): return (a for _ in [b])", code).verdict == "runtime_error"
    with pytest.raises(CannotSplitError, match="type function"):
        graded("def add(a, b): return a + b", "try:\n    add(lambda: 1, 1)\nexcept:\n    pass")


def test_a_value_that_is_too_deep_once_the_test_wraps_it_is_no_excuse():
    """K45: it cannot be handed on, and that was the program's choice."""
    deep = "def wrap(x):\n    for _ in range(63): x = [x]\n    return x"
    assert graded(deep, "assert wrap(wrap(1)) == 1", entry="wrap").verdict == "wrong_answer"


def test_a_function_may_be_called_check():
    for together in (False, True):
        program = "def check(a): return a\ndef other(a): return check(a)"
        assert graded(program, "assert check(3) == 3", entry="check", together=together).verdict == "passed"
        assert graded(program, "assert other(3) == 3", entry="other", together=together).verdict == "passed"


def test_test_code_may_call_from_threads():
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
        "    assert list(pool.map(add, range(8), range(8))) == list(range(0, 16, 2))"
    )
    assert graded("def add(a, b): return a + b", code).verdict == "passed"


def test_a_forged_end_of_the_weaker_trust_is_still_one_of_the_tests():
    forged = (
        "import os, struct\nb = b'{}'\nos.write(3, struct.pack('>I', len(b)) + b)\n"
        "os._exit(0)\ndef add(a, b): return a + b"
    )
    for number in ("Infinity", "1000000", "-5", "true", '"1"', "[]"):
        program = forged.replace("{}", '{"end":"failed","test":' + number + "}")
        found = graded(program, ["assert add(2, 3) == 5"], together=True)
        assert (found.verdict, found.passed) == ("runtime_error", 0)


def test_test_code_is_not_late_while_its_calls_wait_for_a_place():
    async def run():
        sandbox = Workers("namespaces", 1)
        slow = Run(kind="program", program=b"import time; time.sleep(0.6)")
        task = task_of(ADD_CODE, entry="add")
        waiting = [sandbox.run(slow) for _ in range(4)]
        try:
            found = await asyncio.gather(
                *waiting, grade(sandbox, "def add(a, b): return a + b", task, Limits(wall_s=1.5))
            )
            endless = await grade(
                sandbox, "def add(a, b): return 5", task_of("add(1, 1)\nwhile True: pass", entry="add"),
                Limits(cpu_s=60, wall_s=0.5),
            )  # fmt: skip
            return found[-1].verdict, endless.verdict
        finally:
            await sandbox.close()

    assert asyncio.run(run()) == ("passed", "time_limit")


def test_a_run_that_ended_in_time_is_not_late_because_its_judge_was():
    async def run():
        sandbox = Workers("namespaces", 1)
        try:
            await sandbox.run(Run(kind="program", program=b""))
            quick = Run(kind="program", program=b"import time; time.sleep(0.3); print(1)", limits=Limits(wall_s=1.5))
            running = asyncio.create_task(sandbox.run(quick))
            await asyncio.sleep(0.15)
            time.sleep(2)
            return await running
        finally:
            await sandbox.close()

    ended = asyncio.run(run())
    assert (ended.stopped, ended.failure, ended.stdout) == (None, None, b"1\n")


def test_a_large_result_does_not_hold_up_the_judge():
    program = "def add(a, b): return [[] for _ in range(300_000)]"

    async def run():
        longest, last, ended = 0.0, time.perf_counter(), False

        async def watch():
            nonlocal longest, last
            while not ended:
                longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
                await asyncio.sleep(0.005)

        sandbox = Workers("namespaces", 1)
        watching = asyncio.create_task(watch())
        try:
            found = await grade(sandbox, program, task_of(ADD, entry="add"), Limits())
        finally:
            ended = True
            await watching
            await sandbox.close()
        return found.verdict, longest

    verdict, longest = asyncio.run(run())
    assert verdict == "wrong_answer"
    assert longest < 1.0


def test_single_bytes_do_not_keep_the_judge_busy():
    program = b"import fcntl, os\nfcntl.fcntl(2, fcntl.F_SETFL, os.O_DIRECT)\nwhile True: os.write(2, b'x')"

    async def run():
        sandbox = Workers("namespaces", 1)
        try:
            await sandbox.run(Run(kind="program", program=b""))
            begin = time.process_time()
            await sandbox.run(Run(kind="program", program=program, limits=Limits(cpu_s=5, wall_s=2)))
            return time.process_time() - begin
        finally:
            await sandbox.close()

    assert asyncio.run(run()) < 0.5


def test_a_run_for_which_there_are_no_descriptors_keeps_none(monkeypatch):
    async def run():
        sandbox = Workers("namespaces", 1)
        try:
            await sandbox.run(Run(kind="program", program=b""))
            before = len(os.listdir("/proc/self/fd"))
            with monkeypatch.context() as patch:
                patch.setattr(zygotes, "sealed", none_left)
                failed = await sandbox.run(Run(kind="program", program=b""))
            await sandbox.run(Run(kind="program", program=b""))
            return failed.failure, len(os.listdir("/proc/self/fd")) - before
        finally:
            await sandbox.close()

    def none_left(*_):
        raise OSError("too many open files")

    failure, more = asyncio.run(run())
    assert "too many open files" in failure
    assert more <= 1  # the thread that waits for ended workers may hold one


def test_closing_while_a_worker_starts_leaves_none():
    async def run():
        sandbox = Workers("namespaces", 1)
        running = asyncio.create_task(sandbox.run(Run(kind="program", program=b"import time; time.sleep(5)")))
        await asyncio.sleep(0.02)
        begin = time.perf_counter()
        await sandbox.close()
        ended = await running
        return ended.failure, time.perf_counter() - begin

    failure, seconds = asyncio.run(run())
    assert failure is not None
    assert seconds < 4


def test_what_a_program_leaves_is_gone_without_namespaces_too():
    """K41."""
    sleeper = b"import os, time\nif os.fork() == 0:\n    if os.fork() == 0:\n        time.sleep(300)\n    os._exit(0)"
    bomb = b"import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        os._exit(0)"

    async def run():
        sandbox = Workers("landlock", 1)
        try:
            for program in (sleeper, bomb, sleeper):
                await sandbox.run(Run(kind="program", program=program, limits=Limits(processes=8, wall_s=3)))
            [worker] = sandbox._idle[False]
            return below(worker._process.pid)
        finally:
            await sandbox.close()

    def below(pid):
        return [each for each, parent, _ in worker_module._processes() if parent == pid]

    assert asyncio.run(run()) == []


def test_a_run_that_is_killed_from_outside_is_run_again():
    """K45: as when the machine has no memory left."""

    async def run():
        sandbox = Workers("namespaces", 1)
        program = b"import time; time.sleep(1); print(1)"
        running = asyncio.create_task(sandbox.run(Run(kind="program", program=program)))
        try:
            await asyncio.sleep(0.5)
            while not (started := [each for w in sandbox._busy for p in below(w._process.pid) for each in below(p)]):
                await asyncio.sleep(0.01)
            os.kill(started[0], signal.SIGKILL)
            ended = await running
            itself = b"import os\nwhile True: os.kill(os.getpid(), 9)"
            return ended, await sandbox.run(Run(kind="program", program=itself))
        finally:
            await sandbox.close()

    def below(pid):
        return [each for each, parent, _ in worker_module._processes() if parent == pid]

    ended, itself = asyncio.run(run())
    assert (ended.failure, ended.stopped, ended.status, ended.stdout) == (None, None, 0, b"1\n")
    assert itself.stopped is None and itself.failure is None and itself.status < 0


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
def test_a_crash_is_nothing_to_keep(isolation):
    look = b"import ctypes, resource\nprint(resource.getrlimit(4), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"

    async def run():
        sandbox = Workers(isolation, 1)
        try:
            return await sandbox.run(Run(kind="program", program=look))
        finally:
            await sandbox.close()

    assert asyncio.run(run()).stdout == b"(1, 1) 0\n"


def test_a_run_does_not_learn_where_on_this_machine_its_judge_lies():
    look = """
import ctypes, sys
frame, seen = sys._getframe(), []
while frame:
    seen += [repr(frame.f_code.co_consts), repr(frame.f_locals), repr(frame.f_globals)]
    frame = frame.f_back
count, words = ctypes.c_int(), ctypes.POINTER(ctypes.c_wchar_p)()
ctypes.pythonapi.Py_GetArgcArgv(ctypes.byref(count), ctypes.byref(words))
seen += [words[i] for i in range(count.value)]
print(" ".join(seen))
"""

    async def run():
        from nearpolicy.verifier.sandbox.ladder import installed

        sandbox = Workers("namespaces", 1, installed(["numpy"]))
        try:
            return await sandbox.run(Run(kind="program", program=look.encode(), packages=True))
        finally:
            await sandbox.close()

    ended = asyncio.run(run())
    assert ended.status == 0 and ended.stdout
    assert str(pathlib.Path(zygotes.__file__).parent).encode() not in ended.stdout
    assert b"site-packages/numpy" not in ended.stdout


def test_numpy_draws_the_same_numbers_on_every_worker():
    from nearpolicy.verifier.sandbox.ladder import installed

    program = b"import numpy\nprint(numpy.random.random(), numpy.random.permutation(20))"

    async def run():
        seen = set()
        for slot in range(2):
            worker = await Worker.start("namespaces", slot, installed(["numpy"]))
            seen.add((await worker.run(Run(kind="program", program=program, packages=True))).stdout)
            await worker.close()
        return seen

    [drawn] = asyncio.run(run())
    assert drawn


def test_where_nothing_can_be_tried_the_isolation_is_refused(monkeypatch, tmp_path):
    from nearpolicy.errors import VerifierError
    from nearpolicy.verifier.sandbox.ladder import opened

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(VerifierError, match="temporary files"):
        asyncio.run(opened("namespaces", workers=1, packages=(), allow_unisolated=False))


def test_test_code_that_needs_more_than_values_says_so():
    with pytest.raises(CannotSplitError, match="type function"):
        graded("def apply(f, x): return f(x)", "assert apply(lambda x: x, 1) == 1", entry="apply")
    assert (
        graded(
            "def apply(f, x): return f(x)", "assert apply(lambda x: x, 1) == 1", entry="apply", together=True
        ).verdict
        == "passed"
    )
    assert (
        graded("def apply(f, x): return 2", "assert apply(lambda x: x, 1) == 1", entry="apply", together=True).verdict
        == "wrong_answer"
    )


RUNNERS = {
    "functions": "from solution import add\ndef test_add():\n    assert add(2, 3) == 5\ndef test_more():\n    assert add(1, 1) == 2",
    "unittest": "import unittest, solution\nclass Tests(unittest.TestCase):\n    def setUp(self):\n        self.a = 2\n"
    "    def test_add(self):\n        self.assertEqual(solution.add(self.a, 3), 5)\n    def test_raises(self):\n"
    "        with self.assertRaises(TypeError):\n            solution.add(1, 'a')",
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("form", RUNNERS)
def test_whole_test_files_are_run_as_a_test_runner_would(form, together):
    """K39: also where a program ends the process that its tests run in, or brings tests of its own."""
    programs = {
        "right": ("def add(a, b): return a + b", "passed"),
        "wrong": ("def add(a, b): return a - b", "wrong_answer"),
        "gone": ("import os\ndef add(a, b): os._exit(0)", "runtime_error"),
        "own tests": (
            "def add(a, b): return a + b\ndef test_add(x): pass\ndef test_mine():\n    assert False",
            "passed",
        ),
        "raises": ("def add(a, b): return a.b", "runtime_error"),
    }
    for program, verdict in programs.values():
        found = graded(program, RUNNERS[form], together=together)
        assert found.verdict == verdict, (program, found)


def test_arguments_that_a_program_changes_stay_as_they_are_in_the_test():
    program = "def sort(items):\n    items.clear()\n    return []"
    assert (
        graded(program, "items = [2, 1]\nassert sort(items) == sorted(items)", entry="sort").verdict == "wrong_answer"
    )


@pytest.mark.parametrize(
    ("command", "file", "program"),
    [
        (("sh", "main.sh"), "main.sh", "read n; echo $((n * n))"),
        (("awk", "-f", "main.awk"), "main.awk", "{print $1 * $1}"),
    ],
)
def test_other_languages(command, file, program):
    task = CodeTask(tests=(StdinTest(stdin="7\n", stdout="49\n"),), command=command, file=file)
    found = graded(program, task, limits=Limits(processes=4))
    assert found.verdict == "passed", found.stderr
    assert graded("echo 1", task, limits=Limits(processes=4)).verdict != "passed"
    missing = CodeTask(tests=task.tests, command=("no-such-language",))
    assert graded(program, missing, limits=Limits(processes=4)).reason == "test 1: exit status 127"


def test_one_program_cannot_leave_anything_for_the_next():
    async def run():
        sandbox = Workers("namespaces", 1)
        leave = b"import os, sys, json\nopen('x','w').write('1')\njson.dumps = None\nos.environ['A'] = '1'\nimport builtins\nbuiltins.print = None"
        look = b"import os, json\nprint(os.listdir('.'), os.environ.get('A'), json.dumps(1))"
        try:
            await sandbox.run(Run(kind="program", program=leave))
            return await sandbox.run(Run(kind="program", program=look))
        finally:
            await sandbox.close()

    assert asyncio.run(run()).stdout == b"[] None 1\n"


def test_the_same_program_and_input_give_the_same_output():
    program = b"import random\nprint(random.random(), {str(i) for i in range(20)}, hash('a'))"

    async def run():
        seen = set()
        for slot in range(3):
            worker = await Worker.start("namespaces", slot, [])
            seen.add((await worker.run(Run(kind="program", program=program))).stdout)
            await worker.close()
        return seen

    assert len(asyncio.run(run())) == 1


def test_workers_end_with_the_process_that_started_them():
    script = (
        "import asyncio, os\nfrom nearpolicy.verifier.sandbox.zygotes import Worker\n"
        "async def f():\n    w = await Worker.start('namespaces', 0, [])\n    print(w._process.pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
        "asyncio.run(f())"
    )
    before = children()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children() - before == set()


@pytest.mark.large
def test_ten_thousand_runs_leave_no_process_no_descriptor_and_no_memory():
    import resource

    async def run():
        sandbox = Workers("namespaces", 2)
        program = Run(kind="program", program=b"print(1)")
        try:
            await asyncio.gather(*(sandbox.run(program) for _ in range(200)))
            descriptors, held = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(50):
                ended = await asyncio.gather(*(sandbox.run(program) for _ in range(200)))
                assert all(each.stdout == b"1\n" and each.failure is None for each in ended)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return descriptors, len(os.listdir("/proc/self/fd")), after - held
        finally:
            await sandbox.close()

    before = children()
    descriptors, later, growth = asyncio.run(run())
    assert abs(later - descriptors) <= 8
    assert growth < 50 * 1024
    assert children() - before == set()
