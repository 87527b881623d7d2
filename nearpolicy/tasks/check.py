"""Every row of a task looked at as the run would see it: columns, nulls, template, length. Nothing is dropped
silently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nearpolicy.errors import DataError, described
from nearpolicy.models.tokenizer import Renderer
from nearpolicy.records import Prompt
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.patterns import matching
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
from nearpolicy.verifier.config import RewardConfig

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


UnfitRows = Callable[[RewardConfig, Sequence[Mapping[str, Any]]], Iterable[tuple[int, str, str]]]
"""A reward and the columns of rows -> (place of a row, column, what is wrong with it) where it could never score."""


def _none_unfit(reward: RewardConfig, rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, str, str]]:
    return ()


@dataclass(frozen=True, slots=True)
class Reads:
    """What rewards want of the rows of their tasks."""

    columns: ColumnsOf = declared_columns
    unfit: UnfitRows = _none_unfit


DECLARED = Reads()
"""What the configs of rewards say. `nearpolicy.verifier.reading` says more."""


def scan(
    task: TaskConfig,
    rows: Sequence[Row],
    *,
    renderer: Renderer | None,
    max_prompt_length: int | None,
    reads: Reads = DECLARED,
) -> Scan:
    """Look at every row; problems are collected, not raised."""
    found = Scan()
    needed = needed_columns(task, reads.columns)
    cut_from = {rule.column: f"extract.{name}" for name, rule in task.extract.items()}
    found.problems += missing_columns(task, rows, cut_from)
    if found.problems:
        return found
    rows = with_extracts(task, rows)
    found.problems += missing_columns(task, rows, needed)
    if found.problems:
        return found
    chat = _goes_through_chat_template(task, renderer, found)
    asked = _matching(task, list(_prompts(task, rows, needed, chat, found)), found)
    kept = list(_short_enough(task, asked, renderer, max_prompt_length, found))
    found.prompts += [prompt for _, prompt in kept]
    for reward in task.rewards:
        for place, column, wrong in reads.unfit(reward, [prompt.columns for prompt in found.prompts]):
            found.problems.append(f"{kept[place][0]} column `{column}`: {wrong} (reward {reward.source})")
    if not found.prompts and not found.problems:
        found.problems.append(f"task {task.name}: no row of {name_of(task.source)} is left: {found.skipped}")
    return found


_Asked = tuple[str, Prompt]
"""What messages call the row, and its prompt."""


def _prompts(
    task: TaskConfig, rows: Sequence[Row], needed: Mapping[str, str], chat: bool, found: Scan
) -> Iterator[_Asked]:
    """Rows that have a value wherever one is needed, as prompts."""
    for row in rows:
        where = f"task {task.name}: {name_of(task.source)} row {row.number}"
        nulls = [column for column in needed if row.values.get(column) is None]
        if nulls:
            problem = f"{where} column `{nulls[0]}`: no value; fix it or set on_null: skip"
            _refuse_or_skip(found, task.on_null, "null", problem)
            continue
        try:
            prompt = make_prompt(task, row, chat=chat)
            _refuse_half_characters(prompt, where, str(row.values.get(task.answer_column)))
        except DataError as error:
            found.problems.append(str(error))
            continue
        yield where, prompt


def _refuse_half_characters(prompt: Prompt, where: str, answer: str) -> None:
    """JSON can name half of a surrogate pair, but no tokenizer can read it."""
    for what, text in (("the question", question_text(prompt)), ("the answer", answer)):
        if (half := re.search("[\ud800-\udfff]", text)) is not None:
            raise DataError(f"{where}: {what} holds \\u{ord(half[0]):x}, half of a character; fix it")


def _matching(task: TaskConfig, asked: list[_Asked], found: Scan) -> list[_Asked]:
    if task.match is None or not asked:
        return asked
    texts, where = [question_text(prompt) for _, prompt in asked], [where for where, _ in asked]
    kept = [each for each, fits in zip(asked, matching(task.match, texts, where, "match"), strict=True) if fits]
    if len(kept) < len(asked):
        found.skips["no match"] += len(asked) - len(kept)
    return kept


def _short_enough(
    task: TaskConfig, asked: Iterable[_Asked], renderer: Renderer | None, limit: int | None, found: Scan
) -> Iterator[_Asked]:
    for where, prompt in asked:
        if renderer is None:
            yield where, prompt
            continue
        try:
            length = len(_rendered(renderer, prompt, where))
        except DataError as error:
            found.problems.append(str(error))
            continue
        if limit is not None and length > limit:
            problem = (
                f"{where}: {length} tokens with template, sampling.max_prompt_length is {limit}; "
                "raise it or set on_overlong: skip"
            )
            _refuse_or_skip(found, task.on_overlong, "overlong", problem)
            continue
        found.lengths.append(length)
        yield where, prompt


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
        who = "the tokenizer" if prompt.messages is None else "the chat template"
        raise DataError(f"{where}: {who} refuses it: {described(error)}") from None


def _refuse_or_skip(found: Scan, rule: str, reason: str, problem: str) -> None:
    if rule == "skip":
        found.skips[reason] += 1
    else:
        found.problems.append(problem)
