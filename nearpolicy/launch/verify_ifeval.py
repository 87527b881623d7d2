"""``nearpolicy verify ifeval``: a response through the reward `ifeval`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from nearpolicy.errors import DataError
from nearpolicy.launch.verify import Settings, TimeLimit, json_or_file, judged, reward_from, show, text_of


def command(
    instructions: Annotated[
        str,
        typer.Option(
            help="A row with instruction_id_list and kwargs, a mapping of instructions to kwargs, or a list of "
            "instructions without: JSON, or a file with it (JSON lines with --row).",
            show_default=False,
        ),
    ],
    settings: Settings = None,
    response: Annotated[str | None, typer.Option(help="The completion.", show_default=False)] = None,
    response_file: Annotated[
        str | None, typer.Option(help="A file with the completion; - for standard input.", show_default=False)
    ] = None,
    row: Annotated[int | None, typer.Option(help="Which row of a file of JSON lines, from 1.", min=1)] = None,
    timeout_s: TimeLimit = 10.0,
) -> None:
    """Check which instructions a response follows."""
    text = text_of("response", response, response_file)
    reward = reward_from("ifeval", settings or ())
    columns = _instructions(instructions, row, (reward.instructions_column, reward.kwargs_column))
    show(judged(reward, text, columns, timeout_s=timeout_s))


def _instructions(given: str, row: int | None, names: tuple[str, str]) -> dict[str, Any]:
    """The two columns that the reward reads, under their ``names``."""
    text, where = json_or_file(given, "--instructions")
    data = _parsed(text, row, where)
    if isinstance(data, Mapping) and names[0] in data:
        return {name: data.get(name) for name in names}
    if isinstance(data, Mapping):
        return dict(zip(names, (list(data), list(data.values())), strict=True))
    if isinstance(data, list):
        return dict(zip(names, (data, [{} for _ in data]), strict=True))
    raise DataError(
        f"{where}: should be a row with {' and '.join(names)}, a mapping of instructions to kwargs, or a list"
    )


def _parsed(text: str, row: int | None, where: str) -> Any:
    """JSON, or one row of JSON lines."""
    lines = [line for line in text.split("\n") if line.strip()]
    if row is not None and row > len(lines):
        raise DataError(f"{where}: has {len(lines)} rows, so there is no --row {row}")
    try:
        return json.loads(text if row is None else lines[row - 1])
    except (ValueError, RecursionError) as error:
        if row is None and len(lines) > 1 and lines[0].rstrip().endswith("}"):
            raise DataError(f"{where}: has {len(lines)} rows; choose one with --row N, from 1") from None
        raise DataError(f"{where}{'' if row is None else f' row {row}'}: is no JSON ({error})") from None
