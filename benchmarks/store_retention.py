"""How large a run's record grows under each `store.retention`; part of `python -m benchmarks.store`.

Steps of 8 groups of 8 rollouts x 100 tokens, a checkpoint every 10 steps of which the last is kept, and
`store.retention_steps: 10`. Sizes in MiB when the run has ended; `database_half` is the database at half of the steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nearpolicy.records import Batch, Fate, Group, Row, StepReport
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.retention import Retention
from nearpolicy.store.writer import SqliteStore

PER_STEP, EVERY = 8, 10


def sizes(base: Path, steps: int) -> dict[str, dict[str, float]]:
    return {how: _size(base / how, how, steps) for how in ("keep", "parquet", "drop")}


def _size(path: Path, how: Any, steps: int) -> dict[str, float]:
    from benchmarks.store import a_group

    folder, half = create_run_folder("", directory=path), 0.0
    keeps = None if how == "keep" else Retention(how, EVERY)
    with SqliteStore.create(folder, config={}, retention=keeps) as store:
        for step in range(steps):
            _tell(store, step, [a_group(PER_STEP * step + place) for place in range(PER_STEP)])
            if (step + 1) % EVERY == 0:
                store.flush()
                store.checkpointed(step + 1)
            if step + 1 == steps // 2:
                half = _database(folder)
    files = sum(file.stat().st_size for file in folder.payloads.glob("*")) if folder.payloads.exists() else 0
    return {"database_half": half, "database": _database(folder), "files": round(files / 2**20, 1)}


def _database(folder: RunFolder) -> float:
    with RunReader(folder.path) as run:
        return round(run.query("PRAGMA page_count")[0][0] * run.query("PRAGMA page_size")[0][0] / 2**20, 1)


def _tell(store: SqliteStore, step: int, groups: list[Group]) -> None:
    rows = [
        Row(
            group=group.index,
            sample=rollout.sample,
            segment=segment,
            trained=segment.mask,
            advantages=np.full(len(segment.token_ids), 0.5),
        )
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
    ]
    fates = {(g.index, r.sample): {Fate.TRAINED: r.num_sampled} for g in groups for r in g.rollouts}
    batch = Batch(step=step, places=PER_STEP, groups=tuple(groups), rows=tuple(rows))
    store.consumed(batch, StepReport(version=step + 1, updates=step + 1, metrics={}), fates)
