"""Settings of rewards that are learned: judges, rubrics, reward models. `config` makes rewards of them.

A key of an endpoint never stands in a recipe, only the name of the environment variable that holds it: recipes are
copied into run folders and shown to others.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from nearpolicy.settings import ConfigModel, Seconds


def changed_keys(config: ConfigModel, keys: tuple[str, ...]) -> list[str]:
    """Those with another value than the default: a recipe that was resolved sets every key."""
    fields = type(config).model_fields
    return [key for key in keys if getattr(config, key) != fields[key].get_default(call_default_factory=True)]


def _compiles(pattern: str) -> str:
    import regex  # what searches with it, under a time limit

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


TimedExpression = Annotated[str, AfterValidator(_compiles)]
"""Text that the library `regex` accepts, which is not all that `re` does."""


# Who is asked


class EndpointConfig(ConfigModel):
    """An OpenAI-compatible endpoint. Rewards whose endpoints are equal, key by key, share its limits and its budget."""

    base_url: str
    """Up to the version, for example ``http://localhost:8000/v1``; ``/chat/completions`` is appended."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable with the key; left out: none is sent. The key itself belongs in no recipe."""
    timeout_s: Seconds = 60.0
    """Limit of one request."""
    retries: int = Field(default=4, ge=0, le=100)
    """Further attempts after faults of the machinery: no connection, no answer in time, statuses 408, 429 and 5xx."""
    backoff_s: float = Field(default=1.0, ge=0, le=600)
    """Wait before the first of them, doubled each time up to 60 s; ``Retry-After`` of the endpoint takes its place."""
    max_concurrency: int = Field(default=8, ge=1, le=10_000)
    """Requests at once."""
    requests_per_minute: float | None = Field(default=None, gt=0, le=1e9)
    """Requests are spread so that no more than this many begin in a minute (default: as they come)."""
    price_in: float = Field(default=0.0, ge=0, le=1e6)
    """Price of a million tokens read, in the currency of ``budget``."""
    price_out: float = Field(default=0.0, ge=0, le=1e6)
    """Price of a million tokens written."""
    budget: float | None = Field(default=None, gt=0, le=1e9)
    """Money a run may spend here. A request that could exceed it is not sent, and its verdict is failed."""

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", url):
            raise ValueError(f"base_url is {url!r}; write it as http://host:port/v1, with no key and no query in it")
        try:
            urlsplit(url).port  # noqa: B018  (it looks at the number when asked for it)
        except ValueError as error:
            raise ValueError(f"base_url is {url!r}: {error}") from None
        return url.rstrip("/")

    @model_validator(mode="after")
    def _budget_has_prices(self) -> Self:
        if self.budget is not None and not (self.price_in or self.price_out):
            raise ValueError("budget is set, but price_in and price_out are 0, so nothing would ever be spent")
        return self


_OF_ENDPOINTS = ("samples", "temperature", "max_answer_tokens", "reasoning", "response_format", "extra")


class JudgingConfig(ConfigModel):
    """Which language models judge, and how they are asked."""

    endpoint: EndpointConfig | None = None
    """Where they are served. Left out: `models` are Hugging Face folders (or `package:NAME`), computed in a process of
    their own; the verdict is then the expectation over the allowed answers, by their log-probabilities."""
    models: tuple[str, ...] = Field(min_length=1, max_length=16)
    """Their names; all of them judge."""
    samples: int = Field(default=1, ge=1, le=64)
    """Verdicts of each model."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Of these samples; only at 0 are verdicts remembered (`verifier.cache`)."""
    penalty: float = Field(default=0.0, ge=0, le=100)
    """The value is the mean over models and samples minus this many standard deviations: what they disagree on counts
    for less."""
    max_answer_tokens: int = Field(default=512, ge=1, le=100_000)
    """Tokens of one verdict; one that is cut off is no verdict."""
    reasoning: bool = False
    """Let the judge write down why before it decides, as a field of its answer."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is held to JSON. The answer is read with the same strictness whatever it is."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request (`seed`, `max_completion_tokens`, ...); null takes a field out."""
    show: tuple[str, ...] = ()
    """Columns of the row that the judge sees beside question and completion."""
    max_characters: int = Field(default=60_000, ge=1, le=10_000_000)
    """Longest material of one request; a longer one is not cut but not judged: the verdict is failed."""

    @model_validator(mode="after")
    def _judging_fits(self) -> Self:
        if len(set(self.models)) != len(self.models):
            raise ValueError(f"models names one twice: {', '.join(self.models)}; use `samples` for more verdicts of it")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples above 1 at temperature 0 would all be alike; set a temperature")
        if self.penalty and len(self.models) * self.samples == 1:
            raise ValueError("penalty needs more than one verdict: several models, or samples with a temperature")
        if self.endpoint is None and (changed := changed_keys(self, _OF_ENDPOINTS)):
            raise ValueError(f"{', '.join(changed)} have no effect without an endpoint: nothing is sampled")
        if ours := sorted({"model", "messages", "n", "stream"} & self.extra.keys()):
            raise ValueError(
                f"extra sets {', '.join(ours)}, which are not yours to set: one message is asked for and read"
            )
        unbounded = self.extra.get("max_tokens", 1) is None and "max_completion_tokens" not in self.extra
        if self.endpoint is not None and self.endpoint.budget is not None and unbounded:
            raise ValueError("extra takes max_tokens out, so nothing bounds the price of a request; set another bound")
        return self


class JudgeSettings(JudgingConfig):
    """What a judge is asked of one completion."""

    instructions: str = (
        "Judge how well the answer responds to the question. Right, complete and to the point is best; what is wrong, "
        "made up or beside the question is worst, however well it is written."
    )
    """What the judge shall look at; it goes into the system message. Data never does."""
    scale: tuple[int, int] = (1, 10)
    """Worst and best score; the value is the score mapped to 0 to 1."""
    labels: dict[str, float] = Field(default_factory=dict)
    """In place of a scale: allowed answers, each with its value, for example ``{wrong: 0, partly: 0.5, right: 1}``."""
    reference_column: str | None = None
    """Column with a right answer, shown as such."""
    against_column: str | None = None
    """Column with another answer. The judge then says which is better, once in each order: 1, 0.5 or 0, averaged. The
    parts `shown_first` and `shown_second` tell the orders apart."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(c for c in (*self.show, self.reference_column, self.against_column) if c is not None)

    @model_validator(mode="after")
    def _answers_fit(self) -> Self:
        low, high = self.scale
        if not low < high <= low + 100:
            raise ValueError(f"scale is {low} to {high}; write worst, best, at most 100 apart")
        given = changed_keys(self, ("scale", "labels", "against_column"))
        if len(given) > 1:
            raise ValueError(f"set one of {', '.join(given)}: each says what the judge may answer")
        if len(self.labels) == 1:
            raise ValueError("labels holds one answer; a judge needs two or more to choose from")
        return self


# A rubric


class _Item(ConfigModel):
    kind: str
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of its part of the verdict (default: the kind)."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of the value, relative to the other items."""

    @property
    def part(self) -> str:
        """The name in use."""
        return self.name or self.kind

    @property
    def columns(self) -> tuple[str, ...]:
        return ()


class CitesItem(_Item):
    """Every citation names a source that is there."""

    kind: Literal["cites"] = "cites"
    """Selects this item."""
    sources_column: str = "sources"
    """Column with the sources: a list, counted from 1, or a mapping from their names (or JSON text of one)."""
    marker: TimedExpression = r"\[(\w[\w.-]*)\]"
    """Regular expression of a citation; its first group is the number or name."""
    least: int = Field(default=1, ge=0, le=1000)
    """Citations there must be."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.sources_column,)


class QuotesItem(_Item):
    """Every quotation stands in the source, but for white space, case and the form of quote marks and dashes; with
    `...` in it, each part of it does, in this order."""

    kind: Literal["quotes"] = "quotes"
    """Selects this item."""
    source_column: str = "source"
    """Column with the text, or with texts as under `cites`."""
    least: int = Field(default=1, ge=0, le=1000)
    """Quotations there must be."""
    min_words: int = Field(default=3, ge=1, le=1000)
    """What is shorter is no quotation but a word in quote marks; parts beside `...` are no shorter either."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.source_column,)


class NumberItem(_Item):
    """A number of the completion matches the answer."""

    kind: Literal["number"] = "number"
    """Selects this item."""
    answer_column: str = "answer"
    """Column with the right number."""
    which: Literal["last", "any"] = "last"
    """Whether the last number must match, or one of them."""
    tolerance: float = Field(default=0.0, ge=0, le=1e12)
    """Largest difference."""
    relative: float = Field(default=0.0, ge=0, le=1)
    """Largest difference as a share of the right number; the larger of both counts."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer_column,)


class ContainsItem(_Item):
    """A text occurs in the completion."""

    kind: Literal["contains"] = "contains"
    """Selects this item."""
    text: str | None = Field(default=None, min_length=1)
    """The text."""
    column: str | None = None
    """Or the column that holds it; a list of texts must all occur."""
    ignore_case: bool = True
    """Compare without regard to upper and lower case."""

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.column is None):
            raise ValueError("set one of text and column")
        return self


class RegexItem(_Item):
    """A regular expression matches somewhere in the completion."""

    kind: Literal["regex"] = "regex"
    """Selects this item."""
    pattern: TimedExpression
    """The expression. One that is not done within a second gives a failed verdict."""


class MaxWordsItem(_Item):
    """The completion has no more words than this."""

    kind: Literal["max_words"] = "max_words"
    """Selects this item."""
    words: int = Field(ge=1, le=1_000_000)
    """How many; words are what stands between white space."""


class JudgeItem(_Item):
    """A question that only a judge can answer, with yes or no."""

    kind: Literal["judge"] = "judge"
    """Selects this item."""
    question: str = Field(min_length=1)
    """The question, so put that yes is good: "Does the answer name a limit of the method?" """


RubricItem = Annotated[
    CitesItem | QuotesItem | NumberItem | ContainsItem | RegexItem | MaxWordsItem | JudgeItem,
    Field(discriminator="kind"),
]


class RubricSettings(ConfigModel):
    """Weighted items, and who answers those that cannot be checked."""

    items: tuple[RubricItem, ...] = Field(min_length=1, max_length=100)
    """What a completion shall have. All that can be checked is checked first; the rest goes to `judge` in one
    request."""
    judge: JudgingConfig | None = None
    """Who answers the items of kind `judge`."""

    @property
    def questions(self) -> tuple[JudgeItem, ...]:
        """The items for the judge."""
        return tuple(item for item in self.items if isinstance(item, JudgeItem))

    @property
    def columns(self) -> tuple[str, ...]:
        shown = () if self.judge is None else self.judge.show
        return tuple(dict.fromkeys([*(column for item in self.items for column in item.columns), *shown]))

    @model_validator(mode="after")
    def _items_fit(self) -> Self:
        names = [item.part for item in self.items]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two items are named {twice[0]!r}; set `name` on one of them")
        if bool(self.questions) != (self.judge is not None):
            raise ValueError(
                "items of kind judge need the section `judge`, which says who answers them"
                if self.questions
                else "the section `judge` is set, but no item is of kind judge"
            )
        return self


# A reward model


class RewardModelSettings(ConfigModel):
    """A Hugging Face model with a head that scores, in a process of its own."""

    path: str
    """A Hugging Face folder or hub id with a sequence-classification head, or a token-classification head for
    `form: steps`."""
    form: Literal["whole", "steps"] = "whole"
    """whole: one score of the completion. steps: a process reward model, one score per step of it."""
    label: int = Field(default=-1, ge=-1, le=10_000)
    """The output that counts, where the head has several; the last one unless set."""
    activation: Literal["none", "sigmoid", "softmax"] | None = None
    """What makes a score of an output. Left out: none for a head with one output, softmax for one with several."""
    separator: str = Field(default="\n\n", min_length=1)
    """steps: what stands between the steps of a completion."""
    step_token: str = Field(default="\n", min_length=1)
    """steps: the token put after each step, at which the head is read; exactly one token of the model's tokenizer."""
    aggregate: Literal["min", "mean", "last", "sum", "product"] = "min"
    """steps: what makes one value of the scores."""
    chat: bool | None = None
    """Through the model's chat template. Left out: if its tokenizer has one."""
    template: str = "{prompt}\n\n{completion}"
    """Without a chat template: how prompt and completion are put together."""
    max_tokens: int | None = Field(default=None, ge=2, le=10_000_000)
    """Longest input (default: what the model was made for)."""
    on_overlong: Literal["fail", "keep_start", "keep_end"] = "fail"
    """A longer input: the verdict is failed, or its end or its beginning is cut off."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers it is computed in."""
    device: Literal["cpu", "auto"] = "cpu"
    """auto: the first accelerator, if there is one."""
    batch_size: int = Field(default=16, ge=1, le=4096)
    """Completions computed together."""
    batch_tokens: int = Field(default=16_384, ge=1, le=10_000_000)
    """Tokens computed together, padding included; one longer input goes alone."""
    window_s: float = Field(default=0.01, ge=0, le=60)
    """How long the first completion of a batch waits for others."""
    timeout_s: Seconds = 120.0
    """Limit of one batch; a process that exceeds it is killed and replaced."""

    @model_validator(mode="after")
    def _form_fits(self) -> Self:
        changed = changed_keys(self, ("separator", "step_token", "aggregate"))
        if self.form == "whole" and changed:
            raise ValueError(f"{', '.join(changed)} have no effect with form: whole; set form: steps")
        if "{completion}" not in self.template:
            raise ValueError(f"template is {self.template!r}; it must hold {{completion}}")
        if self.form == "steps" and self.on_overlong == "keep_start":
            raise ValueError("on_overlong: keep_start would cut the last steps off; use fail or keep_end")
        return self
