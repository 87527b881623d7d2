"""Supervised rows from training prompts and their answers: what a warm start learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nearpolicy.learner.config import WarmStartConfig
from nearpolicy.models.tokenizer import Renderer
from nearpolicy.records import Finish, Prompt, Row, Segment
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.mixture import Mixture


def supervised_batches(
    mixture: Mixture, tasks: Sequence[TaskConfig], config: WarmStartConfig, renderer: Renderer
) -> Iterator[list[Row]]:
    """``config.steps`` batches of training prompts in the mixture's order, with their answers as tokens to predict."""
    columns = {task.name: task.answer_column for task in tasks}
    for step in range(config.steps):
        first = step * config.batch_size
        prompts = [mixture.prompt(index) for index in range(first, first + config.batch_size)]
        yield [_row(i, prompt, columns[prompt.task], renderer) for i, prompt in enumerate(prompts)]


def _row(index: int, prompt: Prompt, answer_column: str | None, renderer: Renderer) -> Row:
    tokens = renderer.answer_ids(str(prompt.columns[answer_column]))
    everywhere = np.ones(len(tokens), dtype=bool)
    segment = Segment(
        context_ids=renderer.prompt_ids(prompt),
        token_ids=tokens,
        mask=everywhere,
        behavior_logprobs=np.zeros(len(tokens)),
        versions=np.full(len(tokens), -1),
        finish=Finish.STOP,
    )
    return Row(group=index, sample=0, segment=segment, trained=everywhere, advantages=everywhere.astype(np.float32))
