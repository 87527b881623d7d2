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

from nearpolicy.errors import RunFolderError
from nearpolicy.learner.step import PolicyLearner

STATE = "training_state.pt"
_NAME = re.compile(r"step-(\d+)")


class SavesItself(Protocol):
    """A tokenizer, say."""

    def save_pretrained(self, folder: str, /) -> Any: ...


def save_checkpoint(learner: PolicyLearner, folder: Path, *, beside: Iterable[SavesItself] = (), keep_last: int) -> Path:
    """Write ``folder/step-N`` and then drop all but the last ``keep_last``. Foreign files are never touched."""
    target = folder / f"step-{learner.version}"
    draft = folder / f".{target.name}.tmp"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        learner.policy.model.save_pretrained(draft)
        for part in beside:
            part.save_pretrained(str(draft))
        torch.save(learner.state(), draft / STATE)
        for file in draft.iterdir():
            _sync(file)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunFolderError(
            f"checkpoint {target} cannot be written: {error}. Earlier checkpoints are untouched; free some space"
        ) from error
    for _, old in checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by step, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def load_state(learner: PolicyLearner, checkpoint: Path) -> None:
    """Training state of a checkpoint whose weights the learner's model already holds."""
    learner.load_state(torch.load(checkpoint / STATE, weights_only=True))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
