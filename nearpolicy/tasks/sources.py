"""Rows of a task's data, each with the number a person finds it by.

    TaskConfig.source -> read_rows -> Row(number, values) -> make_prompt -> Prompt

Whatever is wrong with the data ends here, before anything is generated, with file, row and column.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import string
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nearpolicy.errors import DataError, described, nearest
from nearpolicy.records import Prompt
from nearpolicy.tasks.config import (
    ExtractConfig,
    HuggingFaceSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    Source,
    TaskConfig,
)
from nearpolicy.tasks.patterns import last_matches
from nearpolicy.verifier.config import AS_WRITTEN, RewardConfig

DEEPEST = 100
"""Levels of lists and objects that a row may have."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source."""

    number: int
    """From 1; the line number in a JSONL file."""
    values: Mapping[str, Any]


def name_of(source: Source) -> str:
    """What messages call the source."""
    if isinstance(source, ReasoningGymSource):
        return f"reasoning_gym:{source.dataset}"
    return source.path


def _path(source: JsonlSource | ParquetSource) -> Path:
    """The file, with ``~`` and environment variables filled in."""
    return Path(os.path.expandvars(source.path)).expanduser()


def check_exists(source: Source) -> None:
    """Refuse a missing file or package at once, without reading data."""
    if isinstance(source, (JsonlSource, ParquetSource)):
        path = _path(source)
        if not path.is_file():
            unset = [v for v in re.findall(r"\$\{?(\w+)", str(path)) if v not in os.environ]
            hint = f" (looked for {path.absolute()})"
            if unset:
                hint = f"; the environment variable {unset[0]} is not set: set it to the folder that holds your data"
            raise DataError(f"{source.path}: no such file{hint}")
    elif isinstance(source, HuggingFaceSource):
        _import_datasets(source)


def read_rows(source: Source) -> list[Row]:
    """All rows of a source, in its order."""
    check_exists(source)
    reader = {
        ReasoningGymSource: _reasoning_gym,
        JsonlSource: _jsonl,
        ParquetSource: _parquet,
        HuggingFaceSource: _huggingface,
    }[type(source)]
    rows = list(reader(source))
    if not rows:
        raise DataError(f"{name_of(source)}: holds no rows")
    return rows


def _jsonl(source: JsonlSource) -> Iterator[Row]:
    path, number = _path(source), 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Row(number, _json_object(line, f"{source.path} row {number}"))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source.path}: cannot be read beyond row {number}: {described(error)}") from None


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
        # Far below what the interpreter can hold: every later copy of the row, on its way to a worker, holds it too.
        if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(values) > DEEPEST:
            raise RecursionError
    except RecursionError:
        raise DataError(
            f"{where}: lists and objects lie more than {DEEPEST} deep in one another; make it flat"
        ) from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: a row is a JSON object, found {type(values).__name__}")
    return values


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


def _parquet(source: ParquetSource) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(_path(source)).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a date that Python has not
        raise DataError(f"{source.path}: cannot be read as Parquet: {described(error)}") from None
    for number, values in enumerate(rows, start=1):
        yield Row(number, values)


def _huggingface(source: HuggingFaceSource) -> Iterator[Row]:
    datasets = _import_datasets(source)
    try:
        loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
        for number, values in enumerate(loaded, start=1):
            yield Row(number, values)
    except Exception as error:  # a library with a network and foreign files behind it
        raise DataError(f"{source.path}: cannot be loaded: {described(error)}") from None


def _import_datasets(source: HuggingFaceSource) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{source.path}: source kind huggingface needs the package `datasets`; pip install 'nearpolicy[datasets]'"
        ) from None


def _reasoning_gym(source: ReasoningGymSource) -> Iterator[Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.dataset not in DATASETS:
        close = nearest(source.dataset, list(DATASETS))
        hint = f"; did you mean `{close}`?" if close else f"; it has {len(DATASETS)} generators, see its gallery"
        raise DataError(f"reasoning-gym has no generator `{source.dataset}`{hint}")
    for key in ("size", "seed"):
        if key in source.params:
            raise DataError(f"reasoning_gym:{source.dataset}: `{key}` belongs to the source itself, not to its params")
    try:
        made = reasoning_gym.create_dataset(source.dataset, size=source.size, seed=source.seed, **source.params)
        for number in range(1, source.size + 1):
            yield Row(number, made[number - 1])
    except Exception as error:  # some generators meet a value they cannot use only when they draw
        raise DataError(
            f"reasoning_gym:{source.dataset}: refuses its params {source.params}: {described(error)}"
        ) from None


def template_fields(template: str) -> list[str]:
    """Columns a template names."""
    fields: list[str] = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"template {template!r}: {error}; write {{{{ and }}}} for braces") from None
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        if not field.isidentifier() or spec or conversion:
            raise DataError(f"template {template!r}: a field is a plain column name in braces, found {{{field}}}")
        fields.append(field)
    return fields


ColumnsOf = Callable[[RewardConfig], Sequence[str]]
"""What a reward reads from a row."""


def declared_columns(reward: RewardConfig) -> Sequence[str]:
    """What the reward's config says. A user function's signature says more: `nearpolicy.verifier.functions`."""
    return reward.columns


def needed_columns(task: TaskConfig, columns_of: ColumnsOf = declared_columns) -> dict[str, str]:
    """Columns a row must have -> the setting that asks for each."""
    needed: dict[str, str] = {}
    if task.template is not None:
        needed |= dict.fromkeys(template_fields(task.template), "template")
    else:
        needed[str(task.prompt_column)] = "prompt_column"
    if task.answer_column is not None:
        needed.setdefault(task.answer_column, "answer_column")
    for place, reward in enumerate(task.rewards):
        for column in columns_of(reward):
            needed.setdefault(column, f"rewards.{place}, {reward.source}")
    return needed


def missing_columns(task: TaskConfig, rows: Sequence[Row], needed: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each needed column that no row has."""
    present = list(dict.fromkeys(name for row in rows for name in row.values))
    for column, setting in needed.items():
        if column not in present:
            close = nearest(column, present)
            hint = f"; did you mean `{close}`?" if close else f"; there are {', '.join(present)}"
            yield f"task {task.name}: {name_of(task.source)} has no column `{column}` (needed by {setting}){hint}"


def with_extracts(task: TaskConfig, rows: Sequence[Row]) -> list[Row]:
    """Rows with the columns that ``task.extract`` cuts out of others; None where a pattern does not occur."""
    cut = {name: _cut(task, name, rule, rows) for name, rule in task.extract.items()}
    return [
        replace(row, values={**row.values, **{name: values[place] for name, values in cut.items()}})
        for place, row in enumerate(rows)
    ]


def _cut(task: TaskConfig, name: str, rule: ExtractConfig, rows: Sequence[Row]) -> list[str | None]:
    texts = [str(row.values.get(rule.column) or "") for row in rows]
    where = [f"{_where(task, row)} column `{rule.column}`" for row in rows]
    return last_matches(rule.pattern, texts, where, f"extract.{name}.pattern")


def make_prompt(task: TaskConfig, row: Row, *, chat: bool) -> Prompt:
    """The prompt of a row. ``chat``: text becomes a user message, for the chat template; rewards still see the text."""
    content = _content(task, row)
    columns = dict(row.values)
    name = f"{task.name}/{row.number}"
    if isinstance(content, str) and not chat:
        return Prompt(id=name, task=task.name, text=content, columns=columns)
    written = {AS_WRITTEN: content} if isinstance(content, str) else {}
    messages = [{"role": "user", "content": content}] if written else content
    if task.system is not None:
        if messages[0]["role"] == "system":
            raise DataError(f"{_where(task, row)}: opens with a system message of its own, but the task sets `system`")
        messages = [{"role": "system", "content": task.system}, *messages]
    messages = tuple(dict(message) for message in messages)
    return Prompt(id=name, task=task.name, messages=messages, columns=columns, attachments=written)


def question_text(prompt: Prompt) -> str:
    """What makes the question this one and no other: the text, or all that users say; not the system message."""
    if prompt.text is not None:
        return prompt.text
    return "\n".join(str(message["content"]) for message in prompt.messages or () if message["role"] != "system")


def _content(task: TaskConfig, row: Row) -> Any:
    """Text, or a list of messages that has been looked through."""
    if task.template is not None:
        # Not str.format: a column's text may hold braces, and only plain names are fields.
        parts = string.Formatter().parse(task.template)
        return "".join(text + ("" if field is None else str(row.values[field])) for text, field, _, _ in parts)
    content, where = row.values[task.prompt_column], f"{_where(task, row)} column `{task.prompt_column}`"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise DataError(f"{where}: a prompt is text or a list of messages, found {type(content).__name__}")
    for place, message in enumerate(content):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: message {place} needs `role` and `content`")
    if task.chat is False:
        raise DataError(f"{where}: holds chat messages, but the task says chat: false; leave that out")
    return content


def _where(task: TaskConfig, row: Row) -> str:
    return f"task {task.name}: {name_of(task.source)} row {row.number}"
