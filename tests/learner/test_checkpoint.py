"""There is always one complete checkpoint; it is an ordinary model folder, and training goes on from it bit for bit."""

from __future__ import annotations

import re
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import EXACT, batch_of, learner, model_folder, random_rows, weights

from nearpolicy.errors import RunFolderError, UserError
from nearpolicy.learner import checkpoint as checkpoint_module
from nearpolicy.learner.checkpoint import checkpoints, load_checkpoint, load_state, save_checkpoint
from nearpolicy.learner.config import CriticConfig
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.loading import load_policy
from nearpolicy.models.tokenizer import load_tokenizer
from nearpolicy.models.value import ValueModel
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Rollout


def trained(steps: int, own=None, **options):
    own = own or learner(**options)
    for step in range(own.version, steps):
        own.step(batch_of(random_rows(step, groups=2), step=step))
    return own


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_an_ordinary_model_with_the_same_logits(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = trained(1)
    path = save_checkpoint(own, tmp_path, beside=[load_tokenizer("bytes")], keep_last=1)
    assert path == tmp_path / "step-1"
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert {n: p.dtype for n, p in loaded.named_parameters()}.popitem()[1] == torch.float32
    ids = AutoTokenizer.from_pretrained(path)("2 + 2 =", return_tensors="pt").input_ids
    rows = random_rows(5, groups=1, size=1)
    with torch.no_grad():
        logits = loaded(ids).logits
        again = load_policy(path).model
        for parameter, saved in zip(own.policy.model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(parameter, saved)
        found = torch.log_softmax(loaded(torch.tensor(rows[0].segment.context_ids[None].astype("int64"))).logits, -1)
    first = int(rows[0].segment.token_ids[0])
    assert float(found[0, -1, first]) == pytest.approx(own.annotate(rows)[0][0], abs=1e-5)
    assert logits.shape[:2] == ids.shape
    assert again.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(tmp_path, dtype):
    options = {"dtype": dtype, "num_iterations": 2, "warmup_steps": 3, "lr_schedule": "cosine", "total_steps": 5}
    at_once = trained(5, **options)
    first = trained(2, **options)
    path = save_checkpoint(first, tmp_path, keep_last=1)
    second = learner(folder=path, **options)
    load_state(second, path)
    assert (second.version, second.updates) == (2, 4)
    trained(5, second)
    assert torch.equal(weights(second.policy), weights(at_once.policy))
    assert second.weights(None).record == at_once.weights(None).record
    masters = [own.optimizer.state_dict()["masters"] for own in (second, at_once)]
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))


GAE = ObjectiveConfig(advantage="gae", gae_lambda=0.95)


def with_critic(folder: Path | None = None, **options) -> PolicyLearner:
    plain = learner(folder=folder, objective=GAE, **options)
    return PolicyLearner(
        plain.policy,
        plain.objective,
        plain.config,
        EXACT,
        temperature=1.0,
        total_steps=5,
        value_model=ValueModel(load_policy(folder or model_folder(), known_to_fit=True)),
        critic=CriticConfig(learning_rate=2e-3, pretraining_steps=1),
    )


def trained_with_critic(steps: int, own: PolicyLearner) -> PolicyLearner:
    for step in range(own.version, steps):
        rows = random_rows(step, groups=2)
        plain = batch_of(rows, step=step)
        groups = [
            replace(
                group,
                rollouts=tuple(
                    Rollout(sample=row.sample, segments=(row.segment,), text="", numerics="exact")
                    for row in rows
                    if row.group == group.index
                ),
                verdicts=({},) * 4,
                rewards=(1.0, 0.0, 0.25, -1.0),
            )
            for group in plain.groups
        ]
        own.step(replace(plain, groups=tuple(groups)))
    return own


def test_a_critic_goes_on_bit_for_bit_from_a_checkpoint(tmp_path):
    options = {"num_iterations": 2, "warmup_steps": 2, "lr_schedule": "linear", "total_steps": 5}
    at_once = trained_with_critic(4, with_critic(**options))
    first = trained_with_critic(2, with_critic(**options))
    path = save_checkpoint(first, tmp_path, keep_last=1)
    second = with_critic(path, **options)
    assert second.critic.model.decoder is not second.policy.model.get_decoder()
    load_state(second, path)
    trained_with_critic(4, second)
    for mine, right in ((second.policy, at_once.policy), (second.critic.model, at_once.critic.model)):
        assert torch.equal(weights(mine), weights(right))
    assert not torch.equal(weights(second.critic.model.decoder), weights(second.policy.model.get_decoder()))
    assert names(path) == names(save_checkpoint(trained(1), tmp_path / "plain", keep_last=1))  # no file more


def test_a_checkpoint_and_a_recipe_that_disagree_about_the_critic_are_refused(tmp_path):
    path = save_checkpoint(trained_with_critic(1, with_critic()), tmp_path / "with", keep_last=1)
    with pytest.raises(UserError, match=r"holds a critic and the recipe has none.*objective\.advantage=gae"):
        load_state(learner(folder=path), path)
    path = save_checkpoint(trained(1), tmp_path / "without", keep_last=1)
    with pytest.raises(UserError, match="has a critic and the checkpoint holds none"):
        load_state(with_critic(path), path)


def test_a_resumed_run_without_its_moments_would_differ(tmp_path):
    at_once, first = trained(3), trained(2)
    path = save_checkpoint(first, tmp_path, keep_last=1)
    forgetful = learner(folder=path)
    forgetful.version = 2
    assert not torch.equal(weights(trained(3, forgetful).policy), weights(at_once.policy))


class Fails:
    """A part beside the model whose disk is full."""

    def save_pretrained(self, folder: str) -> None:
        raise OSError(28, "No space left on device")


class LimitedDisk:
    """Files of this process cannot grow beyond ``size`` bytes: a full disk, as any library meets it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)


@pytest.mark.parametrize("room", ["for nothing", "for the weights only"])
def test_a_save_that_runs_out_of_disk_says_so_and_leaves_the_earlier_one_loadable(tmp_path, room):
    own = trained(1)
    earlier = save_checkpoint(own, tmp_path, keep_last=1)
    weights_size = (earlier / "model.safetensors").stat().st_size
    trained(2, own)
    with LimitedDisk(1024 if room == "for nothing" else weights_size), pytest.raises(RunFolderError) as raised:
        save_checkpoint(own, tmp_path, keep_last=1)
    assert re.search(r"checkpoint .*step-2 cannot be written: .*free some space", str(raised.value), re.S)
    assert names(tmp_path) == ["step-1"]
    again = learner(folder=earlier)
    load_state(again, earlier)
    assert torch.equal(weights(trained(2, again).policy), weights(own.policy))
    assert save_checkpoint(own, tmp_path, keep_last=1) == tmp_path / "step-2"  # and with room again it works
    assert names(tmp_path) == ["step-2"]


def test_a_part_that_cannot_be_saved_leaves_the_earlier_checkpoint(tmp_path):
    own = trained(1)
    save_checkpoint(own, tmp_path, keep_last=1)
    trained(2, own)
    with pytest.raises(RunFolderError, match="No space left on device"):
        save_checkpoint(own, tmp_path, beside=[Fails()], keep_last=1)
    assert [step for step, _ in checkpoints(tmp_path)] == [1]
    assert names(tmp_path) == ["step-1"]


def test_the_last_ones_are_kept_and_foreign_files_never_touched(tmp_path):
    foreign = ["notes.txt", "step-best", "step-1.bak", "old-step-1"]
    (tmp_path / "notes.txt").write_text("mine")
    for name in foreign[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("mine")
    own = learner()
    for step in (1, 2, 10, 11):
        own.version = step
        save_checkpoint(own, tmp_path, keep_last=2)
        assert [s for s, _ in checkpoints(tmp_path)][-1] == step
    assert names(tmp_path) == sorted([*foreign, "step-10", "step-11"])


def test_saving_a_step_again_replaces_it(tmp_path):
    own = trained(1)
    path = save_checkpoint(own, tmp_path, keep_last=1)
    (path / "leftover").touch()
    before = (path / "training_state.pt").stat().st_ino
    assert save_checkpoint(own, tmp_path, keep_last=1) == path
    assert not (path / "leftover").exists()
    assert (path / "training_state.pt").stat().st_ino != before
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("step", [1, 3])
def test_a_save_that_was_killed_half_way_is_not_taken_for_a_checkpoint_and_is_cleared_away(tmp_path, step):
    draft = tmp_path / f".step-{step}.tmp"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path) == []
    save_checkpoint(trained(1), tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-1"]


def test_folders_files_and_links_that_only_look_like_checkpoints_are_never_touched(tmp_path):
    elsewhere = save_checkpoint(trained(1), tmp_path / "elsewhere", keep_last=1)
    folder = tmp_path / "checkpoints"
    for name in ("step-3", "step-007"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_text("mine")
    (folder / "step-4").write_text("mine")
    (folder / "step-1").symlink_to(elsewhere)
    assert [step for step, _ in checkpoints(folder)] == [1]  # what a person has put elsewhere can still be read
    own = learner()
    for own.version in (8, 9):
        save_checkpoint(own, folder, keep_last=1)
    assert names(folder) == ["step-007", "step-1", "step-3", "step-4", "step-9"]
    assert (elsewhere / "model.safetensors").exists()


class Killed(BaseException):
    """As `kill -9` does, nothing behind it is done."""


@pytest.mark.parametrize("end", [Killed(), OSError(5, "Input/output error")])
def test_a_save_that_replaces_its_own_step_leaves_one_of_the_two_at_every_moment(tmp_path, monkeypatch, end):
    own = trained(1)
    save_checkpoint(own, tmp_path, keep_last=1)
    rename, clear = Path.rename, checkpoint_module._clear_drafts

    def renamed(path: Path, target: Path) -> Path:
        if path.name == ".step-1.tmp":
            if isinstance(end, Killed):
                monkeypatch.setattr(checkpoint_module, "_clear_drafts", lambda folder: None)
            raise end
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises((Killed, RunFolderError)):
        save_checkpoint(own, tmp_path, keep_last=1)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(checkpoint_module, "_clear_drafts", clear)
    [(step, path)] = checkpoints(tmp_path)
    again = learner()
    load_checkpoint(again, path)
    assert step == again.version == 1
    trained(2, own)
    save_checkpoint(own, tmp_path, keep_last=2)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_checkpoint_that_is_not_kept_is_gone_at_once_or_named(tmp_path, monkeypatch):
    own = trained(1)
    save_checkpoint(own, tmp_path, keep_last=1)
    trained(2, own)
    remove = shutil.rmtree

    def fails(path, **options):
        if not options:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fails)
    with pytest.raises(RunFolderError, match=r"step-1 is not kept, and cannot be removed: .*Permission denied"):
        save_checkpoint(own, tmp_path, keep_last=1)
    assert [step for step, _ in checkpoints(tmp_path)] == [2]
    monkeypatch.setattr(shutil, "rmtree", remove)
    save_checkpoint(own, tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-2"]


def test_no_folder_means_no_checkpoint(tmp_path):
    assert checkpoints(tmp_path / "none") == []
