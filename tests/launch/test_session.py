"""The life of a run as its callers see it: what it opens, what it leaves behind when it cannot start, how it stops."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from nearpolicy.config import RunConfig, load_recipe
from nearpolicy.errors import DataError, UserError
from nearpolicy.launch.build import _threads
from nearpolicy.launch.session import Session, run_session
from nearpolicy.launch.sizes import memory_by_owner, model_shape
from nearpolicy.models.numerics import Numerics
from nearpolicy.records import Fate
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 1}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 3, num_generations: 2}
queue: {prompts_per_step: 2}
tasks:
  - name: sums
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    answer_column: answer
    chat: false
    rewards: [{kind: number}]
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Load the recipe with overrides, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "demo.yaml").write_text(RECIPE.replace("ROWS", str(tmp_path / "rows.jsonl")))

    def load(*overrides: str) -> RunConfig:
        return load_recipe(tmp_path / "demo.yaml", overrides)

    return load


def test_bad_data_leaves_no_run_folder_and_takes_none(config, tmp_path):
    with pytest.raises(DataError, match="did you mean `question`"):
        run_session(Session(config=config("tasks.0.prompt_column=quest")))
    assert not Path("runs").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError):
        run_session(Session(config=config("tasks.0.prompt_column=quest", "run.dir=mine")))
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_missing_sink_is_refused_before_a_folder_is_made(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="trackio"):
        run_session(Session(config=config("run.dir=mine", "telemetry.sinks=[trackio]")))
    assert not (tmp_path / "mine").exists()


def test_a_model_that_is_unfit_is_refused_before_a_folder_is_made(config, tmp_path):
    with pytest.raises(UserError, match="bloom"):
        run_session(Session(config=config("run.dir=mine", "model.path=random:bloom")))
    assert not (tmp_path / "mine").exists()


def test_every_sampled_token_of_a_run_that_ends_early_has_a_fate(config):
    session = Session(config=config("run.steps=50", "queue.max_staleness=2"))

    def stop(step: int, metrics) -> None:
        session.stop_requested = step == 1

    session.on_step = stop
    run_session(session)
    with RunReader(session.folder.path) as run:
        ended = [event.numbers["tokens"] for event in run.events("finish") if event.admission is not None]
        assert sum(ended) == sum(run.ledger().values()) > 0
        assert Fate.IN_FLIGHT not in run.ledger()


def test_a_stop_during_the_warm_start_ends_it_and_saves(config):
    said = []

    def stop_at_once(text: str) -> None:
        said.append(text)
        session.stop_requested = True

    session = Session(config=config("warm_start.steps=10000"), say=stop_at_once)
    summary = run_session(session)
    assert summary["steps"] == 0
    assert not [line for line in said if "warm start" in line]
    assert (session.folder.checkpoints / "step-0").is_dir()


def test_a_run_can_be_started_while_an_event_loop_runs(config):
    async def in_a_notebook():
        return run_session(Session(config=config()))

    assert asyncio.run(in_a_notebook())["steps"] == 1
    assert RunFolder(Path("runs/demo-1")).summary.is_file()


def test_training_time_includes_evaluation_during_the_run_which_is_told_apart(config):
    summary = run_session(
        Session(config=config("run.steps=3", "tasks.0.held_out=2", "evaluation.every=1", "queue.max_staleness=1"))
    )
    with RunReader("runs/demo-1") as run:
        evaluated = [event.seconds for event in run.events(kind="evaluate")]
        begin = min(event.time for event in run.events(kind="admit"))
        end = max(event.time for event in run.events(kind="take"))
    assert len(evaluated) == 4  # before, after steps 1 and 2, after the last
    assert summary["wall_s"] >= end - begin - 0.01
    assert summary["evaluation_s"] == pytest.approx(sum(evaluated), abs=0.01)


def test_memory_that_was_held_is_what_check_estimates_under_the_same_names(config):
    recipe = config()
    held = run_session(Session(config=recipe))["memory_mb"]
    estimated = memory_by_owner(recipe, model_shape(recipe.model))
    assert set(estimated) - set(held) == {"learner: activations", "engine: activations"}
    for owner in ("learner: weights", "learner: AdamW", "engine: weights"):
        assert held[owner] == pytest.approx(estimated[owner], abs=0.1)


def test_threads_that_exact_numerics_cannot_use_are_lowered_aloud():
    said: list[str] = []
    numerics = Numerics(min_rows=4, max_threads=2)
    assert _threads("generator", 8, 8, numerics, said.append) == 2
    assert said == ["generator.threads=8 is lowered to 2: numerics are exact up to there here"]
    assert _threads("learner", 8, None, numerics, said.append) == 2
    assert _threads("learner", 1, 1, numerics, said.append) == 1
    assert len(said) == 1
