"""The life of a run as its callers see it: what it opens, what it leaves behind when it cannot start, how it stops."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from nearpolicy.config import RunConfig, load_recipe
from nearpolicy.errors import DataError, RolloutsError, RunFolderError, UserError, VerifierError
from nearpolicy.launch.build import _threads
from nearpolicy.launch.inspect import inspect_run
from nearpolicy.launch.session import Session, run_session
from nearpolicy.launch.sizes import memory_by_owner, model_shape
from nearpolicy.models.numerics import Numerics
from nearpolicy.records import Fate
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.writer import SqliteStore

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
        if step == 1:
            session.stop()

    session.on_step = stop
    run_session(session)
    with RunReader(session.folder.path) as run:
        ended = [event.numbers["tokens"] for event in run.events("finish") if event.admission is not None]
        assert sum(ended) == sum(run.ledger().values()) > 0
        assert Fate.IN_FLIGHT not in run.ledger()


@pytest.mark.parametrize("own_folder", [False, True])
def test_a_stop_before_version_0_is_published_leaves_nothing(config, tmp_path, own_folder):
    overrides = ["warm_start.steps=10000"]
    if own_folder:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("not a run")
        overrides.append("run.dir=mine")

    def stop_at_once(text: str) -> None:
        if text.startswith("run folder"):
            assert session.folder.store.is_file()
            session.stop()

    session = Session(config=config(*overrides), say=stop_at_once)
    with pytest.raises(KeyboardInterrupt, match="before the first step"):
        run_session(session)
    assert not session.begun
    left = list((tmp_path / "mine").iterdir()) if own_folder else list((tmp_path / "runs").iterdir())
    assert [path.name for path in left] == (["notes.txt"] if own_folder else [])


def test_a_warm_start_that_leaves_the_numbers_is_a_message_and_leaves_nothing(config, tmp_path):
    with pytest.raises(UserError, match=r"^warm start, step \d: .*not finite.*lower warm_start\.learning_rate"):
        run_session(Session(config=config("warm_start.steps=5", "warm_start.learning_rate=1e20", "run.dir=mine")))
    assert not (tmp_path / "mine").exists()


def test_a_stop_during_an_evaluation_leaves_it_and_what_was_not_learned_is_not_saved(config):
    said = []

    def stop_in_evaluation(text: str) -> None:
        said.append(text)
        if text.startswith("evaluating version 0"):
            session.stop()

    session = Session(config=config("tasks.0.held_out=3"), say=stop_in_evaluation)
    summary = run_session(session)
    assert (summary["steps"], summary["held_out"]) == (0, {"before": {}, "after": {}})
    assert "the evaluation was left, its answers are not kept" in said
    assert not session.folder.checkpoints.exists()
    with RunReader(session.folder.path) as run:
        assert run.evaluations() == []


def test_a_stop_during_an_evaluation_between_steps_ends_the_run_and_saves(config):
    def stop_in_evaluation(text: str) -> None:
        if text.startswith("evaluating version 2"):
            session.stop()

    session = Session(config=config("tasks.0.held_out=3", "evaluation.every=1", "run.steps=9"), say=stop_in_evaluation)
    assert run_session(session)["steps"] == 2
    assert [path.name for path in session.folder.checkpoints.iterdir()] == ["step-2"]
    with RunReader(session.folder.path) as run:
        assert {sample.version for sample in run.evaluations()} == {0, 1}


def test_a_reward_that_never_answers_ends_the_run_with_its_name_whether_or_not_there_is_an_evaluation(config):
    Path("slow.py").write_text("import time\n\n\ndef never(completions, **_):\n    time.sleep(1000)\n")
    reward = "tasks.0.rewards=[{kind: function, path: 'slow.py:never'}]"
    for asked in ((), ("tasks.0.held_out=4", "evaluation.pass_k=[2]")):
        limits = ("verifier.timeout_s=0.1", "verifier.retries=0", "verifier.workers=1", *asked)
        with pytest.raises(VerifierError, match=r"^reward 'function' of task 'sums' answered none of its first 8 "):
            run_session(Session(config=config(reward, *limits)))


def raises(completions, **_):
    raise ValueError("no key")


def test_a_run_whose_groups_all_fail_ends_with_the_reason_and_no_checkpoint(config, tmp_path):
    reward = "tasks.0.rewards=[{kind: function, path: 'given:raises'}]"
    with pytest.raises(
        RolloutsError, match=r"^6 groups in a row failed, the last because: .*raised ValueError: no key"
    ):
        run_session(Session(config=config(reward, "run.dir=mine"), functions={"given:raises": raises}))
    assert (tmp_path / "mine" / "store.sqlite").is_file()
    assert not (tmp_path / "mine" / "checkpoints").exists()


def test_a_run_folder_that_is_removed_ends_the_run_with_a_message(config):
    session = Session(config=config("run.steps=1000"))
    session.on_step = lambda step, _: step == 1 and shutil.rmtree(session.folder.path)
    with pytest.raises(RunFolderError, match=r"demo-1 was removed or replaced while the run wrote it"):
        run_session(session)
    assert not session.folder.path.exists()


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
    with_critic = config("objective.advantage=gae", "run.dir=with_critic")
    more = run_session(Session(config=with_critic))["memory_mb"]
    assert set(more) - set(held) == {"critic: weights", "critic: AdamW"}
    estimated = memory_by_owner(with_critic, model_shape(with_critic.model))
    for owner in ("critic: weights", "critic: AdamW", "learner: gradients"):
        assert more[owner] == pytest.approx(estimated[owner], abs=0.1)


def test_threads_that_exact_numerics_cannot_use_are_lowered_aloud():
    said: list[str] = []
    numerics = Numerics(min_rows=4, max_threads=2)
    assert _threads("generator", 8, 8, numerics, said.append) == 2
    assert said == ["generator.threads=8 is lowered to 2: numerics are exact up to there here"]
    assert _threads("learner", 8, None, numerics, said.append) == 2
    assert _threads("learner", 1, 1, numerics, said.append) == 1
    assert len(said) == 1


def test_a_stop_while_the_folder_is_taken_gives_it_back(config, tmp_path, monkeypatch):
    session = Session(config=config("run.dir=mine"))
    create = SqliteStore.create

    def stopped_meanwhile(*arguments, **options):
        assert session.opening  # a signal only asks then, it does not break in
        session.stop()
        return create(*arguments, **options)

    monkeypatch.setattr(SqliteStore, "create", stopped_meanwhile)
    with pytest.raises(KeyboardInterrupt, match="nothing is kept"):
        run_session(session)
    assert not (tmp_path / "mine").exists()


def test_a_profiled_run_writes_a_trace_with_every_role_on_it(config, tmp_path):
    run_session(Session(config=config("run.dir=mine", "run.steps=2", "telemetry.profile=1")))
    events = json.loads((tmp_path / "mine" / "trace.json").read_text())["traceEvents"]
    assert {"generator", "learner", "sync", "queue", "verifier"} <= {e["cat"] for e in events if "cat" in e}
    assert {e["args"]["version"] for e in events if e["name"] == "forward_backward"} == {0}  # of the first step alone
    run_session(Session(config=config("run.dir=other")))
    assert not (tmp_path / "other" / "trace.json").exists()


@pytest.mark.parametrize("at_bound", ["drop", "requeue"])
def test_groups_beyond_the_bound_expire_with_a_reason_that_inspect_shows_and_the_run_goes_on(config, capsys, at_bound):
    recipe = config(
        "queue.order=ready", f"queue.at_bound={at_bound}", "queue.max_staleness=0", "generator.oversample=3",
        "generator.on_sync=continue", "sampling.max_completion_length=12", "run.steps=3", "run.dir=mine",
    )  # fmt: skip
    summary = run_session(Session(config=recipe))
    assert summary["ended"] == "finished" and summary["ledger"]["expired"] > 0 and not summary["ledger"]["in_flight"]
    with RunReader(Path("mine")) as run:
        expired = [event for event in run.events() if event.kind == "expire"]
        lines = run.metrics()
    assert {event.numbers["reason"] for event in expired} == {
        f"version {v} with {v + 1} steps completed, queue.max_staleness is 0" for v in range(3)
    }
    assert sum(line.get("batch/expired_groups", 0) for line in lines) == len(expired) >= 2 * 3
    first = expired[0].admission
    inspect_run(Path("mine"), group=first)
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "(version 0 with 1 steps completed, queue.max_staleness is 0)" in shown
