"""The service as its users see it: verdicts per source, failures that are never numbers, and rewards made of them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import numpy as np
import pytest
from scoring import score, verifying

from nearpolicy.distant import Distant
from nearpolicy.errors import ConfigError, NearpolicyError
from nearpolicy.records import Finish, Outcome, Prompt, Rollout, Segment, Verdict
from nearpolicy.verifier.combining import weighted_reward
from nearpolicy.verifier.config import (
    ExactMatchReward,
    FunctionReward,
    NumberReward,
    RegexReward,
    VerifierConfig,
)
from nearpolicy.verifier.functions import RewardFunctionError
from nearpolicy.verifier.service import VerifierService


def functions_at_hand(**functions):
    """Rewards and the functions they name."""
    rewards = [FunctionReward(name=name, path=f"here:{name}") for name in functions]
    return rewards, {f"here:{name}": function for name, function in functions.items()}


def verdicts_of(text="a", *, config=None, columns=None, **functions):
    """All of these functions on one completion, in one service."""
    rewards, at_hand = functions_at_hand(**functions)

    async def run():
        async with verifying(*rewards, functions=at_hand, **(config or {})) as service:
            return await score(service, text, **(columns or {}))

    return asyncio.run(run())


# K12: the reward of a rollout

WEIGHTS = (NumberReward(name="a"), NumberReward(name="b", weight=0.5))
ABSTAINED, FAILED = Verdict.abstained(), Verdict.failed("crash")


@pytest.mark.parametrize(
    ("a", "b", "reward"),
    [
        (Verdict.scored(1.0), ABSTAINED, 1.0),
        (ABSTAINED, Verdict.scored(0.4), 0.2),
        (ABSTAINED, ABSTAINED, None),
        (Verdict.scored(1.0), Verdict.scored(-1.0), 0.5),
        (Verdict.scored(1.0), FAILED, None),
        (FAILED, ABSTAINED, None),
    ],
)
def test_reward_sums_what_was_scored_and_a_failure_is_no_number(a, b, reward):
    assert weighted_reward({"a": a, "b": b}, WEIGHTS) == reward


# K31


def test_scores_belong_to_their_samples_whatever_the_order_they_end_in():
    ended = []

    def tenth(completions):
        number = int(completions[0])
        time.sleep({3: 0.0, 1: 0.1, 0: 0.2, 2: 0.3}[number])
        return [number / 10]

    rewards, at_hand = functions_at_hand(tenth=tenth)

    async def run():
        async with verifying(*rewards, functions=at_hand, workers=4) as service:

            async def one(i):
                verdicts = await score(service, str(i), sample=i)
                ended.append(i)
                return verdicts["tenth"].value

            return await asyncio.gather(*(one(i) for i in range(4)))

    assert asyncio.run(run()) == [0.0, 0.1, 0.2, 0.3]
    assert ended == [3, 1, 0, 2]


@pytest.mark.parametrize("in_process", [False, True])
def test_wrong_number_of_scores_ends_the_run_and_names_the_scorer(in_process):
    with pytest.raises(RewardFunctionError, match="'three' returned 3 scores for 1 samples"):
        verdicts_of(three=lambda completions: [0.1, 0.2, 0.3], config={"in_process": in_process})


# User functions in a worker process


def raising(completions):
    raise KeyError("lost")


async def raising_later(completions):
    await asyncio.sleep(0)
    raise ValueError("later")


def exiting(completions):
    sys.exit(0)


def interrupted(completions):
    raise KeyboardInterrupt


class Hostile:
    """Raises when somebody looks at it."""

    def __getattr__(self, name):
        raise RuntimeError("do not touch")

    def __repr__(self):
        raise RuntimeError("do not look")


FAILING = {
    "nan": (lambda completions: [float("nan")], "not a finite number"),
    "inf": (lambda completions: [float("-inf")], "not a finite number"),
    "words": (lambda completions: ["1.0"], "not a number"),
    "hostile": (lambda completions: [Hostile()], "do not touch"),
    "raising": (raising, "KeyError: 'lost' (test_verifier_service.py:"),
    "raising_later": (raising_later, "ValueError: later"),
    "exiting": (exiting, "raised SystemExit: 0"),
    "interrupted": (interrupted, "raised KeyboardInterrupt"),
    "no_column": (lambda completions, absent: [1.0], "absent"),
}


@pytest.fixture(scope="module")
def failing_verdicts():
    return verdicts_of(**{name: function for name, (function, _) in FAILING.items()})


@pytest.mark.parametrize("name", FAILING)
def test_function_that_goes_wrong_fails_with_its_reason_and_scores_nothing(failing_verdicts, name):
    verdict = failing_verdicts[name]
    assert (verdict.outcome, verdict.value) == (Outcome.FAILED, None)
    assert FAILING[name][1] in verdict.reason


def test_what_functions_print_does_not_disturb_the_conversation(capfd):
    def loud(completions):
        print("hello from the reward")
        sys.stdout.write("\x00\x00\x00\x02{}" * 100_000)
        os.write(1, b"\x00\x00\x00\x02{}\n")
        os.system("echo from a child")
        sys.stdin.read()
        return [0.5]

    async def loud_later(completions):
        print("and again", flush=True)
        return [0.25]

    def quiet(solution_str, ground_truth):
        return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    found = verdicts_of(loud=loud, loud_later=loud_later, quiet=quiet, columns={"answer": "a"})
    assert [found[name].value for name in ("loud", "loud_later", "quiet")] == [0.5, 0.25, 1.0]
    assert dict(found["quiet"].parts) == {"length": 1.0}
    out, err = capfd.readouterr()
    assert out == "" and "hello from the reward" in err and "from a child" in err and "and again" in err


def test_function_of_a_file_runs_in_a_worker_with_tokens_and_columns(tmp_path):
    file = tmp_path / "lengths.py"
    file.write_text(
        "import os\nHELPER = 2\n\ndef helper(x):\n    return x * HELPER\n\n"
        "def ratio(completion_ids, limit, pid):\n"
        "    assert pid != [os.getpid()]\n"
        "    return [helper(len(ids)) / n for ids, n in zip(completion_ids, limit)]\n"
    )
    segment = Segment(
        context_ids=[5],
        token_ids=[1, 2, 3, 4],
        mask=[True, True, False, True],
        behavior_logprobs=np.zeros(4),
        versions=[0, 0, -1, 0],
        finish=Finish.STOP,
    )

    async def run():
        async with verifying(FunctionReward(path=f"{file}:ratio")) as service:
            prompt = Prompt(id="p", task="t", text="q", columns={"limit": 10, "pid": os.getpid()})
            return await service.score(prompt, Rollout(sample=0, segments=(segment,), text="a", numerics="exact"))

    assert asyncio.run(run())["function"].value == 0.6


def test_tokens_that_lie_elsewhere_are_not_fetched_for_rewards_that_read_text():
    class Parcel:
        def read(self):
            raise AssertionError("fetched")

    there = Segment(
        context_ids=[5],
        token_ids=Distant(Parcel(), 0, (2,), np.dtype(np.int32)),
        mask=[True, True],
        behavior_logprobs=np.zeros(2),
        versions=[0, 0],
        finish=Finish.STOP,
    )

    async def run():
        async with verifying(ExactMatchReward()) as service:
            prompt = Prompt(id="p", task="t", text="q", columns={"answer": "4"})
            return await service.score(prompt, Rollout(sample=0, segments=(there,), text="4", numerics="exact"))

    assert asyncio.run(run())["exact_match"].value == 1.0


def test_in_process_functions_run_here_and_still_never_turn_failure_into_a_number():
    lock = threading.Lock()  # cannot travel

    def here(completions):
        with lock:
            return [os.getpid()]

    async def here_later(completions):
        await asyncio.sleep(0)
        return [0.5]

    found = verdicts_of(here=here, later=here_later, raising=raising, exiting=exiting, config={"in_process": True})
    assert found["here"].value == os.getpid()
    assert found["later"].value == 0.5
    assert found["raising"].outcome is found["exiting"].outcome is Outcome.FAILED


# What runs here


def test_cheap_rewards_need_no_process_and_no_start():
    async def run():
        service = VerifierService({"t": [ExactMatchReward(), NumberReward(partial=0.5)]}, VerifierConfig())
        return await score(service, "so 4", answer=4)

    found = asyncio.run(run())
    assert {name: v.value for name, v in found.items()} == {"exact_match": 0.0, "number": 0.5}
    assert all(v.seconds > 0 for v in found.values())


def test_error_of_a_built_in_score_is_visible_and_no_zero():
    class Unprintable:
        def __str__(self):
            raise RuntimeError("cannot be shown")

    async def run():
        service = VerifierService({"t": [ExactMatchReward()]}, VerifierConfig())
        return await score(service, "a", answer=Unprintable())

    verdict = asyncio.run(run())["exact_match"]
    assert verdict.outcome is Outcome.FAILED
    assert verdict.reason.startswith("exact_match raised RuntimeError: cannot be shown")


def test_null_answers_are_failures_here_and_in_workers():
    async def run():
        async with verifying(NumberReward(), RegexReward(pattern="a")) as service:
            return await score(service, "a 0", answer=None)

    found = asyncio.run(run())
    assert found["number"].outcome is Outcome.FAILED and "empty" in found["number"].reason
    assert found["regex"].value == 1.0


def test_row_that_cannot_travel_is_a_failure():
    async def run():
        async with verifying(RegexReward(pattern="a")) as service:
            return await score(service, "a", lock=threading.Lock())

    verdict = asyncio.run(run())["regex"]
    assert verdict.outcome is Outcome.FAILED and "cannot travel" in verdict.reason


# Mistakes, and what is reported


def test_mistakes_in_the_set_up_are_refused_by_name():
    with pytest.raises(ConfigError, match="task 't': two reward sources are named 'number'"):
        VerifierService({"t": [NumberReward(), NumberReward()]}, VerifierConfig())
    with pytest.raises(RewardFunctionError, match=r"'function'.*fits neither shape"):
        VerifierService({"t": [FunctionReward(path="math:sqrt")]}, VerifierConfig())
    with pytest.raises(RewardFunctionError, match=r"'lock' cannot travel.*verifier\.in_process"):
        lock = threading.Lock()
        verdicts_of(lock=lambda completions: [float(lock.locked())])


def test_what_cannot_be_closed_keeps_none_of_the_others_open():
    closed = []

    class Part:
        def __init__(self, name):
            self.name = name

        async def close(self):
            closed.append(self.name)
            raise OSError(self.name)

    service = VerifierService({"t": [NumberReward()]}, VerifierConfig())
    service._pool, service._sandbox = Part("pool"), Part("sandbox")
    service._learned._servers = {name: Part(name) for name in ("model", "another")}
    service._learned._endpoints = {"endpoint": Part("endpoint")}
    with pytest.raises(OSError):
        asyncio.run(service.close())
    assert sorted(closed) == ["another", "endpoint", "model", "pool", "sandbox"]


def test_use_before_start_and_unknown_tasks_are_errors():
    service = VerifierService({"t": [RegexReward(pattern="a")]}, VerifierConfig())
    with pytest.raises(NearpolicyError, match="has not been started"):
        asyncio.run(score(service, "a"))
    with pytest.raises(NearpolicyError, match="no task 'other', only 't'"):
        other = Prompt(id="p", task="other", text="q")
        asyncio.run(service.score(other, Rollout(sample=0, segments=(), text="a", numerics="exact")))


def test_events_tell_how_long_a_rollout_waited_and_how_its_sources_ended():
    events = []

    def slow(completions):
        time.sleep(0.2)
        return [None]

    rewards, at_hand = functions_at_hand(slow=slow)

    async def run():
        def record(role, kind, **numbers):
            events.append((role, kind, numbers))

        rest = [NumberReward(), RegexReward(pattern="a")]
        async with verifying(*rewards, *rest, functions=at_hand, on_event=record) as service:
            return await asyncio.gather(*(score(service, f"a{i}", sample=i) for i in range(2)))

    found = asyncio.run(run())
    assert [(role, kind) for role, kind, _ in events] == [("verifier", "verify")] * 2
    ends = {numbers["sample"]: numbers for _, _, numbers in events}
    assert {(e["scored"], e["abstained"], e["failed"]) for e in ends.values()} == {(1, 1, 1)}
    assert 0.15 <= ends[1]["queue_s"] - ends[0]["queue_s"] < 0.6  # one worker: the second waited for the first
    assert all(e["seconds"] >= e["queue_s"] + 0.0002 for e in ends.values())
    assert all(v["slow"].seconds == pytest.approx(0.2, abs=0.1) for v in found)
