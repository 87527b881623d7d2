"""Worker processes: deadlines, deaths, control runs, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from scoring import score, verifying

from nearpolicy.errors import VerifierError
from nearpolicy.records import Outcome
from nearpolicy.verifier.config import FunctionReward, MathVerifyReward, RegexReward
from nearpolicy.verifier.functions import RewardFunctionError
from nearpolicy.verifier.messages import frame
from nearpolicy.verifier.rewards import Sample
from nearpolicy.verifier.workers import HOPELESS_CALLS, WorkerDied, WorkerPool, WorkerProcess, judge

SUBMISSION = Sample(text="submission", columns={}, completion_ids=[], task="t")
CONTROL = Sample(text="control", columns={}, completion_ids=[], task="t")
ANOTHER = Sample(text="another", columns={}, completion_ids=[], task="t")
TOWER = r"\boxed{9^{9^{9^{9}}}}"
ENDLESS = r"\boxed{\sum_{k=1}^{2} 9^{9^{9^{9}}}}"
"""A sum is for math-verify, which computes it; a power alone would be told from its size."""


def scored(value):
    return {"status": "verdict", "outcome": "scored", "value": value, "parts": {}, "reason": "", "seconds": 0.1}


def after_time_limit(check, controls=(CONTROL,), another=None):
    """The verdict of a submission that ran into its limit, when the control runs give these answers."""

    async def ask(sample):
        if sample is SUBMISSION:
            return {"status": "limit", "limit": "time_limit", "seconds": 2.0}
        return another if sample is ANOTHER else check

    return asyncio.run(judge(ask, SUBMISSION, controls))


def function(name, **fields):
    return FunctionReward(name=name, path=f"here:{name}", **fields)


def running(pid):
    """Whether a process exists and has not ended (one that nobody has reaped yet has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within_s=5.0):
    deadline = time.monotonic() + within_s
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(running(pid) for pid in pids)


# What an answer means


def test_time_limit_is_the_submissions_fault_only_if_the_control_run_passes():
    verdict = after_time_limit(scored(1.0))
    assert (verdict.outcome, verdict.value, verdict.reason) == (Outcome.SCORED, 0.0, "time_limit")


@pytest.mark.parametrize(
    "check",
    [
        scored(0.0),
        {"status": "limit", "limit": "time_limit", "seconds": 2.0},
        {"status": "died", "message": "killed"},
        {**scored(None), "outcome": "failed", "reason": "no gold"},
    ],
)
def test_time_limit_is_a_failure_if_the_control_run_does_not_pass(check):
    verdict = after_time_limit(check)
    assert verdict.outcome is Outcome.FAILED and verdict.value is None and verdict.reason.startswith("time_limit")


def test_time_limit_without_a_control_run_is_a_failure():
    assert after_time_limit(scored(1.0), controls=()).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("another", "outcome"),
    [
        (scored(0.0), Outcome.SCORED),
        ({**scored(None), "outcome": "failed", "reason": "not readable"}, Outcome.SCORED),
        ({"status": "limit", "limit": "time_limit", "seconds": 2.0}, Outcome.FAILED),
        ({"status": "died", "message": "killed"}, Outcome.FAILED),
    ],
)
def test_time_limit_is_a_failure_if_the_right_answer_cannot_be_compared_with_another_one(another, outcome):
    assert after_time_limit(scored(1.0), controls=(CONTROL, ANOTHER), another=another).outcome is outcome


def test_a_right_answer_that_cannot_be_computed_is_not_held_against_the_completion():
    async def run():
        async with verifying(MathVerifyReward(), timeout_s=2) as service:
            return (await score(service, r"\boxed{5}", answer=TOWER))["math_verify"]

    verdict = asyncio.run(run())
    assert (verdict.outcome, verdict.value) == (Outcome.FAILED, None)
    assert "nor could the right answer be compared with another one (time_limit)" in verdict.reason


# Rewards that never answer


def hangs(completions):
    time.sleep(1000)


def dies(completions):
    os._exit(3)


def hangs_now_and_then(completions):
    if completions == ["slow"]:
        time.sleep(1000)
    return [1.0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [(hangs, r"the last: time_limit after 0\.2 s\. Mend it, or raise verifier\.timeout_s"), (dies, "status 3")],
)
def test_a_reward_that_never_answers_ends_the_run_soon_with_its_name(reward, says):
    async def run():
        functions = {f"here:{reward.__name__}": reward}
        async with verifying(function(reward.__name__), functions=functions, timeout_s=0.2, retries=0) as service:
            for calls in range(1, 20):
                try:
                    verdicts = await score(service, "a")
                except VerifierError as error:
                    return calls, str(error)
                assert verdicts[reward.__name__].outcome is Outcome.FAILED

    calls, message = asyncio.run(run())
    assert calls == HOPELESS_CALLS
    assert re.search(rf"^reward '{reward.__name__}' of task 't' answered none of its first 8 calls, .*{says}", message)


def test_a_reward_that_has_answered_once_costs_no_more_than_its_groups():
    async def run():
        functions = {"here:hangs_now_and_then": hangs_now_and_then}
        reward = function("hangs_now_and_then")
        async with verifying(reward, functions=functions, timeout_s=0.1, workers=1) as service:
            texts = ["slow", "quick", *["slow"] * (HOPELESS_CALLS + 2)]
            return [(await score(service, text))["hangs_now_and_then"].outcome for text in texts]

    found = asyncio.run(run())
    assert found == [Outcome.FAILED, Outcome.SCORED, *[Outcome.FAILED] * (HOPELESS_CALLS + 2)]


# K38


def test_endless_computation_ends_at_its_limit_and_scores_zero():
    async def run():
        async with verifying(MathVerifyReward(), timeout_s=1) as service:
            began = time.monotonic()
            verdicts = await score(service, ENDLESS, answer="5")
            return verdicts["math_verify"], time.monotonic() - began

    verdict, seconds = asyncio.run(run())
    assert (verdict.outcome, verdict.value, verdict.reason) == (Outcome.SCORED, 0.0, "time_limit")
    assert 1.0 <= seconds < 4.0


def test_workers_are_free_again_after_endless_computations():
    async def run():
        async with verifying(MathVerifyReward(), timeout_s=0.7, workers=2) as service:
            began = time.monotonic()
            texts = [ENDLESS] * 4 + [rf"\boxed{{{n}}}" for n in range(10)]
            golds = ["5"] * 4 + [str(n) for n in range(10)]
            calls = [score(service, text, answer=gold) for text, gold in zip(texts, golds, strict=True)]
            return [v["math_verify"] for v in await asyncio.gather(*calls)], time.monotonic() - began

    verdicts, seconds = asyncio.run(run())
    assert [v.value for v in verdicts] == [0.0] * 4 + [1.0] * 10
    assert [v.reason for v in verdicts[:4]] == ["time_limit"] * 4
    assert seconds < 15


def test_memory_is_limited_for_built_in_scores():
    async def run():
        # Matching must push one frame per character and alternative: about 1.5 GB for this text.
        async with verifying(RegexReward(pattern=r"(?:(a)|b)*c"), timeout_s=20) as service:
            return (await score(service, "a" * 20_000_000))["regex"]

    verdict = asyncio.run(run())
    assert verdict.outcome is Outcome.FAILED and verdict.reason.startswith("memory_limit")


# K37


def one_seventh():
    async def run():
        async with verifying(MathVerifyReward()) as service:
            task = asyncio.create_task(score(service, r"\boxed{\frac{1}{7}}", answer="1/7"))
            return (await task)["math_verify"].value

    return asyncio.run(run())


def test_math_is_verified_from_the_main_thread_and_an_asyncio_task():
    assert one_seventh() == 1.0


def test_math_is_verified_from_a_worker_thread():
    async def outer():
        return await asyncio.to_thread(one_seventh)

    assert asyncio.run(outer()) == 1.0


def test_math_is_verified_from_a_child_process_which_ends_without_a_warning():
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {Path(__file__).stem} as t; "
    strict = [sys.executable, "-X", "dev", "-W", "error", "-c"]
    child = subprocess.run([*strict, code + "print(t.one_seventh())"], capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (0, "1.0\n", "")


# Deaths


def test_worker_killed_under_a_call_is_replaced_and_the_call_repeated(tmp_path):
    log = tmp_path / "pids"

    def slow(completions):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return [0.5]

    async def run():
        async with verifying(function("slow"), functions={"here:slow": slow}) as service:
            calls = [asyncio.create_task(score(service, "a", sample=i)) for i in range(2)]  # one waits for the worker
            while not log.exists() or not log.read_text().endswith("\n"):
                await asyncio.sleep(0.01)
            os.kill(int(log.read_text()), signal.SIGKILL)
            return [v["slow"].value for v in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == [0.5, 0.5]
    pids = log.read_text().split()
    assert len(pids) == 3 and pids[0] != pids[1] == pids[2]


def test_function_that_always_kills_its_worker_fails_after_bounded_retries(tmp_path):
    log = tmp_path / "calls"

    def deadly(completions):
        with log.open("a") as file:
            file.write("x")
        os._exit(3)

    async def run():
        async with verifying(function("deadly"), functions={"here:deadly": deadly}, retries=2) as service:
            return (await score(service, "a"))["deadly"]

    verdict = asyncio.run(run())
    assert verdict.outcome is Outcome.FAILED and "exited with status 3 (3 attempts)" in verdict.reason
    assert log.read_text() == "xxx"


def test_function_that_ends_its_worker_by_a_signal_without_a_name_fails():
    def deadly(completions):
        os.kill(os.getpid(), 40)

    async def run():
        async with verifying(function("deadly"), functions={"here:deadly": deadly}, retries=0) as service:
            return (await score(service, "a"))["deadly"]

    verdict = asyncio.run(run())
    assert verdict.outcome is Outcome.FAILED and "was killed by signal 40" in verdict.reason


@pytest.mark.parametrize("answer", [b"[" * 100_000, b"garbage", b"\xff"])
def test_answer_that_cannot_be_read_is_told_as_such_and_ends_the_worker(answer):
    async def run():
        ours, theirs = socket.socketpair()
        with theirs, subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
            worker = WorkerProcess(process, *await asyncio.open_unix_connection(sock=ours))
            await asyncio.to_thread(theirs.sendall, frame(answer))
            with pytest.raises(WorkerDied, match="gave an answer that is no JSON"):
                await worker.exchange(b"")
            assert process.returncode == -signal.SIGKILL

    asyncio.run(run())


def test_worker_that_died_while_idle_costs_no_attempt():
    def pid(completions):
        return [os.getpid()]

    async def run():
        async with verifying(function("pid"), functions={"here:pid": pid}, retries=0) as service:
            first = (await score(service, "a"))["pid"].value
            os.kill(int(first), signal.SIGKILL)
            assert await asyncio.to_thread(gone, [int(first)])
            second = (await score(service, "a"))["pid"].value
            return first, second

    first, second = asyncio.run(run())
    assert second is not None and second != first


def test_blocking_function_is_killed_with_its_children_and_not_called_again(tmp_path):
    log = tmp_path / "pids"

    def blocking(completions):
        child = subprocess.Popen(["sleep", "60"])
        away = subprocess.Popen(
            ["sh", "-c", "setsid sleep 60 & echo $!"], stdout=subprocess.PIPE, start_new_session=True
        )
        with log.open("a") as file:
            file.write(f"{os.getpid()} {child.pid} {int(away.stdout.readline())}\n")
        while True:
            time.sleep(60)

    async def run():
        async with verifying(function("blocking"), functions={"here:blocking": blocking}, timeout_s=0.5) as service:
            began = time.monotonic()
            verdict = (await score(service, "a"))["blocking"]
            return verdict, time.monotonic() - began

    verdict, seconds = asyncio.run(run())
    assert verdict.outcome is Outcome.FAILED and verdict.reason.startswith("time_limit")
    assert seconds < 2.0 and verdict.seconds == 0.5
    [line] = log.read_text().splitlines()
    assert gone([int(pid) for pid in line.split()])


# Endings


def test_close_leaves_no_process_and_wakes_every_waiter():
    pids = []

    def report(completions):
        if completions == ["block"]:
            time.sleep(60)
        return [os.getpid()]

    async def run():
        async with verifying(function("report"), functions={"here:report": report}, workers=2) as service:
            while len(set(pids)) < 2:
                both = await asyncio.gather(*(score(service, "a") for _ in range(2)))
                pids.extend(int(v["report"].value) for v in both)
            waiting = [asyncio.create_task(score(service, "block")) for _ in range(5)]
            await asyncio.sleep(0.1)
        found = await asyncio.gather(*waiting)
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nobody starts a process any more
        return found

    began = time.monotonic()
    verdicts = [v["report"] for v in asyncio.run(run())]
    assert all(v.outcome is Outcome.FAILED and "closed" in v.reason for v in verdicts)
    assert gone(pids, within_s=0.1) and time.monotonic() - began < 20
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "worker_main"], capture_output=True).stdout == b""


def test_a_worker_that_could_not_be_replaced_is_nothing_to_close(monkeypatch):
    async def none_left(*_):
        raise OSError("too many open files")

    async def run():
        pool = WorkerPool({}, workers=1, timeout_s=5, retries=0)
        await pool.start()
        [slot] = pool._slots
        monkeypatch.setattr(WorkerProcess, "start", none_left)
        slot._replace(slot.starting.result())
        await asyncio.wait([slot.starting])
        await pool.close()

    asyncio.run(run())


def test_cancelled_call_frees_its_worker():
    def report(completions):
        if completions == ["block"]:
            time.sleep(60)
        return [1.0]

    async def run():
        async with verifying(function("report"), functions={"here:report": report}) as service:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(score(service, "block"), 0.2)
            return (await asyncio.wait_for(score(service, "a"), 9.0))["report"].value

    assert asyncio.run(run()) == 1.0


def test_busy_worker_dies_with_its_parent_and_is_deaf_to_interrupts():
    script = textwrap.dedent(
        """
        import asyncio, os, signal, sys, time
        sys.path.insert(0, sys.argv[1])
        import test_verifier_workers as t
        def busy(completions):
            os.kill(os.getpid(), signal.SIGINT)
            print(os.getpid(), file=sys.stderr)
            pow(3, 10**8)      # one long operation: no thread of the worker can notice anything
            return [1.0]
        async def run():
            async with t.verifying(t.function("busy"), functions={"here:busy": busy}, timeout_s=60) as service:
                await t.score(service, "a")
        asyncio.run(run())
        """
    )
    folder = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", script, folder], stderr=subprocess.PIPE, text=True)
    worker = int(parent.stderr.readline())
    assert running(worker)
    parent.kill()
    parent.wait()
    parent.stderr.close()
    assert gone([worker])


def test_scorer_that_cannot_be_loaded_in_a_worker_is_refused_at_start():
    class OnlyHere:
        def __call__(self, completions):
            return [1.0]

        def __reduce__(self):
            return exec, ("raise ImportError('not over there')",)

    async def run():
        async with verifying(function("lost"), functions={"here:lost": OnlyHere()}):
            pass

    with pytest.raises(RewardFunctionError, match=r"t/lost cannot be loaded: ImportError: not over there.*in_process"):
        asyncio.run(run())
