"""A run folder: what lies where, and which folders a run may take.

    runs/demo-3/
        store.sqlite    everything that happened (the writer's lock is store.lock beside it)
        config.yaml     the resolved recipe
        metrics.jsonl   one strict JSON object per line
        trace.json      the time line of the first steps for Perfetto, if telemetry.profile asks for it
        checkpoints/    weights and training state by step
        payloads/       tokens of earlier steps, with store.retention: parquet
        weights/        version-N.safetensors of every published version, with run.keep_versions
        report.html     written on demand
        summary.json    written at the end

The fingerprint of the initial weights is in the store (its note `initial_weights`). A folder is refused before anything
heavy starts: if it cannot be written, or if a run has ever lived in it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearpolicy.errors import RunFolderError
from nearpolicy.store.config import RUN_NAME, RUN_NAME_RULE

SUMMARY_KEYS = ("steps", "wall_s", "peak_memory_mb", "held_out", "ledger", "staleness", "mismatch", "packages")
_TRACES = ("store.sqlite", "metrics.jsonl", "summary.json", "config.yaml", "checkpoints")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder. Making one of these touches nothing."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def store(self) -> Path:
        return self.path / "store.sqlite"

    @property
    def lock(self) -> Path:
        return self.path / "store.lock"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def payloads(self) -> Path:
        return self.path / "payloads"

    def moved_payloads(self, number: int) -> Path:
        return self.payloads / f"{number}.parquet"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` whole or not at all; its keys are `SUMMARY_KEYS`, more are welcome."""
        missing = [key for key in SUMMARY_KEYS if key not in summary]
        if missing:
            raise ValueError(f"the summary of {self.path} lacks {', '.join(missing)}")
        draft = self.summary.with_suffix(".json.tmp")
        draft.write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(self.summary)


def create_run_folder(name: str, *, directory: str | Path | None = None, parent: str | Path = "runs") -> RunFolder:
    """Make the folder of a new run: ``directory`` if given, else the next free ``parent/name-number``."""
    if directory is not None:
        refuse_unusable(directory)
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"run.dir {path} cannot be made: {error}. Choose another run.dir") from error
    else:
        if not RUN_NAME.fullmatch(name):
            raise RunFolderError(f"run.name is {name!r}; {RUN_NAME_RULE}")
        refuse_unusable(parent, may_hold_run=True)
        path = _next_numbered(Path(parent), name)
    return RunFolder(path.resolve())


def refuse_unusable(directory: str | Path, *, may_hold_run: bool = False) -> None:
    """Raise `RunFolderError` if a run could not live in ``directory``. Creates nothing, so that `check` can ask."""
    path = Path(directory)
    try:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    except (OSError, ValueError) as error:  # a name that the file system cannot have
        raise RunFolderError(f"{str(path)[:80]!r} cannot be a run folder: {error}. Choose another run.dir") from None
    if not existing.is_dir():
        raise RunFolderError(f"{path} cannot be a run folder: {existing} is a file. Choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunFolderError(f"{path} cannot be written: {existing} gives no permission. Choose another run.dir")
    found = next((trace for trace in _TRACES if (path / trace).exists()), None)
    if found is not None and not may_hold_run:
        raise RunFolderError(f"{path} already holds a run (it has {found}). Choose another run.dir")


def remove_run(folder: RunFolder, *, made: bool) -> None:
    """Take back the beginning of a run: the folder if the run has ``made`` it, else only what a run writes there."""
    if made:
        shutil.rmtree(folder.path, ignore_errors=True)
        return
    for path in (
        *folder.path.glob("store.*"),
        folder.config,
        folder.metrics,
        folder.report,
        folder.summary,
        folder.trace,
    ):
        with contextlib.suppress(OSError):
            path.unlink()


def _next_numbered(parent: Path, name: str) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(m[1]) for p in parent.iterdir() if (m := re.fullmatch(re.escape(name) + r"-(\d+)", p.name))]
        number = max(taken, default=0) + 1
        while True:  # another run may take the number between looking and making
            path = parent / f"{name}-{number}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        raise RunFolderError(f"no run folder can be made under {parent}: {error}. Choose another run.dir") from error


def finite(value: Any) -> Any:
    """The same value with null for every number that JSON cannot say."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
