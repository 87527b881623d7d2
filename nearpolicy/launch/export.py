"""``nearpolicy export``: a run's record as Parquet or JSONL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nearpolicy.errors import ConfigError
from nearpolicy.launch.words import count


def command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Argument(help="A folder that is not there yet.")],
    form: Annotated[str, typer.Option("--format", help="parquet or jsonl.")] = "parquet",
) -> None:
    """Write a run's record as Parquet or JSONL: all tables without loss, and one file of rollouts for people."""
    from nearpolicy.store.export import FORMATS, export_run

    if form not in FORMATS:
        raise ConfigError(f"--format {form}: a run is exported as {' or '.join(FORMATS)}")
    rows = export_run(run, out, form)
    print(f"{out}: {count(rows['rollouts'], 'rollout')}, {count(rows['steps'], 'step')}")
    print(json.dumps(rows))
