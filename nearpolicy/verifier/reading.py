"""Whether the rows of the data hold what rewards need, asked before the first completion (K47).

`functions.required_columns` says which columns no row may lack; here each row's answer is read as the reward will.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from nearpolicy.bounded import bounded
from nearpolicy.verifier import code, rewards
from nearpolicy.verifier.config import (
    CodeReward,
    IfevalReward,
    MathVerifyReward,
    NumberReward,
    ReasoningGymReward,
    RewardConfig,
    RubricReward,
)
from nearpolicy.verifier.learned import rubric
from nearpolicy.verifier.learned.config import ContainsItem, NumberItem, RubricItem
from nearpolicy.verifier.math import verdict
from nearpolicy.verifier.rewards import RowError

Rows = Sequence[Mapping[str, Any]]
Unfit = Iterable[tuple[int, str, str]]
MOST_EXPRESSIONS = 3000
"""Different answers that are read as formulas before a run; each takes part of a millisecond, or milliseconds where
math-verify is needed."""
EXPRESSION_S = 10.0


def unfit(reward: RewardConfig, rows: Rows, *, every_row: bool = False) -> Unfit:
    """Rows that this reward cannot score. User functions are not asked: they know what they read.

    Unless ``every_row``, of very many math answers only some are looked at, evenly through the rows.
    """
    match reward:
        case NumberReward():
            return _unfit_each(reward.answer_column, lambda row: rewards.number_answer(reward, row), rows)
        case ReasoningGymReward():
            return _unfit_each(reward.metadata_column, lambda row: rewards.gym_data_set(reward, row), rows)
        case CodeReward():
            read = [column for column in (reward.tests_column, reward.audit_column) if column is not None]
            return itertools.chain.from_iterable(
                _unfit_each(column, partial(code.row_task, reward, column=column), rows) for column in read
            )
        case IfevalReward():
            return _unfit_each(reward.instructions_column, lambda row: rewards.constraints_of(reward, row), rows)
        case RubricReward():
            return itertools.chain.from_iterable(_unfit_item(item, rows) for item in reward.items)
        case MathVerifyReward():
            return _unfit_expressions(reward, rows, None if every_row else MOST_EXPRESSIONS)
    return ()


def _unfit_item(item: RubricItem, rows: Rows) -> Unfit:
    match item:
        case NumberItem():
            return _unfit_each(item.answer_column, partial(rubric.right_number, item), rows)
        case ContainsItem(column=str(column)):
            return _unfit_each(column, partial(rubric.wanted_texts, item), rows)
    return ()


def _unfit_each(column: str, read: Callable[[Mapping[str, Any]], Any], rows: Rows) -> Unfit:
    for place, row in enumerate(rows):
        try:
            read(row)
        except RowError as error:
            yield place, column, str(error).removeprefix(f"the column {column!r} ")


def _unfit_expressions(reward: MathVerifyReward, rows: Rows, most: int | None) -> Iterator[tuple[int, str, str]]:
    """Equal answers are read once, and those that only math-verify may read in a process that can be ended."""
    places: dict[str, int] = {}
    for place, row in enumerate(rows):
        answer = str(row[reward.answer_column])
        if not rewards.is_number(answer):
            places.setdefault(answer, place)
    step = 1 if most is None else -(-len(places) // most) or 1
    chosen = [
        (answer, place)
        for answer, place in itertools.islice(places.items(), 0, None, step)
        if not verdict.read_without_library(answer)
    ]
    if not chosen:
        return
    texts = [answer for answer, _ in chosen]
    answers = bounded("nearpolicy.verifier.expressions:problem", None, texts, limit_s=EXPRESSION_S, chunk=32)
    for (_, place), answer in zip(chosen, answers, strict=True):
        wrong = answer.value if answer.error is None else f"cannot be read: {answer.error}"
        if wrong is not None:
            yield place, reward.answer_column, wrong
