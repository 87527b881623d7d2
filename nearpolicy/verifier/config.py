"""The rewards of a task, and the section ``verifier`` of a recipe.

A reward is told by its ``kind``, so a wrong key is reported against the keys of that kind alone. What a reward reads
from the rows of the data is declared here (``answer_column`` and so on), so that a missing column is refused before the
first completion is sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from nearpolicy.settings import ConfigModel, RegularExpression, Seconds

AS_WRITTEN = "as_written"
"""The attachment of a prompt whose row holds text that went into a chat message: that text."""


class _Reward(ConfigModel):
    """What every reward source has."""

    kind: str
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of this source in verdicts and metrics (default: the kind); no two sources of a task share one."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this source in the reward; negative for a penalty."""

    @property
    def source(self) -> str:
        """The name in use."""
        return self.name or self.kind

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that no row may lack. A user function says so by its signature: `functions.required_columns`."""
        return ()


class _AnswerReward(_Reward):
    answer_column: str = "answer"
    """Column with the right answer."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer_column,)


class ExactMatchReward(_AnswerReward):
    """1 if the completion is the answer, character by character; 0 otherwise."""

    kind: Literal["exact_match"] = "exact_match"
    """Selects this reward."""
    strip: bool = True
    """Ignore white space around completion and answer."""
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""


class RegexReward(_Reward):
    """1 if the pattern matches the completion, 0 otherwise."""

    kind: Literal["regex"] = "regex"
    """Selects this reward."""
    pattern: RegularExpression
    """Python regular expression; flags are written inside it, as in ``(?is)``."""
    match: Literal["search", "full"] = "search"
    """Whether the pattern may match anywhere, or must match the whole completion."""


class NumberReward(_AnswerReward):
    """1 if the last number in the completion equals the answer (conventions: `rewards.find_numbers`). Its part
    `correct` is 1 for the right number whatever stands around it, and its part `form` if nothing else stands there;
    held-out accuracy goes by `correct`."""

    kind: Literal["number"] = "number"
    """Selects this reward."""
    partial: float = Field(default=1.0, ge=0, le=1)
    """Value of the right number inside other text; below 1 it teaches the model to write nothing but the number."""


ExtractionForm = Literal["auto", "boxed", "tag", "final_answer", "hash", "last_number", "whole"]
"""Where a math answer stands in a completion; `MathVerifyReward.extract` says which is which."""


class MathVerifyReward(_AnswerReward):
    """1 if the answer in the completion equals the right one as mathematics, 0 otherwise; `docs/verify-math.md` lists
    the conventions. Its part `found` is 1 where the completion holds an answer in the form that counts."""

    kind: Literal["math_verify"] = "math_verify"
    """Selects this reward."""
    extract: ExtractionForm = "auto"
    r"""Where the answer stands. `boxed`: in the last complete ``\boxed{}`` or ``\fbox{}``. `tag`: in the last
    ``<answer></answer>``. `final_answer`: after the last ``####``, ``A:``, ``Answer:`` or ``the answer is``. `hash`:
    the number right after the last ``####``, as GSM8K's own grader reads it. `last_number`: the last number or
    formula. `whole`: the completion is the answer. `auto`: the first of `boxed`, `tag`, `final_answer`, `whole` (if it
    is nothing but an answer) and `last_number` that is there."""
    tolerance: float = Field(default=0.0, ge=0, le=0.5)
    """Relative difference up to which two real numbers are equal. 0: values are exact, and 0.333 is not a third."""


class ReasoningGymReward(_AnswerReward):
    """The score that the reasoning-gym data set itself gives the completion, often with partial credit. In held-out
    accuracy only the full score, 1, is right."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Selects this reward."""
    metadata_column: str = "metadata"
    """Column with the entry's metadata (a mapping or JSON text), which names the data set in ``source_dataset``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator the questions came from; some score by them."""
    answer_tag: str | None = Field(default=None, pattern=r"^\w+$")
    """Score what the last ``<tag>...</tag>`` holds, nothing if there is none (default: the whole completion)."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer_column, self.metadata_column)


class FunctionReward(_Reward):
    """A function of yours, in the shape TRL or verl expects (`docs/getting-started.md` describes both). It is called
    with one sample at a time: the lists of the TRL shape hold one entry each. Where it is a task's first reward,
    held-out accuracy calls values of 1 or more right: give 1 to what you call right, or return a part `correct` (verl
    shape)."""

    kind: Literal["function"] = "function"
    """Selects this reward."""
    path: str
    """Where it is: ``path/to/file.py:function``, relative to the working folder, or ``package.module:function``."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments; they take precedence over columns of the same name."""
    answer_column: str | None = None
    """Column passed as ``ground_truth``, for functions of the verl shape only (default: ``answer``)."""

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        if not re.fullmatch(r"[^:]+:[A-Za-z_][\w.]*", path):
            raise ValueError(f"path is {path!r}; write it as file.py:function or package.module:function")
        return path


RewardConfig = Annotated[
    ExactMatchReward | RegexReward | NumberReward | MathVerifyReward | ReasoningGymReward | FunctionReward,
    Field(discriminator="kind"),
]


def _named_apart(rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
    check_names(rewards)
    return rewards


def check_names(rewards: Iterable[RewardConfig]) -> None:
    """Raise ValueError if two sources share a name: their verdicts would overwrite each other."""
    seen: set[str] = set()
    for reward in rewards:
        if reward.source in seen:
            raise ValueError(f"two reward sources are named {reward.source!r}; set `name` on one of them")
        seen.add(reward.source)


Rewards = Annotated[tuple[RewardConfig, ...], AfterValidator(_named_apart)]
"""The rewards of one task, as a field of a config."""


def reward_weights(rewards: Iterable[RewardConfig]) -> dict[str, float]:
    """Source name -> weight."""
    return {reward.source: reward.weight for reward in rewards}


class VerifierConfig(ConfigModel):
    """Section `verifier`: how completions are judged."""

    workers: int = Field(default=1, ge=1, le=1000)
    """Processes for rewards that can block or crash: math_verify, reasoning_gym, regex and user functions."""
    timeout_s: Seconds = 10.0
    """Limit of one call of one reward source; a worker that exceeds it is killed and replaced."""
    retries: int = Field(default=1, ge=0, le=100)
    """Further attempts after a worker died under a call; a wrong answer or a raising function is never tried again."""
    in_process: bool = False
    """Call user functions in this process, for a debugger: without time limit and without protection from crashes."""
