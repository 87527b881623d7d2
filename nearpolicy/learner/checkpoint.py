"""Checkpoints: an ordinary Hugging Face folder, with the full training state beside it (`state_files`), and an adapter,
if one is trained, in a folder inside (the weights contain it).

A checkpoint is written under another name, made durable, and renamed: whatever happens, a folder called ``step-N`` is
complete. Older ones are removed only after that.

All ranks of a learner call each function here together, with one folder that all of them see. Rank 0 decides what a
folder is called; what fails on one rank is raised by all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nearpolicy.errors import RunFolderError, UserError, described
from nearpolicy.learner import adapters
from nearpolicy.learner.export import save_model, write_one_file
from nearpolicy.learner.filling import Rows, fill_rows
from nearpolicy.learner.ranks import ALONE, Together
from nearpolicy.learner.state_files import DIGEST, STATE, read_state, with_pieces, write_state
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.loading import load_policy, outline_policy
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.pieces import local
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.weights import digest, digests, fingerprint, named_weights, require_fit

_NAME = re.compile(r"step-(0|[1-9]\d*)")
_ASIDE = re.compile(r"\.(step-\d+)\.(tmp|old)")
"""A draft, or what is being removed; a checkpoint that another one of its step is about to replace."""


class SavesItself(Protocol):
    """A tokenizer, say."""

    def save_pretrained(self, folder: str, /) -> Any: ...


def save_checkpoint(
    learner: PolicyLearner,
    folder: Path,
    *,
    beside: Iterable[SavesItself] = (),
    keep_last: int,
    keep_best: int = 0,
    scores: Mapping[int, float] | None = None,
) -> Path:
    """Write ``folder/step-N`` and then drop all but the last ``keep_last`` and the best ``keep_best`` by their
    ``scores``. Foreign files are never touched."""
    target = folder / f"step-{learner.version}"
    with learner.ranks.together("save_checkpoint"):
        try:
            _write(learner, target, beside)
        finally:
            if learner.ranks.rank == 0:
                _clear_drafts(folder)
        with learner.ranks.agreement("checkpoints that are not kept"):
            if learner.ranks.rank == 0:
                _drop(folder, scores or {}, keep_last, keep_best)
    return target


def _write(learner: PolicyLearner, target: Path, beside: Iterable[SavesItself]) -> None:
    folder, draft = target.parent, target.with_name(f".{target.name}.tmp")
    policy, ranks, state = learner.policy, learner.ranks, learner.state()
    first = ranks.rank == 0
    stage = partial(_stage, ranks, partial(_writing, target))
    with stage():
        if first:
            _clear_drafts(folder)
            draft.mkdir(parents=True)
    with stage():
        if ranks is ALONE:
            policy.save_pretrained(draft)
        else:
            save_model(policy, draft, ranks)
    with stage():
        if first and isinstance(policy, LoraPolicy):
            adapters.save_adapter(policy, draft / adapters.FOLDER)
        for part in beside if first else ():
            part.save_pretrained(str(draft))
    write_state(state, draft, ranks, stage)
    with stage():
        for file in draft.rglob("*") if first else ():
            _sync(file)
        if first and target.exists():
            target.rename(folder / f".{target.name}.old")
        if first:
            draft.rename(target)
            _sync(folder)


@contextlib.contextmanager
def _stage(ranks: Together, naming: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """A part of saving or loading, at the end of which ranks agree; its errors are named by ``naming``."""
    with ranks.agreement("a checkpoint"), naming():
        yield


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these, by who meets it
        raise RunFolderError(
            f"checkpoint {target} cannot be written: {error}. Earlier checkpoints are untouched; free some space"
        ) from error


def _drop(folder: Path, scores: Mapping[int, float], keep_last: int, keep_best: int) -> None:
    found = dict(checkpoints(folder))
    for version in found.keys() - kept(found, scores, last=keep_last, best=keep_best):
        _remove(found[version])


def kept(versions: Iterable[int], scores: Mapping[int, float], *, last: int, best: int) -> set[int]:
    """The ``last`` versions, and the ``best`` of those that have a score; of equal ones the later."""
    ordered = sorted(versions)
    ranked = sorted((v for v in ordered if v in scores), key=lambda version: (scores[version], version))
    return {*ordered[-last:], *(ranked[-best:] if best else [])}


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by step, oldest first; folders of that name with none of our files in them are foreign."""
    if not folder.is_dir():
        return []
    found = {}
    for path in sorted(folder.iterdir()):  # those set aside first, so that one in its place comes after
        aside = _ASIDE.fullmatch(path.name)
        name = _NAME.fullmatch(aside[1] if aside and aside[2] == "old" else path.name)
        if name and ((path / STATE).exists() or (path / DIGEST).exists()):
            found[int(name[1])] = path
    return sorted(found.items())


def _remove(checkpoint: Path) -> None:
    """At once for everybody who looks, though it takes a while. A link to somewhere else is foreign."""
    if checkpoint.is_symlink():
        return
    aside = checkpoint.with_name(f".{checkpoint.name}.tmp")
    try:
        checkpoint.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise RunFolderError(
            f"checkpoint {checkpoint} is not kept, and cannot be removed: {error}. The newest one is complete; remove "
            "this one, or raise checkpoint.keep_last"
        ) from error


def save_weights(learner: PolicyLearner, path: Path) -> None:
    """The weights alone, under canonical names, whole or not at all; of a policy with an adapter A and B."""
    draft, policy, ranks = path.with_suffix(".tmp"), learner.policy, learner.ranks
    if ranks is not ALONE and not isinstance(policy, LoraPolicy):
        _save_pieces(learner, path)
        return
    with ranks.agreement("saved weights"):
        if ranks.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = policy.factors() if isinstance(policy, LoraPolicy) else policy.weights()
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
            draft.rename(path)


def _save_pieces(learner: PolicyLearner, path: Path) -> None:
    """Put together one by one on all ranks, written by rank 0."""
    draft, ranks = path.with_suffix(".tmp"), learner.ranks
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in learner.policy.weights().items()}
    with ranks.together("save_weights"):
        tensors = learner.policy.whole_weights()
        with ranks.agreement("saved weights"):
            try:
                if ranks.rank == 0:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_one_file(draft, layout, tensors)
                    draft.rename(path)
            finally:
                for _ in tensors:  # what is left of them takes all ranks
                    pass


def load_saved_weights(learner: PolicyLearner, path: Path) -> None:
    """Put weights that `save_weights` wrote into a learner whose policy began from the same model. Each rank reads what
    it holds."""
    policy, ranks = learner.policy, learner.ranks
    with ranks.agreement("saved weights"):
        if isinstance(policy, LoraPolicy):
            policy.load_factors(load_file(path))
            return
        with safe_open(path, framework="pt", device="cpu", backend="pread") as file:
            lying = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            require_fit(policy.model, {n: torch.empty(s.get_shape(), device="meta") for n, s in lying.items()})

            def rows(name: str, begin: int = 0, end: int | None = None) -> Tensor:
                return lying[name][...] if end is None else lying[name][begin:end]

            for name, own in named_weights(policy.model).items():
                if local(own).numel():  # there may be more ranks than rows
                    fill_rows(own, name, rows)


def _clear_drafts(folder: Path) -> None:
    """Remove what a save that did not come to its end has left, and put back what it was about to replace."""
    for path in folder.glob(".step-*") if folder.is_dir() else ():
        aside = _ASIDE.fullmatch(path.name)
        if aside and aside[2] == "old" and not (folder / aside[1]).exists():
            with contextlib.suppress(OSError):  # it is found where it is, too
                path.rename(folder / aside[1])
        elif aside:
            shutil.rmtree(path, ignore_errors=True)


def load_state(learner: PolicyLearner, checkpoint: Path) -> None:
    """Training state of a checkpoint whose weights the learner's model already holds; with an adapter, which the state
    contains, the model is the one that training began from."""
    with learner.ranks.together("load_state"):
        stage = partial(learner.ranks.agreement, "a training state")
        with stage():
            found = read_state(checkpoint, learner.ranks)
        learner.load_state(with_pieces(found, checkpoint, learner.ranks, learner.sharding, stage))


def load_checkpoint(learner: PolicyLearner, checkpoint: Path, *, expected: Collection[str] = ()) -> None:
    """Weights and training state of a checkpoint into a learner made for the same run; `RunFolderError`, and a learner
    as it was, if it cannot be read, or was changed. No rank has it whole: they read all of it once, a tensor at a time,
    before each reads its own pieces. ``expected``: fingerprints under which these weights were
    published, one for each lineage; those of an adapter are compared by who knows the base."""
    ranks, adapted = learner.ranks, isinstance(learner.policy, LoraPolicy)
    with ranks.together("load_checkpoint"):
        stage = partial(_stage, ranks, partial(_reading, checkpoint))
        with stage():
            found = read_state(checkpoint, ranks)
            stored = None if adapted else _stored(checkpoint, learner)
        if stored is not None and (expected or ranks is not ALONE):
            shown = _digests(stored, ranks, stage)
            with stage():
                _require_published(checkpoint, shown, found, expected)
        state = with_pieces(found, checkpoint, ranks, learner.sharding, stage)
        if stored is not None:
            with stage():
                rows = _rows_of(stored)
                for name, own in named_weights(learner.policy.model).items():
                    fill_rows(own, name, rows)
        learner.load_state(state)


@contextlib.contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError, SafetensorError) as error:
        raise RunFolderError(f"checkpoint {checkpoint} cannot be read: {described(error)}") from error
    except UserError as error:
        if isinstance(error, RunFolderError) and str(checkpoint) in str(error):
            raise
        raise RunFolderError(f"checkpoint {checkpoint} cannot be read: {described(error)}") from error


def _stored(checkpoint: Path, learner: PolicyLearner) -> PolicyModel:
    """The model of a checkpoint, whose tensors have the names and shapes of the learner's; of several ranks without its
    weights, which they read as they need them."""
    alone, dtype = learner.ranks is ALONE, next(learner.policy.parameters()).dtype
    load, device = (load_policy, learner.policy.device) if alone else (outline_policy, "cpu")
    stored = load(checkpoint, dtype, device, known_to_fit=True)
    theirs, ours = (
        {name: tuple(tensor.shape) for name, tensor in named_weights(model).items()}
        for model in (stored.model, learner.policy.model)
    )
    if theirs != ours:
        raise RunFolderError(f"checkpoint {checkpoint} is of another model: its tensors have other names or shapes")
    return stored


def _rows_of(stored: PolicyModel) -> Rows:
    if stored.files is not None:
        return stored.files.rows
    weights = stored.weights()
    return lambda name, begin=0, end=None: weights[name] if end is None else weights[name][begin:end]


def _digests(stored: PolicyModel, ranks: Together, stage: Callable[[], Any]) -> dict[str, str]:
    """Of all tensors; each rank reads some of them, one after another."""
    names, own = list(named_weights(stored.model)), {}
    with stage():
        if ranks is ALONE:
            own = digests(stored.weights())
        else:
            rows = _rows_of(stored)
            own = {name: digest(rows(name)) for name in names[ranks.rank :: ranks.size]}
    found: dict[str, str] = {}
    for of_rank in ranks.exchange("digests of a checkpoint", own):
        found |= of_rank
    return found


def _require_published(
    checkpoint: Path, shown: Mapping[str, str], state: Mapping[str, Any], expected: Collection[str]
) -> None:
    if expected and (found := fingerprint(shown)) not in expected:
        raise RunFolderError(
            f"checkpoint {checkpoint} was changed: its weights have the fingerprint {found}, and version "
            f"{state.get('state', state)['version']} was published with {' or '.join(expected)}"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
