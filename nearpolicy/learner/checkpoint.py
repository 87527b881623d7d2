"""Checkpoints: an ordinary Hugging Face folder, with the full training state in one file beside it, and an adapter, if
one is trained, in a folder inside (the weights contain it).

A checkpoint is written under another name, made durable, and renamed: whatever happens, a folder called ``step-N`` is
complete. Older ones are removed only after that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nearpolicy.errors import RunFolderError, UserError, described
from nearpolicy.learner import adapters
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.loading import load_policy
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.weights import digests, fingerprint, load_weights

STATE, DIGEST = "training_state.pt", "training_state.xxh3"
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
    draft = folder / f".{target.name}.tmp"
    state = learner.state()
    _clear_drafts(folder)
    try:
        draft.mkdir(parents=True)
        learner.policy.save_pretrained(draft)
        if isinstance(learner.policy, LoraPolicy):
            adapters.save_adapter(learner.policy, draft / adapters.FOLDER)
        for part in beside:
            part.save_pretrained(str(draft))
        torch.save(state, draft / STATE)
        (draft / DIGEST).write_text(_digest(draft / STATE))
        for file in draft.rglob("*"):
            _sync(file)
        if target.exists():
            target.rename(folder / f".{target.name}.old")
        draft.rename(target)
        _sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these, by who meets it
        raise RunFolderError(
            f"checkpoint {target} cannot be written: {error}. Earlier checkpoints are untouched; free some space"
        ) from error
    finally:
        _clear_drafts(folder)
    found = dict(checkpoints(folder))
    for version in found.keys() - kept(found, scores or {}, last=keep_last, best=keep_best):
        _remove(found[version])
    return target


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
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, policy = path.with_suffix(".tmp"), learner.policy
    tensors = policy.factors() if isinstance(policy, LoraPolicy) else policy.weights()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
    draft.rename(path)


def load_saved_weights(learner: PolicyLearner, path: Path) -> None:
    """Put weights that `save_weights` wrote into a learner whose policy began from the same model."""
    tensors, policy = load_file(path), learner.policy
    if isinstance(policy, LoraPolicy):
        policy.load_factors(tensors)
    else:
        load_weights(policy.model, tensors)


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
    learner.load_state(torch.load(checkpoint / STATE, weights_only=True))


def load_checkpoint(learner: PolicyLearner, checkpoint: Path, *, expected: Collection[str] = ()) -> None:
    """Weights and training state of a checkpoint into a learner made for the same run; `RunFolderError`, and a learner
    as it was, if it cannot be read, or was changed. ``expected``: fingerprints under which these weights were
    published, one for each lineage; those of an adapter are compared by who knows the base."""
    own, adapted = learner.policy.weights(), isinstance(learner.policy, LoraPolicy)
    try:
        if (checkpoint / DIGEST).exists() and _digest(checkpoint / STATE) != (checkpoint / DIGEST).read_text():
            raise RunFolderError(f"{STATE} is not what was written")
        state, weights = torch.load(checkpoint / STATE, weights_only=True), {}
        if not adapted:
            dtype = next(learner.policy.parameters()).dtype
            weights = load_policy(checkpoint, dtype, learner.policy.device, known_to_fit=True).weights()
    except (
        OSError,
        RuntimeError,
        ValueError,
        LookupError,
        EOFError,
        UnpicklingError,
        SafetensorError,
        UserError,
    ) as error:
        raise RunFolderError(f"checkpoint {checkpoint} cannot be read: {described(error)}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if not adapted and shapes != {name: tuple(tensor.shape) for name, tensor in own.items()}:
        raise RunFolderError(f"checkpoint {checkpoint} is of another model: its tensors have other names or shapes")
    if not adapted and expected and (found := fingerprint(digests(weights))) not in expected:
        raise RunFolderError(
            f"checkpoint {checkpoint} was changed: its weights have the fingerprint {found}, and version "
            f"{state['version']} was published with {' or '.join(expected)}"
        )
    if not adapted:
        load_weights(learner.policy.model, weights)
    learner.load_state(state)


def _digest(file: Path) -> str:
    import xxhash

    with file.open("rb") as opened:
        hasher = xxhash.xxh3_128()
        while part := opened.read(1 << 24):
            hasher.update(part)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
