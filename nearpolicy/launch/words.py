"""How commands say things to people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nearpolicy.visible import visible


def count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``1,600 samples``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def place(path: Path) -> str:
    """A path as people type it: relative where it lies below the working folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def quoted(text: str) -> str:
    """On one line, in quotes, so that one sees where it begins, where it ends and what is in it."""
    return json.dumps(text, ensure_ascii=False)


def section(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """Print labelled lines under a title; nothing if there are none."""
    from rich.console import Console
    from rich.text import Text

    console, lines = Console(highlight=False, soft_wrap=True), list(lines)
    if lines:
        console.print(Text(title, style="bold"))
    for label, value in lines:
        console.print(Text.assemble((f"  {label:<24}", "dim"), visible(value)))


def expected_answer(task: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
    """The right answer in a row of a task, as the task or a reward names its column; None if none has one.

    ``task``: an entry of a recipe's `tasks`, as plain data.
    """
    named = [task.get("answer_column"), *(reward.get("answer_column") for reward in task.get("rewards", ()))]
    for name in [*named, "answer"]:
        if name is not None and columns.get(name) is not None:
            return str(columns[name])
    return None
