"""How completions are drawn, and how much the engine takes on at once."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from nearpolicy.settings import ConfigModel

COLDEST = 0.001
"""Smallest temperature that is not 0."""
NO_BFLOAT16 = (
    "generator.weights=bfloat16 needs a processor with products in bfloat16 (AVX512_BF16 or AMX), which this one does "
    "not have: imitating them is 1.7 to 3.7 times slower than float32; leave it out"
)


class SamplingConfig(ConfigModel):
    """Section `sampling`: how training completions are drawn. Evaluation has its own temperature and lengths."""

    num_generations: PositiveInt = Field(8, validation_alias=AliasChoices("num_generations", "group_size"))
    """Completions per prompt, the size of a group. Also accepted as `group_size`."""
    max_completion_length: PositiveInt = Field(
        256, validation_alias=AliasChoices("max_completion_length", "max_new_tokens")
    )
    """Longest completion in tokens, the stop token included. Also accepted as `max_new_tokens`."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens, counted as the engine sees it: with the chat template, the system message and the begin
    token. What happens to longer ones is `tasks.N.on_overlong`."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Divides the logits, in the engine and in the learner. 0 is refused: groups of equal completions teach nothing."""
    top_p: float = Field(1.0, ge=0.001, le=1)
    """Keep the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: NonNegativeInt = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Keep tokens with at least this share of the largest probability; 0 keeps all."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion, beside the stop tokens of model and tokenizer."""

    @property
    def leaves_out(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @field_validator("temperature")
    @classmethod
    def _training_needs_chance(cls, temperature: float) -> float:
        if temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: all completions of a prompt would be the same, so no group could have an "
                "advantage and log-probabilities would be undefined; use 1.0 (evaluation.temperature may be 0)"
            )
        if temperature < COLDEST:
            raise ValueError(
                f"sampling.temperature is {temperature:g}: logits divided by it leave the range of numbers; use at "
                f"least {COLDEST:g}"
            )
        return temperature

    @field_validator("top_k")
    @classmethod
    def _training_needs_a_choice(cls, top_k: int) -> int:
        if top_k == 1:
            raise ValueError(
                "sampling.top_k is 1: all completions of a prompt would be the same, so no group could have an "
                "advantage; use 0 to keep all tokens, or a larger number"
            )
        return top_k


class GeneratorConfig(ConfigModel):
    """Section `generator`: the embedded engine."""

    on_sync: Literal["finish", "resume", "continue"] = "finish"
    """What happens to running sequences when new weights arrive. `finish`: they end under the weights they started
    with, new ones wait (after `sync.timeout_s` as `resume`). `resume`: they pause, their prefix is computed again
    under the new weights, and they go on. `continue`: they go on at once, on the keys and values that the old weights
    made of their past tokens: no work is done twice, and their new tokens come from a mixture of both weights that the
    learner cannot repeat, so engine and learner differ there even with exact numerics. Every token keeps the version
    that sampled it."""
    replicas: PositiveInt = Field(1, le=100_000)
    """With `runtime.kind: ray`: engines, each in an actor of its own with all weights."""
    most_replicas: PositiveInt | None = Field(None, le=100_000)
    """With `runtime.kind: ray`: engines that there may be at a time. Beyond `replicas` they join whenever the cluster
    has room for one, also while the run goes on, and leave with their node. Left out: `replicas`."""
    oversample: float = Field(1.0, ge=1, le=16)
    """Groups that may be generated at once, as a multiple of what the bound on staleness has room for. Above 1 the
    learner takes the groups that end first and slow ones are left behind, so `queue.order: ready` with
    `queue.at_bound: drop` or `requeue` is needed; with `on_sync: resume` or `continue` unfinished completions go on
    under newer weights. A share of at least `1 - 1 / oversample` of all groups then expires, long completions first."""
    max_running: PositiveInt = 64
    """Sequences decoded at once."""
    kv_memory_mb: float | None = Field(None, gt=0, le=1e9)
    """Bound on the memory for keys and values. Left out: enough for `max_running` sequences of full length."""
    weights: Literal["same", "bfloat16"] = "same"
    """The form of the weights that the engine computes from. `same`: that of `model.dtype`, as the learner. `bfloat16`:
    its linear layers compute from copies in bfloat16, made anew at every publication; 1.4 to 2 times as fast on
    processors with products in bfloat16 (AVX512_BF16, AMX) and refused on others. Engine and learner then differ even
    without staleness, so it needs `run.numerics: fast`; `mismatch/*` reports the difference and
    `objective.correction` corrects for it. It takes half as much memory as the weights, beside them."""
    prefill_chunk: PositiveInt = 512
    """Prompt tokens computed in one forward pass beside the running sequences."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Threads inside one operation of the engine. Left out: one while the learner works, all cores while it rests."""

    @model_validator(mode="after")
    def _most_are_no_fewer(self) -> Self:
        if self.most_replicas is not None and self.most_replicas <= self.replicas:
            raise ValueError(
                f"generator.most_replicas={self.most_replicas} adds none to generator.replicas={self.replicas}; raise "
                "it, or leave it out"
            )
        return self

    @property
    def most(self) -> int:
        """Engines that there may be at a time."""
        return self.most_replicas or self.replicas
