"""The reward of code tasks, from completions to verdicts, and what the service makes of a sandbox that breaks."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.errors import ConfigError, NearpolicyError, VerifierError
from nearpolicy.records import Outcome, Prompt, Rollout, Verdict
from nearpolicy.verifier import service as service_module
from nearpolicy.verifier.code import fenced_blocks, program_of, row_task
from nearpolicy.verifier.config import CodeReward, ExactMatchReward, FunctionReward, VerifierConfig
from nearpolicy.verifier.reading import unfit
from nearpolicy.verifier.rewards import RowError
from nearpolicy.verifier.sandbox.ladder import Opened
from nearpolicy.verifier.sandbox.runs import Ended
from nearpolicy.verifier.sandbox.zygotes import is_starved
from nearpolicy.verifier.service import FailureRate, VerifierService

ADD = "def add(a, b):\n    return a + b\n"
CALLS = [{"args": [2, 3], "result": 5}, {"args": [1, 1], "result": 2}]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"```python\n{ADD}```", ADD),
        (f"Sure!\n```py\n{ADD}```\nIt adds.", ADD),
        (f"```\n{ADD}```", ADD),
        (f"~~~python\n{ADD}~~~", ADD),
        (f"````python\n{ADD}````", ADD),
        (f"```python\nold\n```\nBetter:\n```python\n{ADD}```", ADD),
        (f"```python\n{ADD}```\n```sh\npython add.py\n```", ADD),
        (f"```text\n5\n```\n```python\n{ADD}```\n```json\n{{}}\n```", ADD),
        (f"```python\n{ADD}", ADD),
        (ADD, ADD),
        ("", ""),
        ("```python\ntext = '```'\n```", "text = '```'\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```javascript\nf()\n```", "f()\n"),
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("```python `x`\nx = 1", "```python `x`\nx = 1"),
    ],
)
def test_the_program_is_the_last_block_of_python(completion, program):
    assert program_of(completion) == program


@given(st.text(alphabet="`~ab\n py#"))
def test_any_text_has_a_program(text):
    blocks = [code for _, code in fenced_blocks(text)]
    assert program_of(text) in (blocks or [text])
    assert all(block in text for block in blocks)
    assert bool(blocks) <= bool(re.search(r"^[ \t]*(```|~~~)", text, re.MULTILINE))


@pytest.mark.parametrize("line", ["```" + "a" * 200_000 + "`", "```" + " " * 200_000 + "`", "`" * 200_000 + " `"])
def test_a_long_line_that_is_almost_a_fence_takes_no_time(line):
    begin = time.perf_counter()
    assert program_of(line) == line
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "'tests' is missing"),
        ({"tests": None}, "'tests' is empty"),
        ({"tests": []}, "at least one"),
        ({"tests": 5}, "at least one"),
        ({"tests": [5]}, "not 5"),
        ({"tests": [{"stdin": "1"}]}, "not {'stdin': '1'}"),
        ({"tests": CALLS}, "in `entry`"),
        ({"tests": ["assert ("]}, "cannot be read"),
        ({"tests": '[{"args": [{"$": "exec"}], "result": 1}]'}, "a test cannot be read|in `entry`"),
    ],
)
def test_rows_at_fault_are_told_before_the_run_and_never_score(columns, words):
    """K47."""
    with pytest.raises(RowError, match=words):
        row_task(CodeReward(), columns)
    if columns.get("tests") is not None:
        assert [(place, column) for place, column, _ in unfit(CodeReward(), [columns])] == [(0, "tests")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "class"}, "'class'"), ({"name": "a..b"}, "'a..b'"), ({"name": 5}, "not 5"), ({"name": ["f"]}, "not"),
        ({"name": "f" * 5000}, "`entry` is the name"), ({"before": ["import os"]}, "is text"),
        ({"tests": [{"args": [], "kwargs": {"$": "set", "v": [1]}, "result": 1}]}, "kwargs"),
        ({"tests": [{"args": [], "kwargs": {"$": "dict", "v": [[1, 1]]}, "result": 1}]}, "kwargs"),
        ({"tests": [{"args": json.loads("[" * 70 + "]" * 70), "result": 1}]}, "nested deeper"),
        ({"tests": [{"args": [1], "result": object()}]}, "type object"),
        ({"tests": [{"args": [{"$": "float", "v": 10**400}], "result": 1}]}, "cannot be read"),
    ],
)  # fmt: skip
def test_a_row_that_no_program_could_be_called_with_is_at_fault(change, words):
    """K47."""
    columns = {"tests": CALLS, "name": "add", "before": None, **change}
    with pytest.raises(RowError, match=words):
        row_task(CodeReward(entry_column="name", setup_column="before"), columns)


def test_an_audit_that_no_program_could_be_put_to_is_told_before_the_run_too():
    """K47."""
    reward, rows = CodeReward(entry="add", audit_column="more"), [{"tests": CALLS, "more": CALLS}]
    rows += [{"tests": CALLS, "more": [5]}]
    assert [(place, column) for place, column, _ in unfit(reward, rows)] == [(1, "more")]


def test_tests_may_be_json_text():
    reward = CodeReward(entry_column="name", setup_column="before")
    task = row_task(reward, {"tests": json.dumps(CALLS), "name": "add", "before": None})
    assert (task.entry, len(task.tests), task.setup) == ("add", 2, "")


def scored(*texts: str, columns=None, config=None, sandbox=None, monkeypatch=None, **reward) -> list[Verdict]:
    async def run():
        source = CodeReward(**{"entry": "add", **reward})
        service = VerifierService({"t": [source]}, VerifierConfig(**(config or {})))
        if sandbox is not None:

            async def opened(*_, **__):
                return Opened(sandbox=sandbox, isolation="namespaces")

            monkeypatch.setattr(service_module, "opened", opened)
        await service.start()
        try:
            prompt = Prompt(id="p", task="t", text="q", columns=columns or {"tests": CALLS})
            rollouts = [Rollout(sample=i, segments=(), text=text, numerics="exact") for i, text in enumerate(texts)]
            found = await asyncio.gather(*(service.score(prompt, rollout) for rollout in rollouts))
            return [verdicts["code"] for verdicts in found]
        finally:
            await service.close()

    return asyncio.run(run())


def test_completions_become_verdicts_with_parts():
    right, half, loud, broken = scored(
        f"```python\n{ADD}```", "def add(a, b): return 5", "def add(a, b): return 2", "I cannot.", score="share"
    )
    assert (right.value, half.value, loud.value, broken.value) == (1.0, 0.5, 0.5, 0.0)
    assert right.parts["passed"] == 1.0 and right.parts["share"] == 1.0 and right.reason == ""
    assert half.parts["wrong_answer"] == 1.0 and half.reason == "wrong_answer: test 2"
    assert loud.reason == "wrong_answer: test 1"
    assert broken.parts["runtime_error"] == 1.0 and broken.reason.endswith("raised SyntaxError")
    assert all(each.outcome is Outcome.SCORED for each in (right, half, loud, broken))


def test_the_beginning_of_a_program_may_be_in_the_row():
    columns = {"tests": CALLS, "prompt": "def add(a, b):\n"}
    [found] = scored("    return a + b\n", columns=columns, prefix_column="prompt", extract="whole")
    assert found.value == 1.0


def test_a_second_set_of_tests_tells_who_learned_the_first_by_heart():
    columns = {"tests": CALLS, "more": [{"args": [40, 2], "result": 42}]}
    by_heart = "def add(a, b): return {(2, 3): 5, (1, 1): 2}.get((a, b), 0)"
    right, learned, wrong = scored(ADD, by_heart, "def add(a, b): return 0", columns=columns, audit_column="more")
    assert (right.value, right.parts["audit"]) == (1.0, 1.0)
    assert (learned.value, learned.parts["audit"]) == (1.0, 0.0)
    assert wrong.value == 0.0 and "audit" not in wrong.parts


def test_a_row_that_cannot_be_split_fails_and_the_weaker_trust_is_chosen_twice():
    columns = {"tests": ["assert add(len, 'ab') == 2"]}
    program = "def add(f, x): return f(x)"
    [found] = scored(program, columns=columns)
    assert found.outcome is Outcome.FAILED and "needs `trust: together`" in found.reason
    with pytest.raises(ConfigError, match="allow_weak_trust"):
        scored(program, columns=columns, trust="together")
    [found] = scored(program, columns=columns, trust="together", config={"allow_weak_trust": True})
    assert found.value == 1.0


class Fake:
    """A sandbox that needs no end."""

    async def close(self):
        pass


class Broken(Fake):
    """A sandbox that runs nothing from the ``after``-th run on."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.runs = after, 0

    async def run(self, run, on_frame=None):
        self.runs += 1
        return Ended(frame=b'{"returned":5}') if self.runs <= self.after else Ended(failure="no more processes")


def test_a_broken_sandbox_gives_no_reward_and_at_last_ends_the_run(monkeypatch):
    """K45."""
    texts = [f"{ADD}# {i}" for i in range(int(FailureRate.LIMIT * FailureRate.WINDOW))]
    found = scored(*texts, sandbox=Broken(), monkeypatch=monkeypatch)
    assert {verdict.outcome for verdict in found} == {Outcome.FAILED}
    assert {verdict.value for verdict in found} == {None}
    assert "sandbox_failure: test 1: no more processes" in found[0].reason
    with pytest.raises(VerifierError, match=r"failed on 51 of its last 51 completions.*nearpolicy doctor"):
        scored(*texts, ADD, sandbox=Broken(), monkeypatch=monkeypatch)


def test_equal_completions_are_run_once_and_failures_are_asked_again(monkeypatch):
    sandbox = Broken(after=10**6)
    one_call = {"tests": CALLS[:1]}

    async def run(texts):
        service = VerifierService({"t": [CodeReward(entry="add")]}, VerifierConfig())
        await service.start()
        prompt = Prompt(id="p", task="t", text="q", columns=one_call)
        for text in texts:
            await service.score(prompt, Rollout(sample=0, segments=(), text=text, numerics="exact"))
        await service.close()

    async def opened(*_, **__):
        return Opened(sandbox=sandbox, isolation="namespaces")

    monkeypatch.setattr(service_module, "opened", opened)
    asyncio.run(run(["a", "a", "b", "a"]))
    assert sandbox.runs == 2
    sandbox.after, sandbox.runs = 0, 0
    asyncio.run(run(["a", "a"]))
    assert sandbox.runs == 2


def test_a_verdict_that_was_known_is_not_looked_at_a_second_time(monkeypatch):
    sandbox = Broken(after=10**6)
    settings = {"columns": {"tests": CALLS[:1]}, "config": {"recheck": 1.0}, "monkeypatch": monkeypatch}
    scored("a", "a", "a", sandbox=sandbox, **settings)
    assert sandbox.runs == 2
    scored("a", "b", sandbox=sandbox, **settings)
    assert sandbox.runs == 2 + 4


def test_waiting_is_within_the_deadline_too(monkeypatch):
    class Slow(Fake):
        async def run(self, run, on_frame=None):
            await asyncio.sleep(30)

    [found] = scored(ADD, sandbox=Slow(), monkeypatch=monkeypatch, config={"deadline_s": 0.05})
    assert found.outcome is Outcome.FAILED and "verifier.deadline_s (0.05 s)" in found.reason


def test_time_that_a_program_sleeps_through_is_its_own_and_not_the_deadlines():
    """K45: else a policy could choose to have no reward where it would get none."""
    sleeps = f"import time\ntime.sleep(0.7)\n{ADD}"
    many = {"tests": CALLS * 5}
    [found] = scored(sleeps, columns=many, config={"deadline_s": 6}, score="share")
    assert found.outcome is Outcome.SCORED and found.reason.startswith("time_limit")
    [found] = scored(sleeps, columns={"tests": ["\n".join(["assert add(1, 2) == 3"] * 10)]}, config={"deadline_s": 6})
    assert found.outcome is Outcome.SCORED and found.reason.startswith("time_limit")


class Sleepy(Fake):
    """A sandbox in which every program is right and sleeps ``each_s``; only told, so that nobody waits for it."""

    def __init__(self, each_s: float) -> None:
        self.each_s, self.spent_s, self.runs = each_s, 0.0, 0

    async def run(self, run, on_frame=None):
        self.runs += 1
        wall_s = min(self.each_s, run.limits.wall)
        self.spent_s += wall_s
        stopped = "wall" if wall_s < self.each_s else None
        return Ended(frame=b'{"returned":5}', wall_s=wall_s, stopped=stopped)


def test_a_program_that_sleeps_through_half_the_deadline_is_not_run_any_further(monkeypatch):
    """K45: forty runs that are each cut short outlast the deadline too."""
    sandbox = Sleepy(0.65)
    many = {"tests": CALLS[:1] * 40}
    [found] = scored(
        ADD, columns=many, config={"deadline_s": 4}, score="share", sandbox=sandbox, monkeypatch=monkeypatch
    )
    assert (found.outcome, found.value) == (Outcome.SCORED, 3 / 40)
    assert found.reason.startswith("time_limit: test 4") and sandbox.runs == 4


def test_an_audit_has_the_time_that_the_tests_have_left(monkeypatch):
    """K45: a right and slow program must not fail by the deadline because it is audited."""
    sandbox = Sleepy(0.65)
    columns = {"tests": CALLS[:1] * 3, "more": CALLS[:1] * 10}
    settings = {"config": {"deadline_s": 4}, "audit_column": "more", "monkeypatch": monkeypatch}
    [found] = scored(ADD, columns=columns, sandbox=sandbox, **settings)
    assert found.value == 1.0 and "audit" not in found.parts
    assert sandbox.spent_s <= 4 / 2 + 0.1
    [found] = scored(ADD, columns={**columns, "more": CALLS[:1]}, sandbox=Sleepy(0.5), **settings)
    assert found.parts["audit"] == 1.0


def test_the_service_must_be_started():
    async def run():
        service = VerifierService({"t": [CodeReward(entry="add")]}, VerifierConfig())
        prompt = Prompt(id="p", task="t", text="q", columns={"tests": CALLS})
        await service.score(prompt, Rollout(sample=0, segments=(), text=ADD, numerics="exact"))

    with pytest.raises(NearpolicyError, match="await `start"):
        asyncio.run(run())


def test_functions_that_fail_often_do_not_end_a_run():
    async def run():
        rewards = [FunctionReward(path="here:f"), ExactMatchReward()]
        service = VerifierService({"t": rewards}, VerifierConfig(in_process=True), at_hand={"here:f": _raises})
        prompt = Prompt(id="p", task="t", text="q", columns={"answer": "a"})
        rollout = Rollout(sample=0, segments=(), text="a", numerics="exact")
        return [(await service.score(prompt, rollout))["function"].outcome for _ in range(120)]

    assert set(asyncio.run(run())) == {Outcome.FAILED}


def _raises(completions):
    raise ValueError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"isolation": "none"}, "allow_unisolated"),
        ({"isolation": "remote"}, "sandbox_url"),
        ({"sandbox_url": "http://x"}, "sandbox_url"),
        ({"isolation": "docker"}, "isolation"),
        ({"isolation": "remote", "sandbox_url": "http://x", "packages": ["sympy"]}, "packages has no effect"),
    ],
)
def test_unsafe_and_contradictory_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        VerifierConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"entry": "f", "entry_column": "g"}, "one of entry"),
        ({"command": ["sh", "x"]}, "limits.processes"),
        ({"limits": {"cpu_s": 0}}, "cpu_s"),
        ({"file": "../x"}, "file"),
        ({"file": "main.sh"}, "for `command`, which is not set"),
    ],
)
def test_rewards_that_contradict_themselves_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        CodeReward(**settings)


def test_starved_means_waiting_for_a_processor_and_not_having_had_one():
    assert is_starved(computed_s=0.2, waited_s=9.0, wall_s=12.0)
    assert not is_starved(computed_s=0.0, waited_s=0.0, wall_s=12.0)  # it slept
    assert not is_starved(computed_s=9.0, waited_s=11.0, wall_s=12.0)  # its own threads kept each other waiting
    assert not is_starved(computed_s=5.0, waited_s=5.9, wall_s=12.0)
