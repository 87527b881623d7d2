"""Where prompts come from, how they are made, and which of them are held out."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from nearpolicy.settings import ConfigModel, PathText, RegularExpression, Seed
from nearpolicy.verifier.config import Rewards


class ReasoningGymSource(ConfigModel):
    """Questions made by a reasoning-gym generator; columns `question`, `answer`, `metadata`."""

    kind: Literal["reasoning_gym"]
    """Selects this kind of source."""
    dataset: str
    """Name of the generator, for example `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its settings, for example `max_terms: 2`."""
    size: int = Field(1000, ge=1, le=10_000_000)
    """Questions generated, before equal ones are dropped."""
    seed: Seed = 0
    """Seed of the generator. It draws question i from seed + i, so other seeds are no held-out set; `held_out` is."""


class JsonlSource(ConfigModel):
    """A file with one JSON object per line; gzip-compressed if its name ends in `.gz`."""

    kind: Literal["jsonl"]
    """Selects this kind of source."""
    path: PathText
    """The file, relative to the working folder; `~` and `$VARIABLE` are filled in."""


class ParquetSource(ConfigModel):
    """A Parquet file."""

    kind: Literal["parquet"]
    """Selects this kind of source."""
    path: PathText
    """The file, relative to the working folder; `~` and `$VARIABLE` are filled in."""


class HuggingFaceSource(ConfigModel):
    """A data set of the Hugging Face hub or folder, through the package `datasets`."""

    kind: Literal["huggingface"]
    """Selects this kind of source."""
    path: PathText
    """Hub id or local folder."""
    subset: str | None = None
    """Name of the configuration, where the data set has several."""
    split: str = "train"
    """Name of the split."""


Source = Annotated[ReasoningGymSource | JsonlSource | ParquetSource | HuggingFaceSource, Field(discriminator="kind")]


class ExtractConfig(ConfigModel):
    """A column cut out of another one."""

    column: str
    """The column it is cut from."""
    pattern: RegularExpression
    """Regular expression; the last match counts, and of it the first group (or all of it, without groups)."""


def _usual_prompt_column(data: dict[str, Any]) -> str | None:
    if data.get("template") is not None:
        return None
    return "question" if isinstance(data.get("source"), ReasoningGymSource) else "prompt"


def _usual_answer_column(data: dict[str, Any]) -> str | None:
    return "answer" if isinstance(data.get("source"), ReasoningGymSource) else None


class TaskConfig(ConfigModel):
    """An entry of `tasks`: prompts of one kind, with their rewards."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Names the task in metrics and reports."""
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other tasks."""
    source: Source
    """Where the rows come from; `kind` decides what else belongs here."""
    extract: dict[str, ExtractConfig] = Field(default_factory=dict)
    """New columns cut out of others by regular expressions, for example the final answer out of a worked solution. A
    row where the pattern does not occur has no value there (see `on_null`)."""
    template: str | None = None
    """Prompt text with `{column}` fields, in place of `prompt_column`; `{{` and `}}` are braces."""
    prompt_column: str | None = Field(default_factory=_usual_prompt_column)
    """Column with the prompt: text, or a list of chat messages. Unless set: `question` for reasoning-gym, else
    `prompt`."""
    match: RegularExpression | None = None
    """Regular expression that a question must contain; the other rows are left out and counted. It cuts a generator's
    range to the questions wanted."""
    chat: bool | None = None
    """true: text becomes one user message and goes through the chat template. false: text is used as it is. Left out:
    through the chat template if the tokenizer has one. Prompts that are messages always need a chat template."""
    system: str | None = None
    """System message put before every prompt; needs a chat template."""
    answer_column: str | None = Field(default_factory=_usual_answer_column)
    """Column with the right answer, which `warm_start` learns from; `answer` for reasoning-gym. Rewards name their
    own."""
    held_out: NonNegativeInt = 0
    """Questions kept away from training, for evaluation: chosen by their normalised text (case, white space and the
    order of summands do not make another question). What counts as a right answer is said under `rewards`."""
    shuffle: bool = True
    """Show prompts in a new random order each epoch; false keeps the order of the source."""
    on_null: Literal["error", "skip"] = "error"
    """A row without a value in a column that is needed: stop at the start, or leave the row out and count it."""
    on_overlong: Literal["error", "skip"] = "error"
    """A prompt over `sampling.max_prompt_length`: stop at the start, or leave the row out and count it."""
    rewards: Annotated[Rewards, Field(min_length=1)]
    """What scores a completion; the reward is the weighted sum, in which those count whose `requires` is met. The first
    one also judges held-out answers: right is what it gives 1 or more, before its weight, or by its part `correct`
    where it has one (as `number` does), and only where it counts."""
    environment: Literal["single_turn"] = "single_turn"
    """How a prompt becomes a rollout. `single_turn`: one completion."""

    @model_validator(mode="after")
    def _prompt_is_made_in_one_way(self) -> Self:
        if (self.template is None) == (self.prompt_column is None):
            raise ValueError("a prompt is made from prompt_column or from template; set exactly one of them")
        if self.system is not None and self.chat is False:
            raise ValueError("system needs the chat template, but chat is false; put the text into template instead")
        return self
