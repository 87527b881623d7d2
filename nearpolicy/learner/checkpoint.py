"""Checkpoints: an ordinary Hugging Face folder, with the full training state in one file beside it.

A checkpoint is written under another name, made durable, and renamed: whatever happens, a folder called ``step-N`` is
complete. Older ones are removed only after that.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nearpolicy.errors import RunFolderError
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.weights import named_weights

STATE = "training_state.pt"
_NAME = re.compile(r"step-(\d+)")
_DRAFT = re.compile(r"\.step-\d+\.(tmp|old)")


class SavesItself(Protocol):
    """A tokenizer, say."""

    def save_pretrained(self, folder: str, /) -> Any: ...


def save_checkpoint(
    learner: PolicyLearner, folder: Path, *, beside: Iterable[SavesItself] = (), keep_last: int
) -> Path:
    """Write ``folder/step-N`` and then drop all but the last ``keep_last``. Foreign files are never touched."""
    target = folder / f"step-{learner.version}"
    draft = folder / f".{target.name}.tmp"
    state = learner.state()
    _clear_drafts(folder)
    try:
        draft.mkdir(parents=True)
        learner.policy.model.save_pretrained(draft)
        for part in beside:
            part.save_pretrained(str(draft))
        torch.save(state, draft / STATE)
        for file in draft.iterdir():
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
    for _, old in checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by step, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def save_weights(learner: PolicyLearner, path: Path) -> None:
    """The weights alone, under canonical names, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in named_weights(learner.policy.model).items()}, draft)
    draft.rename(path)


def _clear_drafts(folder: Path) -> None:
    """Remove what a save that did not come to its end, or that replaced a checkpoint, has left."""
    for path in folder.glob(".step-*") if folder.is_dir() else ():
        if _DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def load_state(learner: PolicyLearner, checkpoint: Path) -> None:
    """Training state of a checkpoint whose weights the learner's model already holds."""
    learner.load_state(torch.load(checkpoint / STATE, weights_only=True))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
