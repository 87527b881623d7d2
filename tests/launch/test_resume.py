"""Runs that go on, and recordings that are trained again. Kills at any instant are in tests/chaos."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from nearpolicy.config import RunConfig, load_recipe
from nearpolicy.errors import ConfigError, DataError, RunFolderError
from nearpolicy.evaluate.metrics import held_out_scores
from nearpolicy.launch.cli import run as cli
from nearpolicy.launch.resume import differences, resumed_config
from nearpolicy.launch.session import Session, run_session
from nearpolicy.records import Fate
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 6, dir: run}
model:
  path: random:llama
  init: {initializer_range: 0.15, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1}
sampling: {max_prompt_length: 16, max_completion_length: 5, num_generations: 3}
queue: {prompts_per_step: 2}
checkpoint: {every: 2, keep_last: 2}
learner: {learning_rate: 1e-3, warmup_steps: 10}
verifier: {in_process: true}
tasks:
  - name: sums
    source: {kind: jsonl, path: rows.jsonl}
    prompt_column: question
    answer_column: answer
    chat: false
    rewards: [{kind: function, path: reward.py:judge}]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(6) for b in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(
        "def judge(completions, **_): return [float(sum(map(ord, c)) % 7) for c in completions]"
    )
    Path("demo.yaml").write_text(RECIPE)


def recipe(*overrides: str) -> RunConfig:
    return load_recipe(Path("demo.yaml"), overrides)


def begin(*overrides: str, folder: str = "run", stop_after: int | None = None) -> dict:
    """A run; stopped by a person after so many steps."""
    session = Session(config=recipe(f"run.dir={folder}", *overrides), say=lambda text: None)
    if stop_after is not None:
        session.on_step = lambda step, metrics: session.stop() if step + 1 == stop_after else None
    return run_session(session)


def go_on(*overrides: str, folder: str = "run") -> list[str]:
    """Take a run up and train it to its end; what it says."""
    there, said = RunFolder(Path(folder).resolve()), []
    run_session(Session(config=resumed_config(there, overrides), folder=there, resumes=True, say=said.append))
    return said


def fingerprints(folder: str) -> list[str]:
    with RunReader(Path(folder)) as run:
        return [record.fingerprint for record in run.versions()]


def lines(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def sampled(folder: str) -> dict[int, list[list[int]]]:
    with RunReader(Path(folder)) as run:
        consumed = {used.admission for used in run.consumption()}
        return {
            g.index: [r.segments[0].token_ids.tolist() for r in g.rollouts] for g in run.groups() if g.index in consumed
        }


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("warm_start.steps=3", "warm_start.learning_rate=1e-3", "objective.reference=initial", "objective.kl_coef=0.1"),
        ("learner.lora.rank=2",),
        ("objective.advantage=gae", "critic.learning_rate=1e-3"),
        ("objective.entropy_target=2.0",),
    ],
    ids=["plain", "warm start and reference", "adapter", "critic", "entropy control"],
)
def test_stop_and_resume_leaves_no_trace_in_the_result(settings):
    """K54, I7."""
    settings = ("queue.max_staleness=0", *settings)
    begin(*settings, folder="whole")
    begin(*settings, stop_after=3)
    go_on()
    assert fingerprints("run") == fingerprints("whole")
    assert sampled("run") == sampled("whole")
    logged = lines("run")
    assert [line["step"] for line in logged if "policy/loss" in line] == list(range(6))
    rates = [line["learner/learning_rate"] for line in logged if "learner/learning_rate" in line]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4])
    with RunReader(Path("run")) as run:
        assert set(run.ledger()) <= {Fate.TRAINED, Fate.ZERO_ADVANTAGE, Fate.ABORTED}


def test_a_run_may_go_on_for_longer():
    begin("queue.max_staleness=0", "run.steps=8", folder="whole")
    begin("queue.max_staleness=0", "run.steps=4")
    go_on("run.steps=8")
    assert fingerprints("run") == fingerprints("whole")


def test_what_was_learned_after_the_checkpoint_is_learned_from_the_recording_and_never_sampled_again():
    begin("queue.max_staleness=1", stop_after=5)
    shutil.rmtree("run/checkpoints/step-5")
    before = sampled("run")
    said = go_on()
    assert any("checkpoint step-4, 1 recorded step learned again" in line for line in said)
    after = sampled("run")
    assert {index: after[index] for index in before} == before
    with RunReader(Path("run")) as run:
        assert len(run.consumption()) == 12 == len({used.admission for used in run.consumption()})


def test_groups_that_were_ready_are_consumed_and_keep_their_versions():
    begin("queue.max_staleness=2", stop_after=2)
    said = go_on()
    with RunReader(Path("run")) as run:
        for used in run.consumption():
            assert 0 <= used.step - run.group(used.admission, used.attempt).oldest_version <= 2
    assert any("begin anew" in line for line in said)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves():
    begin("queue.max_staleness=0", folder="whole")
    begin("queue.max_staleness=0", stop_after=4)
    state = Path("run/checkpoints/step-4/training_state.pt")
    state.write_bytes(state.read_bytes()[:100])
    said = go_on()
    assert any("step-4 cannot be read" in line for line in said)
    assert fingerprints("run") == fingerprints("whole")


def test_a_checkpoint_whose_weights_were_changed_is_named_and_the_one_before_it_serves():
    begin("queue.max_staleness=0", folder="whole")
    begin("queue.max_staleness=0", stop_after=4)
    for name in ("model.safetensors", "training_state.pt"):
        shutil.rmtree("again", ignore_errors=True)
        shutil.copytree("run", "again")
        file = Path("again/checkpoints/step-4") / name
        data = bytearray(file.read_bytes())
        data[-2000:-1990] = b"AAAAAAAAAA"
        file.write_bytes(data)
        said = go_on(folder="again")
        assert any("warning: checkpoint" in line and "step-4" in line for line in said), said
        assert fingerprints("again") == fingerprints("whole")


def test_an_evaluation_that_was_due_when_the_run_ended_is_made_up_for():
    settings = ("queue.max_staleness=0", "evaluation.every=2", "tasks.0.held_out=4", "evaluation.pass_k=[]")
    begin(*settings, stop_after=2)
    store = sqlite3.connect("run/store.sqlite")  # as if it had been killed just before
    store.execute("DELETE FROM evaluations WHERE version = 2")
    store.commit()
    store.close()
    go_on()
    with RunReader(Path("run")) as run:
        assert sorted({sample.version for sample in run.evaluations()}) == [0, 2, 4, 6]


def test_fewer_steps_than_are_done_are_refused(capsys):
    begin("queue.max_staleness=0", stop_after=4)
    assert exit_of("train", "--resume", "run", "run.steps=3") == 2
    assert "has done 4 steps already" in capsys.readouterr().err


def test_a_store_that_is_damaged_inside_is_refused(capsys):
    begin("queue.max_staleness=0", stop_after=4)
    store = Path("run/store.sqlite")
    data = bytearray(store.read_bytes())
    data[len(data) // 4 : len(data) // 4 + 60_000] = b"A" * 60_000
    store.write_bytes(data)
    for wal in Path("run").glob("store.sqlite-*"):
        wal.unlink()
    assert exit_of("train", "--resume", "run") == 2
    assert "damaged" in capsys.readouterr().err


def test_without_any_checkpoint_all_is_learned_again():
    begin("queue.max_staleness=0", folder="whole")
    begin("queue.max_staleness=0", stop_after=3)
    shutil.rmtree("run/checkpoints")
    assert any("the beginning, 3 recorded steps" in line for line in go_on())
    assert fingerprints("run") == fingerprints("whole")


def test_weights_that_come_out_otherwise_open_a_new_lineage(monkeypatch):
    begin("queue.max_staleness=0", stop_after=3)
    shutil.rmtree("run/checkpoints")
    from nearpolicy.learner.optimizer import MasterAdamW

    step = MasterAdamW.step

    def other_bits(self, rate: float, max_norm: float | None) -> float:
        return step(self, rate * (1 + 1e-6), max_norm)

    monkeypatch.setattr(MasterAdamW, "step", other_bits)
    said = go_on()
    assert any("going on as lineage 1" in line for line in said)
    with RunReader(Path("run")) as run:
        assert [(r.lineage, r.version) for r in run.all_versions()] == [(0, v) for v in range(4)] + [
            (1, v) for v in range(3, 7)
        ]


def test_a_checkpoint_of_another_model_is_not_taken(tmp_path):
    begin("queue.max_staleness=0", "model.init.hidden_size=32", folder="other", stop_after=2)
    begin("queue.max_staleness=0", folder="whole")
    begin("queue.max_staleness=0", stop_after=2)
    shutil.rmtree("run/checkpoints/step-2")
    shutil.copytree("other/checkpoints/step-2", "run/checkpoints/step-2")
    assert any("another model" in line for line in go_on())
    assert fingerprints("run") == fingerprints("whole")


def test_other_initial_weights_are_refused():
    begin("queue.max_staleness=0", stop_after=1)
    shutil.rmtree("run/checkpoints")
    there = RunFolder(Path("run").resolve())
    config = resumed_config(there)
    other = config.model_copy(update={"model": config.model.model_copy(update={"seed": 5})})
    with pytest.raises(RunFolderError, match="began with other weights"):
        run_session(Session(config=other, folder=there, resumes=True, say=lambda text: None))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("queue.max_staleness=3", "queue.max_staleness was"),
        ("tasks.0.rewards.0.weight=2", "tasks.0.rewards.0.weight was"),
        ("run.seed=1", "run.seed was 0 and is 1"),
        ("learner.learning_rate=1", "learner.learning_rate was"),
    ],
)
def test_settings_that_may_not_change_are_named(change, words):
    begin(stop_after=1)
    with pytest.raises(ConfigError, match=words):
        resumed_config(RunFolder(Path("run").resolve()), [change])
    assert resumed_config(RunFolder(Path("run").resolve()), ["checkpoint.every=1"]).checkpoint.every == 1


def test_other_steps_under_a_schedule_that_depends_on_them_are_refused():
    begin("learner.lr_schedule=linear", stop_after=1)
    with pytest.raises(ConfigError, match=r"run.steps=6.*Leave run.steps"):
        resumed_config(RunFolder(Path("run").resolve()), ["run.steps=8"])


def test_differences_are_told_leaf_by_leaf():
    before = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    after = {"a": {"b": 2, "c": [1, 3]}, "d": {"e": 1}}
    assert sorted(differences(before, after)) == [("a.b", 1, 2), ("a.c.1", 2, 3), ("d", None, {"e": 1})]


def test_changed_data_is_refused_and_nothing_is_overwritten():
    begin("queue.max_staleness=1", stop_after=1)
    before = Path("run/metrics.jsonl").read_bytes()
    rows = [{"question": f"{a} - {b} =", "answer": "1"} for a in range(6) for b in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"the data of .* has changed"):
        go_on()
    rows = [{"question": f"{a} + {b} =", "answer": "many"} for a in range(6) for b in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"its text or columns were others"):
        go_on()
    assert Path("run/metrics.jsonl").read_bytes() == before


def exit_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli(arguments)
    return ended.value.code


def test_what_cannot_be_taken_up_is_refused_with_status_2(capsys):
    begin("queue.max_staleness=0", "run.steps=1")
    Path("empty").mkdir()
    Path("foreign").mkdir()
    Path("foreign/store.sqlite").write_text("not a database")
    for folder, words in {
        "absent": "is not a run",
        "empty": "holds no store.sqlite",
        "foreign": "cannot be read as the store of a run",
        "run": "is finished",
    }.items():
        assert exit_of("train", "--resume", folder) == 2
        assert words in capsys.readouterr().err
    assert exit_of("train", "--resume", "run", "demo.yaml") == 2
    assert "own recipe" in capsys.readouterr().err
    assert Path("foreign/store.sqlite").read_text() == "not a database"


def test_two_processes_cannot_write_one_run():
    begin("queue.max_staleness=0", stop_after=1)
    from nearpolicy.store.writer import SqliteStore

    with SqliteStore.open(RunFolder(Path("run").resolve())), pytest.raises(RunFolderError, match="another run"):
        go_on()


def test_the_best_checkpoint_stays_across_a_restart():
    """K53, by the held-out accuracies that the run itself has found."""
    settings = ("queue.max_staleness=0", "checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    settings = (
        *settings,
        "evaluation.every=1",
        "tasks.0.held_out=8",
        "learner.learning_rate=0.05",
        "evaluation.pass_k=[]",
    )
    begin(*settings, stop_after=3)
    go_on()
    with RunReader(Path("run")) as run:
        scores = {score.version: score.accuracy for score in held_out_scores(run.evaluations())}
    best = max((version for version in scores if 0 < version < 6), key=lambda version: (scores[version], version))
    left = {int(path.name.removeprefix("step-")) for path in Path("run/checkpoints").iterdir()}
    assert left == {6, best} and len(set(scores.values())) > 1


# Replay


def test_a_recording_gives_the_same_losses_and_weights(capsys):
    begin("queue.max_staleness=1")
    assert exit_of("replay", "run", "--save", "again") == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert "6 steps: the same, bit for bit" in out
    assert found == {"steps": 6, "fingerprint": fingerprints("run")[-1], "equal": True, "versions_compared": 7}
    ours = torch.load("run/checkpoints/step-6/training_state.pt", weights_only=True)
    assert ours["version"] == 6 and Path("again/model.safetensors").read_bytes()


def test_the_first_difference_is_named_by_step_and_tensor(capsys):
    begin("queue.max_staleness=0")
    store = sqlite3.connect("run/store.sqlite")
    digests = json.loads(store.execute("SELECT digests FROM versions WHERE version = 3").fetchone()[0])
    name = sorted(digests)[1]
    digests[name] = "0" * 32
    store.execute(
        "UPDATE versions SET fingerprint = 'other', digests = ? WHERE version = 3", (json.dumps(digests).encode(),)
    )
    store.commit()
    store.close()
    assert exit_of("replay", "run") == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["difference"].startswith("after step 2: version 3 was other and is ")
    assert found["difference"].endswith(f"the tensors {name} differ")


def test_a_recording_is_trained_under_another_setting(capsys):
    begin("queue.max_staleness=1")
    assert exit_of("replay", "run", "--until", "2", "--with", "learner.learning_rate=0.5") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["steps"] == 2 and found["fingerprint"] not in fingerprints("run")
    assert exit_of("replay", "run", "--with", "sampling.temperature=1") == 2
    assert "what was sampled stays" in capsys.readouterr().err
    assert exit_of("replay", "run", "--until", "9") == 2


KEEPS_LITTLE = ("queue.max_staleness=0", "checkpoint.keep_last=1", "store.retention_steps=1")


def exit_status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli(arguments)
    return ended.value.code or 0


def test_a_run_whose_payloads_are_moved_is_resumed_and_replayed_as_one_that_keeps_them():
    begin("queue.max_staleness=0", folder="whole")
    begin(*KEEPS_LITTLE, "store.retention=parquet", stop_after=5)
    with RunReader(Path("run")) as run:
        stay = {row[0] for row in run.query("SELECT admission FROM payloads JOIN consumption USING (admission)")}
    assert stay == {8, 9}  # of step 4: the last checkpoint contains all five, and one of them stays
    shutil.rmtree("run/checkpoints/step-5")
    go_on()  # so that even the steps whose payloads have left are learned again
    assert fingerprints("run") == fingerprints("whole")
    assert sampled("run") == sampled("whole")
    assert exit_status("replay", "run") == 0


def test_a_run_whose_payloads_are_dropped_is_resumed_from_its_checkpoint_and_from_nowhere_else():
    begin("queue.max_staleness=0", folder="whole")
    begin(*KEEPS_LITTLE, "store.retention=drop", stop_after=5)
    shutil.copytree("run", "without")
    go_on()
    assert fingerprints("run") == fingerprints("whole")
    assert exit_status("replay", "run") == 2
    assert exit_status("inspect", "run") == exit_status("report", "run") == 0
    shutil.rmtree("without/checkpoints/step-5")
    with pytest.raises(RunFolderError, match=r"tokens of group 0 .*store\.retention: drop"):
        go_on(folder="without")
