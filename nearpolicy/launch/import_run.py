"""``nearpolicy import``: a run folder out of what `nearpolicy export` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nearpolicy.launch.words import count


def command(
    source: Annotated[Path, typer.Argument(help="A folder that `nearpolicy export` wrote.")],
    run: Annotated[Path, typer.Argument(help="The run folder to make.")],
) -> None:
    """Make a run folder of an exported record: to read, inspect, replay and compare."""
    from nearpolicy.store.export import import_run

    rows = import_run(source, run)
    print(f"{run}: {count(rows['rollouts'], 'rollout')}, {count(rows['steps'], 'step')}")
    print(json.dumps(rows))
