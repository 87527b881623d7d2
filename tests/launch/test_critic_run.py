"""Runs with a critic, in this process: they learn, repeat themselves, and go on from a checkpoint."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from nearpolicy.config import RunConfig, load_recipe
from nearpolicy.errors import ConfigError, ModelError, UserError
from nearpolicy.launch.compare import command as compare
from nearpolicy.launch.report import write_report
from nearpolicy.launch.session import Session, run_session
from nearpolicy.records import Fate
from nearpolicy.store.reader import RunReader
from nearpolicy.telemetry.metrics import unknown_names

RECIPE = """\
run: {steps: 16}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 4, num_generations: 4}
queue: {prompts_per_step: 4, max_staleness: 1}
learner: {learning_rate: 0.003}
objective: {advantage: gae}
tasks:
  - name: words
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    rewards: [{kind: regex, pattern: '[a-z]'}]
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The recipe with overrides, each in a run folder of its own."""
    folder = tmp_path_factory.mktemp("critic")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"word {i}:"}) + "\n" for i in range(12)))
    (folder / "words.yaml").write_text(RECIPE.replace("ROWS", str(folder / "rows.jsonl")))
    count = iter(range(100))
    return lambda *more: load_recipe(folder / "words.yaml", [f"run.dir={folder / f'run-{next(count)}'}", *more])


def trained(config: RunConfig) -> tuple[Path, list[dict]]:
    """(run folder, its lines of training metrics)."""
    run_session(Session(config=config, say=lambda text: None))
    with RunReader(config.run.dir) as run:
        lines = [line for line in run.metrics() if "policy/loss" in line]
    assert unknown_names({name for line in lines for name in line} - {"step", "time", "not_finite"}) == []
    return Path(config.run.dir), lines


def rewards(lines: list[dict]) -> list[float]:
    return [line["reward/mean"] for line in lines]


@pytest.fixture(scope="module")
def asynchronous(load):
    return trained(load("run.keep_versions=true"))


def test_a_run_with_a_critic_learns_and_the_critic_follows(asynchronous):
    _, lines = asynchronous
    assert sum(rewards(lines)[-4:]) > 1.5 * sum(rewards(lines)[:4])
    assert lines[0]["critic/value_mean"] == 0.0
    recent = sum(rewards(lines)[-4:]) / 4
    assert lines[-1]["critic/value_mean"] == pytest.approx(recent, abs=0.35)
    assert lines[0]["critic/target_mean"] == pytest.approx(rewards(lines)[0], abs=0.2)  # a mean over tokens
    assert all(line["critic/grad_norm"] > 0 and line["critic/skipped_updates"] == 0 for line in lines)


def test_the_report_shows_what_the_critic_is_worth(asynchronous):
    page = write_report(asynchronous[0]).read_text()
    assert "Values of the critic" in page and "Explained variance" in page


def test_the_store_keeps_the_advantages_that_were_trained_with(asynchronous):
    folder, _ = asynchronous
    with RunReader(folder) as run:
        batch = run.batch(3)
        ledger = run.ledger()
    flat = [value for row in batch.rows for value in row.advantages[row.trained]]
    assert sum(flat) / len(flat) == pytest.approx(0.0, abs=1e-5)  # whitened
    assert any(len(set(row.advantages[row.trained].tolist())) > 1 for row in batch.rows)  # a token has its own
    assert set(ledger) <= {Fate.TRAINED, Fate.ZERO_ADVANTAGE, Fate.ABORTED}


def test_a_synchronous_run_repeats_itself_bit_for_bit(load):
    more = ("run.steps=3", "queue.max_staleness=0", "learner.minibatches=2", "critic.learning_rate=0.01")
    first, second = (trained(load(*more))[1] for _ in range(2))
    names = [name for name in first[0] if name.startswith(("critic/", "policy/", "reward/"))]
    assert [[line[n] for n in names] for line in first] == [[line[n] for n in names] for line in second]


def test_weights_of_pretraining_are_those_of_version_0_and_its_tokens_are_trained(load):
    folder, lines = trained(load("run.steps=4", "critic.pretraining_steps=2"))
    with RunReader(folder) as run:
        fingerprints = [record.fingerprint for record in run.versions()]
        assert set(run.ledger()) == {Fate.TRAINED}
    assert fingerprints[0] == fingerprints[1] == fingerprints[2] != fingerprints[3] != fingerprints[4]
    assert [line["learner/learning_rate"] for line in lines] == [0.0, 0.0, 0.003, 0.003]
    assert [line["learner/updates"] for line in lines] == [0.0, 0.0, 1.0, 2.0]
    assert lines[2]["staleness/updates_max"] == 0.0  # two steps, and no update of the policy


def learner_from(config: RunConfig, folder: Path | None):
    from nearpolicy.launch import build

    language = build.Language.of(config, folder=folder)
    model = build.load_model(config, language, print)
    torch.set_num_threads(1)
    return build.make_learner(config, language, model.numerics, threads=1)


def test_what_a_run_has_saved_goes_on_with_the_same_critic(load):
    from nearpolicy.learner.checkpoint import load_state

    config = load("run.steps=4", "queue.max_staleness=0", "warm_start.steps=2", "tasks.0.answer_column=question")
    folder, _ = trained(config)
    saved = folder / "checkpoints" / "step-4"
    again = learner_from(config, saved)
    load_state(again, saved)
    assert (again.version, again.updates) == (4, 4)
    with RunReader(folder) as run:
        batch, old = run.batch(3), run.metrics()
    fresh = learner_from(config, saved)  # its critic begins anew
    fresh.restart(4)
    reports = [learner.step(batch).metrics for learner in (again, fresh)]
    assert reports[0]["critic/value_mean"] != 0.0 == reports[1]["critic/value_mean"]
    assert reports[0]["critic/loss"] < old[0]["critic/loss"]


def test_another_model_may_be_the_critic_if_it_speaks_of_the_same_tokens(load):
    _, lines = trained(load("run.steps=2", "critic.path=random:qwen3", "learner.activation_checkpointing=true"))
    assert lines[1]["critic/value_mean"] != 0.0
    with pytest.raises(ModelError, match=r"critic\.path .* has a vocabulary of 272 tokens and the policy one of 288"):
        learner_from(load("critic.path=random:qwen3", "model.init={vocab_size: 288}"), None)
    with pytest.raises(ConfigError, match="pretraining_steps"):
        load("critic.pretraining_steps=16")


def test_vtrace_takes_a_critic_that_is_written_and_none_that_is_not(load):
    vtrace = partial(load, "run.steps=2", "objective.advantage=vtrace")
    assert "critic/loss" not in trained(vtrace())[1][0]
    assert all(line["critic/loss"] > 0 for line in trained(vtrace("critic.clip=0.4"))[1])


def test_with_a_critic_one_completion_per_prompt_is_enough(load):
    _, lines = trained(load("run.steps=2", "sampling.num_generations=1", "queue.prompts_per_step=8"))
    assert all(line["policy/grad_norm"] > 0 and line["batch/failed_groups"] == 0 for line in lines)


def test_a_recording_with_a_critic_is_compared_without_its_own_objective(asynchronous, capsys):
    folder, _ = asynchronous
    compare(folder, ["advantage=rloo"], at=2)
    out = capsys.readouterr().out
    assert "the recorded objective is left out: it needs its critic" in out
    assert list(json.loads(out.splitlines()[-1])["objectives"]) == ["advantage=rloo"]
    with pytest.raises(UserError, match=r"objective\.advantage=gae needs a critic, and no recording holds"):
        compare(folder, ["advantage=gae"], at=2)
