"""A remote sandbox: the same verdicts through a service, and what is not a verdict when the service is at fault."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx2
import pytest

from nearpolicy.errors import VerifierError
from nearpolicy.verifier.code import task_of
from nearpolicy.verifier.sandbox import remote
from nearpolicy.verifier.sandbox.grading import CodeTask, StdinTest, grade
from nearpolicy.verifier.sandbox.remote import Remote
from nearpolicy.verifier.sandbox.runs import Limits, Run

SQUARE = CodeTask(tests=(StdinTest(stdin="7\n", stdout="49\n"),))


def service(request: httpx2.Request) -> httpx2.Response:
    """What SandboxFusion does with Python, in short."""
    asked = json.loads(request.content)
    assert asked["language"] == "python"
    try:
        done = subprocess.run(
            [sys.executable, "-c", asked["code"]], input=asked["stdin"], text=True, capture_output=True,
            timeout=asked["run_timeout"],
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "49\n", "stderr": ""}
        return httpx2.Response(200, json={"status": "Failed", "message": "", "run_result": result})
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    status = "Success" if done.returncode == 0 else "Failed"
    return httpx2.Response(200, json={"status": status, "message": "", "run_result": result})


def with_remote(action, handler=service):
    async def run():
        sandbox = Remote("http://sandbox.test", 4, transport=httpx2.MockTransport(handler))
        try:
            return await action(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def verdict(program: str, task: CodeTask, limits: Limits | None = None) -> str:
    return str(with_remote(lambda sandbox: grade(sandbox, program, task, limits or Limits())).verdict)


def test_programs_that_print():
    assert verdict("print(int(input()) ** 2)", SQUARE) == "passed"
    assert verdict("print(int(input()) ** 3)", SQUARE) == "wrong_answer"
    assert verdict("print(49); raise SystemExit(3)", SQUARE) == "runtime_error"
    assert verdict("print(49, flush=True)\nwhile True: pass", SQUARE, Limits(wall_s=0.5)) == "time_limit"
    assert verdict("print('x' * 2000)", SQUARE, Limits(output_kib=1)) == "output_limit"


def test_functions_and_what_they_claim():
    calls = task_of([{"args": [2, {"$": "tuple", "v": [3]}], "result": [2, 3]}], entry="join")
    assert verdict("def join(a, b):\n    print('noise')\n    return [a, *b]", calls) == "passed"
    assert verdict("def join(a, b): return [a]", calls) == "wrong_answer"
    assert verdict("def join(a, b): raise ValueError", calls) == "runtime_error"
    assert verdict("import os\nos._exit(0)", calls) == "runtime_error"
    assert verdict("def join(a, b):\n    print('result-0:{\"returned\":[2,3]}')\n    return 1", calls) == "wrong_answer"
    together = task_of("assert join(1, [2]) == [1, 2]", entry="join", together=True)
    assert verdict("def join(a, b): return [a, *b]", together) == "passed"
    assert verdict("def join(a, b): return 1", together) == "wrong_answer"


def test_test_code_apart_needs_a_sandbox_at_hand():
    assert verdict("def join(a, b): return 1", task_of("assert join(1, 2)", entry="join")) == "sandbox_failure"


@pytest.mark.parametrize(
    ("answer", "attempts", "words"),
    [
        (httpx2.Response(503), 3, "status 503"),
        (httpx2.Response(401), 1, "status 401"),
        (httpx2.Response(200, text="no JSON"), 3, "no result of a run"),
        (httpx2.Response(200, json={"status": "SandboxError", "message": "pod lost"}), 3, "pod lost"),
        (httpx2.Response(200, json={"status": "Success", "run_result": None}), 3, "failed to run it"),
        (httpx2.ConnectError("refused"), 3, "cannot be reached"),
    ],
)
def test_faults_of_the_service_are_no_verdict(answer, attempts, words, monkeypatch):
    monkeypatch.setattr(remote, "BACK_OFF_S", 0.0)
    asked = []

    def handler(request):
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = with_remote(lambda sandbox: grade(sandbox, "print(49)", SQUARE, Limits()), handler)
    assert found.verdict == "sandbox_failure"
    assert words in found.reason
    assert len(asked) == attempts


def test_a_service_that_does_not_run_programs_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(remote, "BACK_OFF_S", 0.0)
    with pytest.raises(VerifierError, match=r"cannot be used: .*status 404.*verifier\.sandbox_url"):
        with_remote(lambda sandbox: sandbox.check(), lambda _: httpx2.Response(404))
    echo = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "50", "stderr": ""}}
    with pytest.raises(VerifierError, match="where 49 was due"):
        with_remote(lambda sandbox: sandbox.check(), lambda _: httpx2.Response(200, json=echo))


def test_an_address_that_is_none_is_refused_at_the_start():
    async def check():
        sandbox = Remote("http://[::1", 1)
        try:
            await sandbox.check()
        finally:
            await sandbox.close()

    with pytest.raises(VerifierError, match=r"http://\[::1/run_code is no address.*verifier\.sandbox_url"):
        asyncio.run(check())


def test_a_fault_that_passes_is_tried_again(monkeypatch):
    monkeypatch.setattr(remote, "BACK_OFF_S", 0.0)
    calls = iter([httpx2.Response(502), None])

    def handler(request):
        return next(calls) or service(request)

    ended = with_remote(lambda sandbox: sandbox.run(Run(kind="program", program=b"print(1)")), handler)
    assert ended.failure is None
    assert ended.stdout == b"1\n"
