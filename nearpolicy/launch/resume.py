"""What a run is taken up with: its own recipe, but for settings that do not change what is learned."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nearpolicy.config import RunConfig, config_from_dict
from nearpolicy.errors import ConfigError, DataError, RunFolderError
from nearpolicy.records import Position, Prompt
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.payload import encode_json
from nearpolicy.store.reader import RunReader

if TYPE_CHECKING:
    from nearpolicy.tasks.mixture import Mixture

MAY_CHANGE = (
    "runtime", "generator.replicas", "generator.most_replicas", "learner.ranks", "learner.replicas", "learner.offload",
    "run.steps", "run.keep_versions", "checkpoint", "evaluation", "telemetry", "monitors", "store", "verifier.workers",
    "generator.threads", "learner.threads", "queue.rollout_timeout_s", "queue.rollout_retries", "queue.stall_timeout_s",
    "queue.max_rounds", "sync.timeout_s", "sync.transport", "sync.path", "sync.delta", "sync.anchor_every",
    "sync.bucket_mb",
)  # fmt: skip
"""Keys, and sections, that may differ when a run is taken up again."""


def resumed_config(folder: RunFolder, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe that a run was begun with, and ``overrides``; `ConfigError` names every key that may not change."""
    with RunReader(folder.path) as run:
        began = run.config
    if not isinstance(began, dict):
        raise RunFolderError(f"{folder.path} has no recipe in its store: nobody can say what it was doing")
    where = f"the recipe of {folder.path}"
    before = config_from_dict(began, where=where)
    config = config_from_dict(copy.deepcopy(began), where=where, overrides=overrides)
    changed = [
        f"{key} was {old!r} and is {new!r} now"
        for key, old, new in differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
        if not _may_change(key)
    ]
    if changed:
        raise ConfigError(
            f"{folder.path} was begun with other settings: {'; '.join(changed)}. A run is taken up as it was; these "
            f"may change: {', '.join(MAY_CHANGE)}. For anything else begin a new run from its checkpoint (model.path)"
        )
    if config.run.steps != before.run.steps and config.learner.lr_schedule != "constant":
        raise ConfigError(
            f"{folder.path} was begun with run.steps={before.run.steps}; with learner.lr_schedule="
            f"{config.learner.lr_schedule} another number would mean other learning rates in the steps that are done. "
            "Leave run.steps as it was"
        )
    return config


def differences(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of every leaf that differs."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), (*path, str(key)))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, (*path, str(place)))
    elif before != after:
        yield ".".join(path), before, after


def _may_change(key: str) -> bool:
    return any(key == each or key.startswith(each + ".") for each in MAY_CHANGE)


def require_same_data(found: Position, mixture: Mixture, folder: RunFolder) -> None:
    """`DataError` if the prompts that the run had asked for are not those of the data now."""
    for admission in found.last_admissions:
        now = mixture.prompt(admission.place)
        if now is None or _said(now) != _said(admission.prompt):
            raise DataError(
                f"the data of {folder.path} has changed: prompt {admission.place} was {admission.prompt.id!r} of task "
                f"{admission.prompt.task!r}, and its text or columns were others. Restore the data, or begin a new run"
            )


def _said(prompt: Prompt) -> bytes:
    """All of a prompt that rewards and models read, as the store has it."""
    return encode_json([prompt.task, prompt.text, prompt.messages, prompt.columns])
