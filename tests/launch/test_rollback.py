"""Monitors that go back, and those that wait for a person."""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import _folder, exit_of, go_on, recipe  # noqa: F401  the same folder, recipe and reward

from nearpolicy.config import ConfigError
from nearpolicy.launch.pause import PAUSED
from nearpolicy.launch.session import Session, run_session
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.records import ROLLBACK, Fate
from nearpolicy.store.reader import RunReader

SPIKE = "monitors=[{metric: policy/grad_norm, above: 1e6, action: rollback%s}]"


@pytest.fixture
def spike(monkeypatch):
    """``spike(step, times)``: so many times when this step is made, its gradient is told to have been large."""
    wanted: dict[int, int] = {}
    made = PolicyLearner.step

    def step(self, batch):
        report = made(self, batch)
        if not wanted.get(batch.step):
            return report
        wanted[batch.step] -= 1
        return replace(report, metrics={**report.metrics, "policy/grad_norm": 1e9})

    monkeypatch.setattr(PolicyLearner, "step", step)
    return lambda step, times=1: wanted.update({step: times})


def train(*overrides: str, folder: str = "run", on_step=None) -> list[str]:
    said = []
    session = Session(config=recipe(f"run.dir={folder}", *overrides), say=said.append)
    if on_step is not None:
        session.on_step = lambda step, metrics: on_step(session, step)
    run_session(session)
    return said


def versions(folder: str) -> dict[int, str]:
    with RunReader(Path(folder)) as run:
        return {record.version: record.fingerprint for record in run.versions()}


def require_whole(folder: str, steps: int, *, bound: int) -> None:
    with RunReader(Path(folder)) as run:
        assert [record.step for record in run.steps()] == list(range(steps))
        consumed = [used.admission for used in run.consumption()]
        undone = [row[0] for row in run.query("SELECT admission FROM undone")]
        assert len({*consumed, *undone}) == len(consumed) + len(undone)
        for used in run.consumption():
            assert 0 <= used.step - run.group(used.admission, used.attempt).oldest_version <= bound
        assert run.unfinished() == []
        ledger = run.ledger()
        assert sum(ledger.values()) == run.query("SELECT sum(sampled) FROM rollouts")[0][0]
        assert Fate.IN_FLIGHT not in ledger
        for last in [line for line in run.metrics() if "policy/loss" in line][-1:]:
            assert last["ledger/trained_tokens"] == ledger[Fate.TRAINED]
        assert [line["step"] for line in run.metrics() if "policy/loss" in line] == list(range(steps))
        indices = [admission.index for admission in run.admissions()]
        assert indices == list(range(len(indices)))


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("every", [0, 2])
def test_a_rollback_goes_on_from_the_weights_before_the_alarm_with_other_prompts(spike, bound, every):
    settings = (f"queue.max_staleness={bound}", f"checkpoint.every={every}")
    settings = settings if every else (*settings, "checkpoint.keep_last=1")
    train(*settings, folder="clean")
    spike(3)
    said = train(*settings, SPIKE % "")
    assert any("rolled back to step 3, as lineage 1" in line for line in said), said
    require_whole("run", 6, bound=bound)
    assert {v: f for v, f in versions("run").items() if v <= 3} == {
        v: f for v, f in versions("clean").items() if v <= 3
    } or bound  # with staleness what a step gets depends on time
    with RunReader(Path("run")) as run:
        assert [(b.first, b.kind) for b in run.branches()] == [(4, ROLLBACK)]
        names = {(r.lineage, r.version) for r in run.all_versions()}
        assert names == {(0, v) for v in range(5)} | {(1, v) for v in (4, 5, 6)}
        assert [row[0] for row in run.query("SELECT step FROM undone")] == [3, 3]
        assert len(list(run.events("rollback"))) == 1
    assert exit_of("replay", "run") == 0


def test_a_rollback_of_a_step_that_was_not_published_leaves_nothing_to_publish(spike):
    spike(2)
    settings = ("queue.max_staleness=1", "sync.weight_sync_steps=2", "run.steps=4", SPIKE % "")
    said = train(*settings, on_step=lambda session, step: None)
    assert any("rolled back to step 2" in line for line in said)
    require_whole("run", 4, bound=1)
    spike(2)
    alarm = "monitors=[{metric: policy/grad_norm, above: 1e6, action: rollback, most: 1}]"
    stops = iter([True])
    train(
        *settings, alarm, folder="stopped",
        on_step=lambda session, step: session.stop() if step == 3 and next(stops, False) else None,
    )  # fmt: skip
    require_whole("stopped", 4, bound=1)


def test_every_tool_reads_a_run_that_went_back(spike, capsys):
    spike(3)
    train(
        "queue.max_staleness=1", "evaluation.every=2", "tasks.0.held_out=4", "evaluation.pass_k=[]", SPIKE % ", back: 1"
    )
    for command in (
        ("audit",),
        ("report",),
        ("inspect", "--group", "6"),
        ("inspect", "--step", "3"),
        ("inspect",),
        ("why",),
    ):
        assert exit_of(command[0], "run", *command[1:]) == 0, capsys.readouterr().err
    assert exit_of("compare", "run", "--help") == 0
    with RunReader(Path("run")) as run:
        undone = [row[0] for row in run.query("SELECT admission FROM undone")]
        reasons = {item.admission.index: item.reason for item in run.rollouts() if item.admission.index in undone}
    assert "step 3: policy/grad_norm is 1e+09" in Path("run/report.html").read_text()
    assert undone and all("rollback: step 3: policy/grad_norm" in reason for reason in reasons.values())


def test_a_rollback_may_go_further_back_and_no_more_often_than_it_may(spike):
    spike(3, times=100)
    said = train("queue.max_staleness=1", SPIKE % ", back: 2, most: 2")
    assert [line.split(",")[0] for line in said if line.startswith("rolled back to")] == ["rolled back to step 1"] * 2
    assert any("rolled back 2 times already" in line for line in said)
    require_whole("run", 4, bound=1)


def test_a_run_that_went_back_can_be_stopped_and_taken_up(spike):
    spike(3)
    settings = ("queue.max_staleness=0", SPIKE % "")
    train(*settings, folder="whole")
    spike(3)
    stops = iter([4])  # after the fifth step, the second of its lineage
    train(*settings, on_step=lambda session, step: session.stop() if step == 4 and next(stops, None) else None)
    go_on()
    assert versions("run") == versions("whole")
    require_whole("run", 6, bound=0)


def test_a_process_that_dies_in_the_middle_of_a_rollback_leaves_one_that_is_decided(spike, monkeypatch):
    from nearpolicy.launch.recovery import Recovery

    settings = ("queue.max_staleness=0", SPIKE % "")
    spike(3)
    train(*settings, folder="whole")
    spike(3)

    async def dies(self, *arguments):
        self.store.flush()
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Recovery, "_load_checkpoint", dies)
        with pytest.raises(RuntimeError, match="killed"):
            train(*settings)
    with RunReader(Path("run")) as run:
        assert len(run.steps()) == 3 and len(run.branches()) == 1
    go_on()
    assert versions("run") == versions("whole")
    require_whole("run", 6, bound=0)


@pytest.mark.parametrize("step", [3, 5])
def test_a_rollback_that_a_kill_came_before_is_made_up_for_also_of_the_last_step(spike, monkeypatch, step):
    from nearpolicy.launch.recovery import Recovery

    settings = ("queue.max_staleness=0", SPIKE % "")
    spike(step)
    train(*settings, folder="whole")
    spike(step)

    async def dies(self, *arguments):
        self.store.flush()
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Recovery, "roll_back", dies)
        with pytest.raises(RuntimeError, match="killed"):
            train(*settings)
    with RunReader(Path("run")) as run:
        assert len(run.steps()) == step + 1 and not run.branches()
    go_on()
    with RunReader(Path("run")) as run:
        assert len(run.branches()) == 1
    assert versions("run") == versions("whole")
    require_whole("run", 6, bound=0)


def test_checkpoints_of_steps_that_do_not_count_are_set_aside(spike):
    spike(3)
    said = train("queue.max_staleness=0", "checkpoint.every=1", "checkpoint.keep_last=6", SPIKE % ", back: 2")
    assert any("step-3 is of steps that do not count" in line for line in said), said
    names = sorted(path.name.split("-")[0] for path in Path("run/checkpoints").iterdir())
    assert names == ["step"] * 6 + ["undone"] * 2


def test_a_store_tells_where_a_run_went_back_after_export_and_import(spike):
    spike(3)
    train("queue.max_staleness=0", SPIKE % "")
    for form in ("parquet", "jsonl"):
        assert exit_of("export", "run", f"out-{form}", "--format", form) == 0
        assert exit_of("import", f"out-{form}", f"again-{form}") == 0
        assert versions(f"again-{form}") == versions("run")
        assert exit_of("replay", f"again-{form}") == 0


def test_a_run_pauses_until_a_person_removes_the_file():
    alarm = "monitors=[{metric: completion/length_mean, above: 0, action: pause}]"
    seen = []

    def person(line: str) -> None:
        if line.startswith("paused:"):
            seen.append(Path("run", PAUSED).read_text())
            threading.Timer(0.05, Path("run", PAUSED).unlink).start()
        seen.append(line)

    summary = run_session(Session(config=recipe("run.dir=run", "queue.max_staleness=1", alarm), say=person))
    assert summary["steps"] == 6 and summary["ended"] == "finished"
    assert any(line.startswith("step 0: completion/length_mean is") for line in seen)
    assert "going on" in seen and not Path("run", PAUSED).exists()
    require_whole("run", 6, bound=1)
    with RunReader(Path("run")) as run:
        assert len(list(run.events("pause"))) == 1


def test_a_pause_that_nobody_ends_ends_the_run_and_it_can_go_on(capsys):
    alarm = "monitors=[{metric: completion/length_mean, above: 0, action: pause, pause_s: 0.01}]"
    said = train("queue.max_staleness=1", alarm)
    assert any("nobody let the run go on for 0.01 s" in line for line in said)
    require_whole("run", 1, bound=1)
    assert not Path("run", PAUSED).exists()
    assert json.loads(Path("run/summary.json").read_text())["ended"] == "stopped"
    capsys.readouterr()
    assert exit_of("why", "run") == 0
    assert "the run has stopped: 1 step of 6" in capsys.readouterr().out
    go_on("monitors=[]")
    require_whole("run", 6, bound=1)


@pytest.mark.parametrize("key", ["back: 2", "most: 5", "pause_s: 3"])
def test_a_setting_of_another_action_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=key.partition(":")[0]):
        recipe(f"monitors=[{{metric: policy/entropy, below: 1, action: stop, {key}}}]")


def test_an_evaluation_of_weights_that_do_not_count_is_not_shown(spike):
    spike(3)
    settings = ("evaluation.every=1", "tasks.0.held_out=4", "evaluation.pass_k=[]")
    train("queue.max_staleness=0", *settings, SPIKE % ", back: 1")
    with RunReader(Path("run")) as run:
        shown = {(sample.lineage, sample.version) for sample in run.evaluations()}
    stored = sqlite3.connect("run/store.sqlite").execute("SELECT DISTINCT lineage, version FROM evaluations").fetchall()
    assert shown == {(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6)}
    assert set(stored) - shown == {(0, 3)}


def test_an_evaluation_goes_back_to_weights_before_those_that_it_found_bad(monkeypatch):
    from nearpolicy.evaluate import evaluator

    def graded(scores, pass_k):
        return {"evaluation/sums/accuracy": float(scores[0].version < 2)}

    monkeypatch.setattr(evaluator, "score_metrics", graded)
    alarm = "monitors=[{metric: evaluation/sums/accuracy, below: 0.5, steps: 2, action: rollback, most: 1}]"
    said = train("queue.max_staleness=0", "evaluation.every=1", "tasks.0.held_out=4", "evaluation.pass_k=[]", alarm)
    assert any("rolled back to step 1" in line for line in said), said  # the versions 2 and 3 were bad
    require_whole("run", 3, bound=0)


def test_rollback_with_dynamic_sampling_goes_on_after_a_resume(spike):
    spike(3)
    settings = (
        "queue.max_staleness=1",
        "queue.dynamic_sampling=true",
        "queue.max_rounds=3",
        "run.steps=6",
        SPIKE % ", back: 3",
    )
    stops = iter([True])
    train(
        *settings,
        on_step=lambda session, step: (
            session.stop() if step == 1 and session_went_back() and next(stops, False) else None
        ),
    )
    go_on()
    with RunReader(Path("run")) as run:
        assert [record.step for record in run.steps()] == list(range(6))


def session_went_back() -> bool:
    with RunReader(Path("run")) as run:
        return bool(run.branches())


def test_a_stop_during_a_rollback_ends_the_run_there(spike, monkeypatch):
    from nearpolicy.launch.recovery import Recovery

    spike(3)
    load, sessions = Recovery._load_checkpoint, []

    async def stopped_meanwhile(self, *arguments):
        sessions[0].stop()
        return await load(self, *arguments)

    settings = (
        "queue.max_staleness=1",
        "sync.weight_sync_steps=2",
        "warm_start.steps=3",
        "warm_start.learning_rate=1e-3",
    )
    with monkeypatch.context() as patched:
        patched.setattr(Recovery, "_load_checkpoint", stopped_meanwhile)
        train(*settings, SPIKE % ", back: 3", on_step=lambda session, step: sessions.append(session))
    require_whole("run", 0, bound=1)
    go_on()
    require_whole("run", 6, bound=1)


def test_a_monitor_that_is_new_when_a_run_is_taken_up_begins_then():
    train("queue.max_staleness=0", on_step=lambda session, step: session.stop() if step == 2 else None)
    said = go_on("monitors=[{metric: completion/length_mean, above: 0, action: rollback, most: 1}]")
    assert any("the run goes back" in line for line in said) and any("rolled back to step 3" in line for line in said)
    with RunReader(Path("run")) as run:
        assert len(list(run.events("alarm"))) == 2  # the second one ends the run


def test_the_last_evaluation_asks_for_nothing_also_after_a_kill(monkeypatch):
    alarm = "monitors=[{metric: evaluation/sums/accuracy, below: 2, action: rollback}]"
    settings = ("queue.max_staleness=0", "evaluation.every=0", "tasks.0.held_out=4", "evaluation.pass_k=[]", alarm)
    said = train(*settings, folder="whole")
    assert not any("goes back" in line for line in said)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "_sum_up", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train(*settings)
    go_on()
    assert versions("run") == versions("whole")


def test_a_pause_whose_process_died_does_not_stay():
    train("queue.max_staleness=0", on_step=lambda session, step: session.stop() if step == 2 else None)
    Path("run", PAUSED).write_text("why")
    go_on()
    assert not Path("run", PAUSED).exists()
