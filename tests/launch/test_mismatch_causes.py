"""Faults between engine and learner show in the part of the mismatch that is theirs, and are named; a clean run has
none of it. How each fault is told from the others is in test_diagnosis.py."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from test_resume import _folder, fingerprints, sampled  # noqa: F401  the same folder, recipe and reward

from nearpolicy.config import load_recipe
from nearpolicy.launch import build, meter
from nearpolicy.launch.cli import run as cli
from nearpolicy.launch.session import Session, run_session
from nearpolicy.machine import bfloat16_products
from nearpolicy.store.reader import RunReader

TENSOR = "model.layers.0.mlp.up_proj.weight"


def run(*overrides: str, folder: str = "run", say=lambda text: None) -> list[dict]:
    overrides = (
        "run.steps=4",
        "learner.learning_rate=0.02",
        "learner.warmup_steps=0",
        "checkpoint.every=0",
        *overrides,
    )
    overrides = (*overrides, "checkpoint.keep_last=1", f"run.dir={folder}")
    run_session(Session(config=load_recipe(Path("demo.yaml"), overrides), say=say))
    return [line for line in lines_of(folder) if "mismatch/fresh_share" in line]


def lines_of(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def diagnoses(folder: str = "run") -> list[dict]:
    """As the summary has them; the store has the same."""
    found = json.loads(Path(folder, "summary.json").read_text())["diagnoses"]
    with RunReader(Path(folder)) as run:
        told = [event.numbers for event in run.events() if event.kind == "diagnosis"]
    assert [each["cause"] for each in told] == [each["cause"] for each in found]
    return found


def test_a_clean_run_has_staleness_and_nothing_of_the_engine():
    lines = run("queue.max_staleness=2")
    assert any(line["mismatch/fresh_share"] < 1 for line in lines)
    assert any(line.get("mismatch/staleness_kl", 0) > 0 for line in lines)
    for line in lines:
        assert line.get("mismatch/engine_logprob_diff_max", 0.0) == 0.0

    assert diagnoses() == []


def score_hotter(monkeypatch) -> None:
    from nearpolicy.learner.passes import Passes

    make = Passes.__init__

    def other(self, *arguments, temperature, **named):
        make(self, *arguments, temperature=temperature * 1.5, **named)

    monkeypatch.setattr(Passes, "__init__", other)


def test_sampling_at_another_temperature_than_is_trained_for_is_seen_and_named_once(monkeypatch):
    score_hotter(monkeypatch)
    said = []
    lines = run("queue.max_staleness=0", say=said.append)
    assert all(line["mismatch/fresh_share"] == 1 for line in lines)
    assert min(line["mismatch/engine_kl"] for line in lines) > 0.001
    [found] = diagnoses()
    assert found["cause"] == "temperature" and found["step"] == 0
    assert (found["engine"], found["learner"]) == (pytest.approx(1.0, rel=1e-3), pytest.approx(1.5, rel=1e-3))
    assert sum("engine and learner disagree (temperature)" in text for text in said) == 1


def test_a_tensor_that_no_publication_reaches_is_named(monkeypatch):
    """Behind the digests, which would have ended the run."""
    from nearpolicy.generator.engine import Engine
    from nearpolicy.models.weights import named_weights

    load = Engine.load

    def all_but_one(self, weights, **how):
        before = named_weights(self.policy.model)[TENSOR].clone()
        shown = load(self, weights, **how)
        named_weights(self.policy.model)[TENSOR].copy_(before)
        return shown

    monkeypatch.setattr(Engine, "load", all_but_one)
    run("queue.max_staleness=0")
    [found] = diagnoses()
    assert found["cause"] == "missed_sync" and found["tensors"] == [TENSOR]


def test_ends_that_are_none_are_named(monkeypatch):
    of = build.Language.of

    def other(*arguments):
        language = of(*arguments)
        return replace(language, sampling=replace(language.sampling, stop_token_ids=tuple(range(128))))

    monkeypatch.setattr(build.Language, "of", other)
    run("queue.max_staleness=0")
    [found] = diagnoses()
    assert found["cause"] == "wrong_stop" and set(found["stopped"]) <= set(range(128)) and found["ends"] == [257]


def test_a_diagnosis_changes_nothing_that_is_learned(monkeypatch):
    score_hotter(monkeypatch)
    run("queue.max_staleness=0", folder="with")
    with_it = fingerprints("with")
    run("queue.max_staleness=0", "telemetry.health=false", folder="without")
    assert diagnoses("with") and not diagnoses("without")
    assert fingerprints("without") == with_it and sampled("without") == sampled("with")


# The probe


@pytest.fixture
def always(monkeypatch):
    """After every publication, whatever it costs."""
    monkeypatch.setattr(meter, "SHARE", 1e9)


def test_a_batch_without_fresh_tokens_is_followed_by_a_probe_that_reads_nothing():
    run("queue.max_staleness=2", "run.steps=8")
    lines = lines_of("run")
    probed = [line for line in lines if "mismatch/probe_tokens" in line]
    before = [line.get("mismatch/fresh_tokens", 0) for line, after in pairwise(lines) if after in probed]
    assert probed and all(fresh < 32 for fresh in before)
    assert {line["mismatch/probe_logprob_diff_max"] for line in probed} == {0.0}
    assert all(0 < line["mismatch/probe_tokens"] <= 32 for line in probed)


def test_fresh_tokens_enough_ask_for_no_probe():
    run("queue.max_staleness=0", "telemetry.probe=1")
    assert not any("mismatch/probe_tokens" in line for line in lines_of("run"))


@pytest.mark.parametrize(
    "setting", [(), ("learner.lora.rank=2",), ("sampling.top_k=20",)], ids=["", "adapter", "top-k"]
)
def test_a_probe_changes_nothing_that_is_learned(always, setting):
    run("queue.max_staleness=0", "telemetry.probe=1000", *setting, folder="with")
    run("queue.max_staleness=0", "telemetry.probe=0", *setting, folder="without")
    probed = [line["mismatch/probe_logprob_diff_max"] for line in lines_of("with") if "mismatch/probe_kl" in line]
    assert probed == [0.0] * 3  # after every publication but the last one
    assert not any("mismatch/probe_kl" in line for line in lines_of("without"))
    assert fingerprints("with") == fingerprints("without") and sampled("with") == sampled("without")
    with RunReader(Path("with")) as a, RunReader(Path("without")) as b:
        assert a.ledger() == b.ledger()


def test_a_stale_run_with_probes_is_learned_again_without_them_to_the_same_bits(always, capsys):
    run("queue.max_staleness=2", "run.steps=6", "telemetry.probe=1000")
    with pytest.raises(SystemExit) as ended:
        cli(["replay", "run"])
    assert ended.value.code == 0 and "bit for bit" in capsys.readouterr().out


def test_a_fault_that_no_rollout_shows_is_seen_by_the_probe(monkeypatch):
    score_hotter(monkeypatch)
    run("queue.max_staleness=0", "telemetry.probe=1000")
    assert any(line.get("mismatch/probe_kl", 0) > 0.001 for line in lines_of("run"))


def test_a_probe_that_takes_too_long_is_left(monkeypatch):
    """The engine is given no time: the run goes on without the figure."""
    monkeypatch.setattr(meter, "AT_LEAST_S", 0.0)
    monkeypatch.setattr(meter, "SHARE", 0.0)
    run("queue.max_staleness=0", "telemetry.probe=1000")
    assert not any("mismatch/probe_kl" in line for line in lines_of("run"))
    with RunReader(Path("run")) as run_:
        told = [event.numbers["tokens"] for event in run_.events() if event.kind == "probe"]
    assert told == [0.0]  # it has taken more than its share: no other one is asked for


def test_low_precision_on_one_side_shows_in_the_engines_part():
    if not bfloat16_products():
        pytest.skip("this processor does not multiply bfloat16 numbers")
    lines = run("queue.max_staleness=0", "run.numerics=fast", "generator.weights=bfloat16")
    assert max(line["mismatch/engine_logprob_diff_max"] for line in lines) > 1e-4
