"""Prompts of a run by admission index: a pure function of seed and index, so that resume needs only a number.

rows -> prompts -> held-out | training          per task, at start
index -> task (by weight), n-th prompt of it -> epoch, place in the epoch's order
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nearpolicy.errors import DataError
from nearpolicy.models.tokenizer import Renderer
from nearpolicy.records import Prompt
from nearpolicy.tasks.check import DECLARED, Reads, scan
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.held_out import question_key, split_held_out
from nearpolicy.tasks.sources import question_text, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """A task's prompts, divided, and what was left out on the way."""

    config: TaskConfig
    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    rows: int
    """Rows in the source."""
    skipped: Mapping[str, int]
    """Reason -> rows left out by `on_null` and `on_overlong`, or because another task holds the question out."""
    repeated: int
    """Rows left out because an earlier row asks the same question."""
    lengths: str
    """Prompt lengths in words, for people."""


def load_task(
    config: TaskConfig,
    *,
    seed: int,
    renderer: Renderer | None,
    max_prompt_length: int | None,
    reads: Reads = DECLARED,
) -> TaskData:
    """Read, check and divide a task's rows; `DataError` names every bad one (the first twenty).

    Without a ``renderer`` lengths are not looked at and text counts as chat.
    """
    rows = read_rows(config.source)
    found = scan(config, rows, renderer=renderer, max_prompt_length=max_prompt_length, reads=reads)
    if found.problems:
        raise DataError(found.message())
    keys = [question_key(question_text(prompt)) for prompt in found.prompts]
    training, held_out = split_held_out(keys, config.held_out, seed=seed, task=config.name)
    return TaskData(
        config=config,
        training=tuple(found.prompts[place] for place in training),
        held_out=tuple(found.prompts[place] for place in held_out),
        rows=len(rows),
        skipped=found.skipped,
        repeated=len(keys) - len(training) - len(held_out),
        lengths=found.lengths_line(),
    )


class Mixture:
    """Several tasks in their weights' proportion; within a task one epoch shows every prompt once."""

    def __init__(self, tasks: Sequence[TaskData], *, seed: int):
        self.tasks: Mapping[str, TaskData] = {task.config.name: task for task in tasks}
        self._seed = seed
        self._names = list(self.tasks)
        weights = np.array([task.config.weight for task in tasks], dtype=np.float64)
        self._shares = weights / weights.sum()
        self._turns: list[tuple[int, int]] = []
        """[index] -> (task, how many prompts of that task came before)."""
        self._given = np.zeros(len(tasks), dtype=np.int64)
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}
        """The order of the epoch last asked for, per task."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of an admission; data never ends, another epoch begins."""
        place, nth = self._turn(index)
        name = self._names[place]
        training = self.tasks[name].training
        epoch, offset = divmod(nth, len(training))
        return training[self._order(name, epoch)[offset]]

    def held_out(self, task: str) -> Sequence[Prompt]:
        """Questions for evaluation, in an order of their own that the run's seed decides."""
        return self.tasks[task].held_out

    def _turn(self, index: int) -> tuple[int, int]:
        if len(self._names) == 1:
            return 0, index
        while len(self._turns) <= index:
            # The task furthest behind its share is next: proportions hold in every stretch, not only on average.
            behind = self._shares * (len(self._turns) + 1) - self._given
            task = int(np.argmax(behind))
            self._turns.append((task, int(self._given[task])))
            self._given[task] += 1
        return self._turns[index]

    def _order(self, name: str, epoch: int) -> Sequence[int]:
        task = self.tasks[name]
        if not task.config.shuffle:
            return range(len(task.training))
        known = self._orders.get(name)
        if known is None or known[0] != epoch:
            digest = hashlib.blake2b(f"{self._seed}\0{name}\0{epoch}".encode(), digest_size=16).digest()
            # Raw bits of Philox, not Generator.permutation: its stream is promised never to change.
            draws = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(len(task.training))
            known = self._orders[name] = (epoch, np.argsort(draws, kind="stable"))
        return known[1]


def load_mixture(
    configs: Sequence[TaskConfig],
    *,
    seed: int,
    renderer: Renderer | None,
    max_prompt_length: int | None,
    reads: Reads = DECLARED,
) -> Mixture:
    """All tasks of a recipe, read and checked; `DataError` speaks for all of them."""
    tasks, problems = [], []
    for config in configs:
        try:
            tasks.append(
                load_task(
                    config,
                    seed=seed,
                    renderer=renderer,
                    max_prompt_length=max_prompt_length,
                    reads=reads,
                )
            )
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return Mixture(_apart(tasks), seed=seed)


def _apart(tasks: Sequence[TaskData]) -> list[TaskData]:
    """No task trains on a question that another one holds out."""
    if len(tasks) == 1:
        return list(tasks)
    held_out = {question_key(question_text(prompt)) for task in tasks for prompt in task.held_out}
    apart = []
    for task in tasks:
        kept = tuple(prompt for prompt in task.training if question_key(question_text(prompt)) not in held_out)
        if not kept:
            raise DataError(
                f"task {task.config.name}: other tasks hold out all its questions, none is left to train on"
            )
        if dropped := len(task.training) - len(kept):
            task = replace(task, training=kept, skipped={**task.skipped, "held out by another task": dropped})
        apart.append(task)
    return apart
