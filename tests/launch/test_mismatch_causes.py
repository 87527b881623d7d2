"""Faults between engine and learner show in the part of the mismatch that is theirs; a clean run has none of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_resume import _folder  # noqa: F401  the same folder, recipe and reward

from nearpolicy.config import load_recipe
from nearpolicy.launch.session import Session, run_session
from nearpolicy.machine import bfloat16_products


def run(*overrides: str) -> list[dict]:
    overrides = (
        "run.steps=4",
        "learner.learning_rate=0.02",
        "learner.warmup_steps=0",
        "checkpoint.every=0",
        *overrides,
    )
    overrides = (*overrides, "checkpoint.keep_last=1")
    run_session(Session(config=load_recipe(Path("demo.yaml"), overrides), say=lambda text: None))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "mismatch/fresh_share" in line]


def test_a_clean_run_has_staleness_and_nothing_of_the_engine():
    lines = run("queue.max_staleness=2")
    assert any(line["mismatch/fresh_share"] < 1 for line in lines)
    assert any(line.get("mismatch/staleness_kl", 0) > 0 for line in lines)
    for line in lines:
        assert line.get("mismatch/engine_logprob_diff_max", 0.0) == 0.0


def test_sampling_at_another_temperature_than_is_trained_for_shows_in_the_engines_part(monkeypatch):
    from nearpolicy.learner.passes import Passes

    make = Passes.__init__

    def other(self, *arguments, temperature, **named):
        make(self, *arguments, temperature=temperature * 1.5, **named)

    monkeypatch.setattr(Passes, "__init__", other)
    lines = run("queue.max_staleness=0")
    assert all(line["mismatch/fresh_share"] == 1 for line in lines)
    assert min(line["mismatch/engine_kl"] for line in lines) > 0.001


def test_low_precision_on_one_side_shows_in_the_engines_part():
    if not bfloat16_products():
        pytest.skip("this processor does not multiply bfloat16 numbers")
    lines = run("queue.max_staleness=0", "run.numerics=fast", "generator.weights=bfloat16")
    assert max(line["mismatch/engine_logprob_diff_max"] for line in lines) > 1e-4
