"""Faults put into tiny runs are named as they happen; clean runs are silent; a run that goes on keeps its past."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import _folder, begin, go_on, lines  # noqa: F401  the same folder, recipe and reward

from nearpolicy.config import load_recipe
from nearpolicy.launch.session import Session, run_session
from nearpolicy.store.reader import RunReader

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


def alarms(folder: str = "run") -> set[str]:
    with RunReader(Path(folder)) as run:
        return {event.numbers["metric"] for event in run.events("alarm")}


def test_a_policy_that_comes_to_one_text_is_named():
    """By a reward for one letter and a rate that is much too high."""
    Path("reward.py").write_text("def judge(completions, **_): return [float(c.count('a')) for c in completions]")
    steps = ("run.steps=30", "learner.learning_rate=0.02", "learner.warmup_steps=0")
    begin(*steps, "sampling.num_generations=8", "sampling.max_completion_length=3")
    assert alarms() == {"integrity/duplicate_share"}


def test_a_gradient_that_is_not_finite_is_named_and_not_applied(monkeypatch):
    from nearpolicy.objectives.objective import Objective

    plain, calls = Objective.token_losses, []

    def poisoned(self, tokens):
        calls.append(1)
        found = plain(self, tokens)
        return found if len(calls) != 3 else replace(found, losses=found.losses * math.nan)

    monkeypatch.setattr(Objective, "token_losses", poisoned)
    begin("queue.max_staleness=0")
    assert alarms() == {"policy/skipped_updates"}
    with RunReader(Path("run")) as run:
        [event] = run.events("alarm")
    told = [event.numbers[name] for name in ("metric", "value", "severity", "action")]
    assert told == ["policy/skipped_updates", 1.0, "critical", "alarm"]
    skipped = [line["policy/skipped_updates"] for line in lines("run") if "policy/skipped_updates" in line]
    assert sum(skipped) == 1


def test_a_verifier_that_flips_is_named(monkeypatch):
    from nearpolicy.records import Verdict
    from nearpolicy.verifier.service import VerifierService

    looks = []

    async def flips(self, source, sample, started):
        looks.append(1)
        return Verdict.scored(float(len(looks) % 2))

    monkeypatch.setattr(VerifierService, "_fresh", flips)
    regex = "tasks.0.rewards=[{kind: regex, pattern: '[a-z]'}]"
    begin(regex, "verifier.in_process=false", "verifier.recheck=1")
    assert alarms() == {"verifier/regex/flip_rate"}


def test_a_monitor_looks_at_evaluations_too():
    monitor = "monitors=[{metric: evaluation/<task>/accuracy, above: 0.1, steps: 2, action: stop}]"
    summary = begin(
        monitor, "evaluation.every=2", "tasks.0.held_out=8", "evaluation.pass_k=[]", "queue.max_staleness=0"
    )
    [alarm] = summary["alarms"]
    assert alarm.startswith("step 2: evaluation/sums/accuracy is ") and alarm.endswith("for 2 evaluations")
    assert (summary["ended"], summary["steps"]) == ("stopped", 2)


def test_a_run_that_goes_on_compares_with_the_steps_before_it_was_stopped():
    begin("queue.max_staleness=0", "run.steps=14", folder="whole")
    begin("queue.max_staleness=0", "run.steps=14", stop_after=8)
    go_on()
    names = ("policy/grad_norm_ratio", "completion/length_ratio", "policy/entropy_ratio", "integrity/reward_jump")
    for name in names:
        found, right = ([line.get(name) for line in lines(folder)] for folder in ("run", "whole"))
        assert found == right and sum(value is not None for value in right) >= 8, name


@pytest.mark.large
def test_a_reward_that_is_gamed_against_held_out_questions_is_named():
    """More is to be had for nines than for the right number: the policy comes to write nothing else."""
    Path("nines.py").write_text("def nines(completions, **_): return [c.count('9') / 6 for c in completions]")
    rewards = "tasks.0.rewards=[{kind: number, weight: 0.2}, {kind: function, path: 'nines.py:nines', weight: 2}]"
    often = ("evaluation.every=5", "evaluation.pass_k=[]", "verifier.in_process=true")
    config = load_recipe(TINY, ["run.steps=21", "learner.learning_rate=3e-3", rewards, "run.dir=run", *often])
    run_session(Session(config=config, say=lambda text: None))
    assert "integrity/function/held_out_fall" in alarms()
    collapse = {"policy/entropy_ratio", "integrity/duplicate_share"}
    assert alarms() <= {"integrity/function/held_out_fall", *collapse}


@pytest.mark.large
@pytest.mark.parametrize("seed", range(10))
def test_clean_runs_of_the_tiny_recipe_raise_no_alarm(seed):
    config = load_recipe(TINY, [f"run.seed={seed}", "run.dir=clean"])
    assert run_session(Session(config=config, say=lambda text: None))["alarms"] == []


def test_a_clean_run_raises_no_alarm():
    """With a reference and held-out questions, so that nearly every figure is there."""
    overrides = ("objective.reference=initial", "objective.kl_coef=0.01", "evaluation.pass_k=[]")
    config = load_recipe(
        TINY, ["run.steps=14", "run.dir=clean", "evaluation.every=5", "warm_start.steps=40", *overrides]
    )
    assert run_session(Session(config=config, say=lambda text: None))["alarms"] == []
    logged = {name for line in lines("clean") for name in line}
    assert {
        "integrity/number/held_out_gap", "integrity/number/held_out_fall",
        "integrity/reward_fall", "integrity/reward_per_sqrt_kl", "policy/entropy_ratio", "completion/length_ratio",
    } <= logged  # fmt: skip
