"""Verifiers that fail in every way there is: a run goes on, loses nothing, and takes no failure for a number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearpolicy.config import load_recipe
from nearpolicy.launch.session import Session, run_session
from nearpolicy.records import Fate, Outcome
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 6, dir: mine}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 3, num_generations: 4}
queue: {prompts_per_step: 3, max_staleness: 1}
verifier: {workers: 2, timeout_s: 0.5, retries: 1}
tasks:
  - name: sums
    source: {kind: jsonl, path: rows.jsonl}
    prompt_column: question
    chat: false
    rewards: [{kind: function, path: chaos.py:judge}]
"""

JUDGE = """\
import os, random, sys, time

def judge(completions, **_):
    with open("calls", "ab") as calls:   # luck goes by the number of the call: every fault comes within sixty
        calls.write(b"x")
        number = calls.tell()
    luck = random.Random(f"34/{number}").random()
    if luck < 0.04:
        os.kill(os.getpid(), 9)          # tried again
    if luck < 0.05:
        time.sleep(60)                   # over the limit
    if luck < 0.06:
        raise ValueError("no luck")
    if luck < 0.07:
        sys.exit(3)
    if luck < 0.08:
        return [float("nan")]
    if luck < 0.09:
        return ["one"]
    if luck < 0.10:
        return [float("inf")]
    return [1.0 + len(completions[0])]   # never 0: a 0 would be a failure that was taken for a number
"""


@pytest.fixture
def run_of_chaos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(6) for b in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("demo.yaml").write_text(RECIPE)
    Path("chaos.py").write_text(JUDGE)
    return lambda *overrides: run_session(Session(config=load_recipe(Path("demo.yaml"), overrides)))


def test_a_tenth_of_all_attempts_fails_and_the_run_completes(run_of_chaos):
    """K45, I2, I3."""
    summary = run_of_chaos()
    assert summary["ended"] == "finished" and summary["steps"] == 6
    with RunReader(Path("mine")) as run:
        ended = [event.numbers["tokens"] for event in run.events("finish") if event.admission is not None]
        ledger = run.ledger()
        assert sum(ended) == sum(ledger.values()) > 0
        assert Fate.IN_FLIGHT not in ledger
        outcomes = []
        for group in run.groups():
            for verdicts, reward in zip(group.verdicts, group.rewards, strict=True):
                assert reward is None or reward >= 1.0
                for verdict in verdicts.values():
                    outcomes.append(verdict.outcome)
                    assert (verdict.outcome is Outcome.SCORED) == (verdict.value is not None)
                    assert verdict.value is None or verdict.value >= 1.0
    assert {Outcome.SCORED, Outcome.FAILED} == set(outcomes)
    assert Path("calls").stat().st_size >= 60
