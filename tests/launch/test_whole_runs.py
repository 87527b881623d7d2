"""Whole runs of tiny models, by the numbers of known faults: epochs, checkpoints, resumed schedules and adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_resume import _folder, begin, fingerprints, go_on, lines, sampled  # noqa: F401  the same folder and recipe

from nearpolicy.errors import ConfigError, RunFolderError
from nearpolicy.learner import checkpoint as checkpoint_module
from nearpolicy.learner.checkpoint import checkpoints
from nearpolicy.records import Fate
from nearpolicy.store.reader import RunReader

WARM_UP = ("queue.max_staleness=0", "run.steps=20", "learner.warmup_steps=10", "learner.learning_rate=1e-3")


def test_twenty_steps_in_one_go_and_ten_and_ten_leave_the_same():
    """K54: parameters, prompts, completions, rates, and a log that holds each step once and in order."""
    begin(*WARM_UP, "checkpoint.every=0", "checkpoint.keep_last=1", folder="whole")
    begin(*WARM_UP, "checkpoint.every=0", "checkpoint.keep_last=1", stop_after=10)
    go_on()
    assert fingerprints("run") == fingerprints("whole")
    assert sampled("run") == sampled("whole")
    for folder in ("run", "whole"):
        assert [line["step"] for line in lines(folder)] == list(range(20))
        rates = [line["learner/learning_rate"] for line in lines(folder)]
        assert rates == pytest.approx([min(step, 10) * 1e-4 for step in range(1, 21)])


def test_a_warm_up_goes_on_where_it_was_stopped():
    """K54: stopped after 6 of 10 steps of warm-up to 1e-3, the seventh has 7e-4."""
    begin(*WARM_UP, "checkpoint.every=0", "checkpoint.keep_last=1", stop_after=6)
    go_on()
    assert lines("run")[6]["learner/learning_rate"] == pytest.approx(7e-4)


ROUNDS = {
    "one update": ("queue.prompts_per_step=3",),
    "two updates, on the same completions": ("queue.prompts_per_step=3", "learner.num_iterations=2"),
    "three updates": ("queue.prompts_per_step=3", "learner.minibatches=3"),
    "three updates between two publications": (
        "queue.prompts_per_step=1", "sync.weight_sync_steps=3", "queue.max_staleness=2", "run.steps=6",
        "checkpoint.every=3",
    ),
    "groups learned as they come": ("queue.prompts_per_step=3", "learner.streaming=true"),
}  # fmt: skip


@pytest.mark.parametrize("rounds", ROUNDS)
def test_one_epoch_shows_every_prompt_once_whatever_the_ratio_of_generation_to_updates(rounds):
    """K33: 6 prompts, 2 completions each, 3 prompts a round, no shuffling. A group stays whole: two updates that share
    three groups are refused."""
    rows = [{"question": f"{number} + {number} =", "answer": str(2 * number)} for number in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = ("tasks.0.shuffle=false", "queue.max_staleness=0", "sampling.num_generations=2", "run.steps=2")
    begin(*plain, *ROUNDS[rounds])
    with RunReader(Path("run")) as run:
        batches = [run.batch(record.step) for record in run.steps()]
        groups = [group for batch in batches for group in batch.groups]
        asked = "".join(group.admission.prompt.text[0] for group in groups for _ in group.rollouts)
        assert asked == "001122334455"
        used = [(row.group, row.sample) for batch in batches for row in batch.rows]
        assert used == [(prompt, sample) for prompt in range(6) for sample in range(2)]
        assert set(run.ledger()) <= {Fate.TRAINED, Fate.ZERO_ADVANTAGE}
    with pytest.raises(ConfigError, match=r"cannot be cut into learner\.minibatches=2 equal parts"):
        begin(*plain, "queue.prompts_per_step=3", "learner.minibatches=2", folder="other")


def test_an_adapter_that_goes_on_samples_as_its_learner_scores_from_the_first_rollout():
    """K24: under the version it was resumed at, with the bits of the run that never stopped."""
    settings = ("queue.max_staleness=0", "learner.lora.rank=2", "learner.learning_rate=0.05")
    begin(*settings, folder="whole")
    begin(*settings, stop_after=3)
    go_on()
    with RunReader(Path("run")) as run:
        resumed = [group for group in run.groups() if group.index >= 6]
        assert {v for g in resumed if g.index < 8 for r in g.rollouts for v in r.segments[0].versions.tolist()} == {3}
    assert [line["mismatch/logprob_diff_max"] for line in lines("run") if "mismatch/kl" in line] == [0.0] * 6
    assert sampled("run") == sampled("whole")


class FullOnce:
    """The disk is full for the training state of one save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        save, calls = torch.save, []

        def saved(state, path) -> None:
            calls.append(state["version"])
            if calls[-1] == at and calls.count(at) == 1:
                Path(path).write_bytes(b"half")
                raise OSError(28, "No space left on device")
            save(state, path)

        monkeypatch.setattr(torch, "save", saved)


class Complete:
    """Looks, whenever a checkpoint is about to be renamed or removed and after it, for one that is complete and whose
    steps the store has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[list[int]] = []
        rename, remove = Path.rename, shutil.rmtree

        def renamed(path: Path, target: Path) -> Path:
            return self._around(lambda: rename(path, target))

        monkeypatch.setattr(Path, "rename", renamed)
        monkeypatch.setattr(checkpoint_module.shutil, "rmtree", lambda *a, **k: self._around(lambda: remove(*a, **k)))

    def _around(self, act):
        self._look()
        found = act()
        self._look()
        return found

    def _look(self) -> None:
        there = checkpoints(Path("run/checkpoints"))
        self.seen.append([step for step, _ in there])
        for step, path in there:
            assert torch.load(path / "training_state.pt", weights_only=True)["version"] == step
            assert (path / "model.safetensors").exists()
        with RunReader(Path("run")) as run:
            assert len(run.steps()) >= max(self.seen[-1], default=0)


def test_there_is_always_one_complete_checkpoint(monkeypatch):
    """K52: keep 1, the save after step 2 meets a full disk; later saves happen while rollouts are still under way."""
    settings = ("queue.max_staleness=2", "checkpoint.every=1", "checkpoint.keep_last=1")
    FullOnce(monkeypatch, at=2)
    looks = Complete(monkeypatch)
    with pytest.raises(RunFolderError, match=r"step-2 cannot be written.*Earlier checkpoints are untouched"):
        begin(*settings)
    assert [step for step, _ in checkpoints(Path("run/checkpoints"))] == [1]
    assert any("checkpoint step-1" in line for line in go_on())
    assert [step for step, _ in checkpoints(Path("run/checkpoints"))] == [6]
    first = looks.seen.index([1])
    assert all(looks.seen[first:]) and [1, 3] in looks.seen
    with RunReader(Path("run")) as run:
        assert [record.step for record in run.steps()] == list(range(6))
