"""Built-in scores: a completion and the columns of its row -> a verdict. Pure functions, no processes, no clock.

Three promises hold for all of them. A completion that is merely wrong, empty or unreadable scores 0. A row that is at
fault (no answer, an answer that cannot be read) gives a *failed* verdict: it says nothing about the completion. An
exception means that the scoring code is at fault; the caller turns it into a failed verdict, never into 0.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from nearpolicy.errors import described, nearest
from nearpolicy.records import Outcome, Prompt, Rollout, Verdict
from nearpolicy.verifier.config import (
    AS_WRITTEN,
    ExactMatchReward,
    IfevalReward,
    MathVerifyReward,
    NumberReward,
    ReasoningGymReward,
    RegexReward,
)
from nearpolicy.verifier.ifeval import constraints, languages
from nearpolicy.verifier.math import library, verdict

BuiltIn = ExactMatchReward | RegexReward | NumberReward | MathVerifyReward | ReasoningGymReward | IfevalReward


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward may know of one rollout; plain data, fit to travel to a worker process."""

    text: str
    """The completion."""
    columns: Mapping[str, Any]
    prompt: str | list[Mapping[str, Any]] = ""
    """Text or chat messages, as the row has it."""
    completion_ids: list[int]
    """Tokens the policy chose, in order."""
    task: str

    @classmethod
    def of(cls, prompt: Prompt, rollout: Rollout) -> Sample:
        asked = prompt.attachments.get(AS_WRITTEN, prompt.text)
        return cls(
            text=rollout.text,
            columns=dict(prompt.columns),
            prompt=asked if asked is not None else [dict(message) for message in prompt.messages or ()],
            completion_ids=[int(token) for s in rollout.segments for token in s.token_ids[s.mask]],
            task=prompt.task,
        )


class RowError(Exception):
    """The row, not the completion, is at fault."""


def runs_inline(reward: BuiltIn) -> bool:
    """Whether a score takes linear time, and little of it, whatever the completion.

    A regular expression may backtrack for ever, math-verify may compute 9^9^9^9, and some reasoning-gym data sets hand
    the completion to ``eval``: these belong where a deadline can be enforced. The checks of ifeval are linear, but one
    of them gives the text to a library for languages, whose model takes a second to read.
    """
    return isinstance(reward, ExactMatchReward | NumberReward)


def score(reward: BuiltIn, sample: Sample) -> Verdict:
    """The verdict of a built-in reward."""
    try:
        return _SCORES[type(reward)](reward, sample)
    except RowError as error:
        return Verdict.failed(str(error))


ANOTHER = "17"
"""An answer that is trivial to read, and nearly always another one than the right one."""


def controls(reward: BuiltIn, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Completions to score after one ran into a limit, in the same place; none if the reward knows none.

    The first is right and must score above 0, the second must be answered, with whatever score. Only then the
    completion was the cause: a right answer is often recognised letter by letter, and ``9^9^9^9`` is not computed
    before it is compared with something else.
    """
    if isinstance(reward, MathVerifyReward):
        right, another = _answer(reward.answer_column, columns), ANOTHER
        return verdict.as_completion(reward, right), verdict.as_completion(reward, another)
    if isinstance(reward, ReasoningGymReward):
        tag, answer = reward.answer_tag, _answer(reward.answer_column, columns)
        return tuple(f"<{tag}>{text}</{tag}>" if tag else text for text in (answer, ANOTHER))
    return ()


def column_of(name: str, columns: Mapping[str, Any]) -> Any:
    """What a column holds; `RowError` if nothing."""
    value = columns.get(name)
    if value is None:
        raise RowError(f"the column {name!r} is {'empty' if name in columns else 'missing'} in this row")
    return value


def _answer(name: str, columns: Mapping[str, Any]) -> str:
    return str(column_of(name, columns))


# Exact match and regular expressions


def _exact_match(reward: ExactMatchReward, sample: Sample) -> Verdict:
    """Answers that are not text are compared by their ``str``."""
    text, answer = sample.text, _answer(reward.answer_column, sample.columns)
    if reward.strip:
        text, answer = text.strip(), answer.strip()
    if reward.ignore_case:
        text, answer = text.casefold(), answer.casefold()
    return Verdict.scored(float(text == answer))


def _regex(reward: RegexReward, sample: Sample) -> Verdict:
    match = re.search if reward.match == "search" else re.fullmatch
    return Verdict.scored(float(match(reward.pattern, sample.text) is not None))


# Numbers

_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9_])                       # digits glued to a word belong to it: x2, H2O
    (?<![0-9][.])                           # and 1.2.3 is no decimal
    (?:(?<![A-Za-z0-9_)\]}])[+\-\u2212])?   # a sign, unless something stands before it to subtract from
    (?:
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?
        | \.[0-9]+
    )
    (?:[eE][+\-]?[0-9]{1,3}(?![0-9]))?
    """,
    re.VERBOSE,
)


def find_numbers(text: str) -> list[tuple[str, Decimal]]:
    """Every number in a text, as written and as an exact value.

    Commas group thousands only in groups of three: ``1,234`` is one number, ``98,76`` and ``1,2345`` are two each. A
    sign (the Unicode minus too) touches its number; after a digit, a letter or a closing bracket it is an operator or a
    dash: ``10-4`` holds 10 and 4, ``= -4`` holds -4. ``.5``, ``5.`` (with a full stop), ``+5``, ``007`` and ``1.5e3``
    are read; digits glued to a word (``x2``) are not. Units, currency and per cent signs are ignored, and ``3/4`` is
    two numbers: values that are written as expressions are for ``math_verify``.
    """
    return [(match.group(), _exact(match.group())) for match in _NUMBER.finditer(text)]


def _exact(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))


def is_number(text: str) -> bool:
    """Whether a text is one number, by the conventions of `find_numbers`, and nothing else."""
    return _NUMBER.fullmatch(text.strip()) is not None


def number_answer(reward: NumberReward, columns: Mapping[str, Any]) -> Decimal:
    """The right answer of a row; `RowError` if it is no number."""
    answer = column_of(reward.answer_column, columns)
    if isinstance(answer, bool) or not is_number(str(answer)):
        raise RowError(f"the column {reward.answer_column!r} holds {brief(answer)}, which is not a number")
    return _exact(str(answer).strip())


def brief(value: Any) -> str:
    """A value for a message."""
    return _shortened(repr(value), 80)


LONGEST_REASON = 500


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _number(reward: NumberReward, sample: Sample) -> Verdict:
    """Equality is exact: 0.5 is 0.50, and 0.3333 is not a third."""
    answer = number_answer(reward, sample.columns)
    numbers = find_numbers(sample.text)
    if not numbers:
        return _zero("no number in the completion", correct=0.0, form=0.0)
    written, value = numbers[-1]
    correct, form = value == answer, sample.text.strip() == written
    return Verdict.scored(correct * (1.0 if form else reward.partial), correct=float(correct), form=float(form))


def _zero(reason: str, **parts: float) -> Verdict:
    return Verdict(outcome=Outcome.SCORED, value=0.0, parts=parts, reason=reason)


# Math


def _math_verify(reward: MathVerifyReward, sample: Sample) -> Verdict:
    return verdict.verify(reward, _answer(reward.answer_column, sample.columns), sample.text)


# Instructions


def constraints_of(reward: IfevalReward, columns: Mapping[str, Any]) -> list[constraints.Constraint]:
    """The instructions of a row; `RowError` if one of them cannot be checked."""
    found = [column_of(name, columns) for name in reward.columns]
    try:
        return constraints.read(*found)
    except constraints.ConstraintError as error:
        raise RowError(f"the column {reward.instructions_column!r} cannot be used: {error}") from None


def _ifeval(reward: IfevalReward, sample: Sample) -> Verdict:
    asked = constraints_of(reward, sample.columns)
    problems = constraints.problems(asked, sample.text, loose=reward.form == "loose")
    parts = constraints.parts(asked, problems)
    missed = "; ".join(constraints.not_followed(asked, problems))
    reason = _shortened(f"not followed: {missed}", LONGEST_REASON) if missed else ""
    return Verdict(outcome=Outcome.SCORED, value=parts[reward.credit], parts=parts, reason=reason)


# reasoning-gym


def gym_data_set(reward: ReasoningGymReward, columns: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The data set that scores a row, and the row's metadata; `RowError` if the row does not say."""
    column = reward.metadata_column
    metadata = column_of(column, columns)
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise RowError(f"the column {column!r} holds text that is no JSON: {described(error)}") from None
    if not isinstance(metadata, Mapping):
        raise RowError(f"the column {column!r} holds {brief(metadata)}, where the metadata of an entry should be")
    name = metadata.get("source_dataset")
    if not isinstance(name, str):
        raise RowError(f"the column {column!r} does not name its data set in 'source_dataset'")
    return _data_set(name, json.dumps(reward.params)), metadata


def _reasoning_gym(reward: ReasoningGymReward, sample: Sample) -> Verdict:
    data_set, metadata = gym_data_set(reward, sample.columns)
    entry = {
        "question": sample.columns.get("question", sample.prompt),
        "answer": _answer(reward.answer_column, sample.columns),
        "metadata": metadata,
    }
    value = float(data_set.score_answer(_tagged(reward, sample.text), entry))
    if not math.isfinite(value):
        return Verdict.failed(f"the data set {metadata['source_dataset']!r} scored {value}")
    return Verdict.scored(value)


def _tagged(reward: ReasoningGymReward, text: str) -> str | None:
    if reward.answer_tag is None:
        return text.strip()
    found = re.findall(rf"<{reward.answer_tag}>(.*?)</{reward.answer_tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


@functools.lru_cache(maxsize=64)
def _data_set(name: str, params: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = nearest(name, list(DATASETS))
        raise RowError(f"reasoning-gym has no data set {name!r}" + (f"; did you mean {close!r}?" if close else ""))
    try:
        return reasoning_gym.create_dataset(name, **json.loads(params))
    except Exception as error:  # each data set looks at its settings in its own way
        raise RowError(f"the data set {name!r} refuses the reward's params {params}: {described(error)}") from None


def preload(reward: BuiltIn) -> None:
    """Load now what the first score would load, so that no time limit pays for it."""
    if isinstance(reward, MathVerifyReward):
        library.preload()
    elif isinstance(reward, ReasoningGymReward):
        import reasoning_gym  # noqa: F401
    elif isinstance(reward, IfevalReward):
        languages.preload()


_SCORES: Mapping[type, Any] = {
    ExactMatchReward: _exact_match,
    RegexReward: _regex,
    NumberReward: _number,
    MathVerifyReward: _math_verify,
    ReasoningGymReward: _reasoning_gym,
    IfevalReward: _ifeval,
}
