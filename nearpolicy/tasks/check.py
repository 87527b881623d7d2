"""Every row of a task looked at as the run would see it: columns, nulls, template, length. Nothing is dropped
silently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearpolicy.errors import DataError
from nearpolicy.models.tokenizer import Renderer
from nearpolicy.records import Prompt
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.sources import (
    ColumnsOf,
    Row,
    declared_columns,
    make_prompt,
    missing_columns,
    name_of,
    needed_columns,
    question_text,
    with_extracts,
)

SHOWN = 20
"""Problems written out; the others are counted."""


@dataclass(slots=True)
class Scan:
    """What became of each row."""

    prompts: list[Prompt] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Prompt tokens of each prompt, where a renderer was given."""
    problems: list[str] = field(default_factory=list)
    """Each names file, row and column, and would stop a run."""
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def skipped(self) -> Mapping[str, int]:
        """Reason -> rows left out on request."""
        return dict(self.skips)

    def message(self) -> str:
        more = [f"... and {len(self.problems) - SHOWN} more"] if len(self.problems) > SHOWN else []
        return "\n".join([*self.problems[:SHOWN], *more])

    def lengths_line(self) -> str:
        """Smallest, median and largest prompt in tokens."""
        if not self.lengths:
            return "not looked at"
        low, middle, high = np.percentile(self.lengths, [0, 50, 100]).astype(int)
        return f"{low} to {high} tokens, median {middle}"


def scan(
    task: TaskConfig,
    rows: Sequence[Row],
    *,
    renderer: Renderer | None,
    max_prompt_length: int | None,
    reward_columns: ColumnsOf = declared_columns,
) -> Scan:
    """Look at every row; problems are collected, not raised."""
    found = Scan()
    needed = needed_columns(task, reward_columns)
    cut_from = {rule.column: f"extract.{name}" for name, rule in task.extract.items()}
    found.problems += missing_columns(task, rows, cut_from)
    rows = with_extracts(task, rows)
    found.problems += missing_columns(task, rows, needed)
    if found.problems:
        return found
    chat = _goes_through_chat_template(task, renderer, found)
    for row in rows:
        where = f"task {task.name}: {name_of(task.source)} row {row.number}"
        nulls = [column for column in needed if row.values.get(column) is None]
        if nulls:
            _refuse_or_skip(
                found, task.on_null, "null", f"{where} column `{nulls[0]}`: no value; fix it or set on_null: skip"
            )
            continue
        try:
            prompt = make_prompt(task, row, chat=chat)
            if task.match is not None and not re.search(task.match, question_text(prompt)):
                found.skips["no match"] += 1
                continue
            length = None if renderer is None else len(_rendered(renderer, prompt, where))
        except DataError as error:
            found.problems.append(str(error))
            continue
        if length is not None and max_prompt_length is not None and length > max_prompt_length:
            _refuse_or_skip(
                found,
                task.on_overlong,
                "overlong",
                f"{where}: {length} tokens with template, sampling.max_prompt_length is {max_prompt_length}; "
                "raise it or set on_overlong: skip",
            )
            continue
        found.prompts.append(prompt)
        if length is not None:
            found.lengths.append(length)
    if not found.prompts and not found.problems:
        found.problems.append(f"task {task.name}: no row of {name_of(task.source)} is left: {found.skipped}")
    return found


def _goes_through_chat_template(task: TaskConfig, renderer: Renderer | None, found: Scan) -> bool:
    """Whether text becomes a user message; a task that insists without a template to be had is a problem."""
    has_template = renderer is None or renderer.has_chat_template
    insists = "chat: true" if task.chat else "system" if task.system is not None else None
    if insists and not has_template:
        found.problems.append(
            f"task {task.name}: `{insists}` needs a chat template and the tokenizer has none; "
            "set chat: false, or model.tokenizer to one with a template"
        )
    return has_template if task.chat is None else task.chat


def _rendered(renderer: Renderer, prompt: Prompt, where: str) -> np.ndarray:
    if prompt.messages is not None and not renderer.has_chat_template:
        raise DataError(
            f"{where}: prompts are chat messages, but the tokenizer has no chat template; "
            "set model.tokenizer to one with a template, or make the prompt from text (prompt_column, template)"
        )
    try:
        return renderer.prompt_ids(prompt)
    except Exception as error:  # a template is a program of its own and may raise anything
        raise DataError(f"{where}: the chat template refuses it: {type(error).__name__}: {error}") from None


def _refuse_or_skip(found: Scan, rule: str, reason: str, problem: str) -> None:
    if rule == "skip":
        found.skips[reason] += 1
    else:
        found.problems.append(problem)
