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

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nearpolicy.errors import RunFolderError, UserError, described
from nearpolicy.learner import adapters
from nearpolicy.learner.export import save_model, write_one_file
from nearpolicy.learner.ranks import ALONE, Together
from nearpolicy.learner.state_files import DIGEST, STATE, read_state, with_pieces, write_state
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.loading import load_policy
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.pieces import fill
from nearpolicy.models.weights import digests, fingerprint, named_weights, require_fit

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
    """Put weights that `save_weights` wrote into a learner whose policy began from the same model."""
    policy, ranks = learner.policy, learner.ranks
    if isinstance(policy, LoraPolicy):
        with ranks.agreement("saved weights"):
            policy.load_factors(load_file(path))
        return
    with ranks.agreement("saved weights"):
        tensors = load_file(path) if ranks.rank == 0 else {}
        if ranks.rank == 0:
            require_fit(policy.model, tensors)
    _give(learner, tensors)


def _give(learner: PolicyLearner, weights: Mapping[str, Tensor]) -> None:
    """Rank 0's whole ``weights`` to all ranks, one by one; each takes its piece."""
    with learner.ranks.together("weights from rank 0"):
        for name, own in named_weights(learner.policy.model).items():
            fill(own, learner.ranks.from_first("weights from rank 0", weights.get(name), own))


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
    as it was, if it cannot be read, or was changed. ``expected``: fingerprints under which these weights were
    published, one for each lineage; those of an adapter are compared by who knows the base."""
    ranks, adapted = learner.ranks, isinstance(learner.policy, LoraPolicy)
    with ranks.together("load_checkpoint"):
        stage = partial(_stage, ranks, partial(_reading, checkpoint))
        with stage():
            found, weights = read_state(checkpoint, ranks), {}
            if not adapted and ranks.rank == 0:  # the others get theirs from there
                weights = _weights_of(checkpoint, learner, found, expected)
        state = with_pieces(found, checkpoint, ranks, learner.sharding, stage)
        if not adapted:
            _give(learner, weights)
        learner.load_state(state)


@contextlib.contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError, SafetensorError) as error:
        raise RunFolderError(f"checkpoint {checkpoint} cannot be read: {described(error)}") from error
    except UserError as error:
        if str(checkpoint) in str(error):
            raise
        raise RunFolderError(f"checkpoint {checkpoint} cannot be read: {described(error)}") from error


def _weights_of(
    checkpoint: Path, learner: PolicyLearner, state: Mapping[str, Any], expected: Collection[str]
) -> dict[str, Tensor]:
    own = named_weights(learner.policy.model)
    device = learner.policy.device if learner.ranks is ALONE else "cpu"
    dtype = next(learner.policy.parameters()).dtype
    weights = load_policy(checkpoint, dtype, device, known_to_fit=True).weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in own.items()}:
        raise RunFolderError(f"checkpoint {checkpoint} is of another model: its tensors have other names or shapes")
    if expected and (found := fingerprint(digests(weights))) not in expected:
        raise RunFolderError(
            f"checkpoint {checkpoint} was changed: its weights have the fingerprint {found}, and version "
            f"{state.get('state', state)['version']} was published with {' or '.join(expected)}"
        )
    return weights


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
