"""How the weights change, the supervised start before that, and what is kept of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from nearpolicy.models.targets import ALL_LINEAR
from nearpolicy.settings import ConfigModel, PathText


class LoraConfig(ConfigModel):
    """Low-rank adapters: W + alpha / rank * B A instead of W, where only A and B are trained. `learner.lora: {}` takes
    the defaults. A tenfold `learner.learning_rate` is a good start."""

    rank: PositiveInt = Field(16, validation_alias=AliasChoices("rank", "r"))
    """Rows of A and columns of B. Also accepted as `r`."""
    alpha: PositiveFloat = Field(32.0, validation_alias=AliasChoices("alpha", "lora_alpha"))
    """The adapter counts `alpha / rank` times. Also accepted as `lora_alpha`."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get an adapter: last names (`q_proj`) or whole ones, as in PEFT; `all-linear` is every linear layer
    but the output head."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name_may_stand_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("target_modules")
    @classmethod
    def _every_name_has_an_effect(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in names if names.count(name) > 1 or not name.strip(".")}):
            raise ValueError(f"names {', '.join(map(repr, twice))}, which is empty or there twice; leave it out")
        if not names:
            raise ValueError("is empty, so that nothing would be trained; name layers, or leave it out for all-linear")
        return names


class LearnerConfig(ConfigModel):
    """Section `learner`: AdamW, its schedule, and the size of what is computed at once."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate. 1e-6 suits billions of parameters, 1e-5 a hundred million, 1e-4 to 1e-3 tiny models."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or fall to 0 at `run.steps` in a straight line or half a cosine."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0 in a straight line."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW: decay of the two running means."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the root of the second mean."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW: decoupled weight decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm; `null` leaves them as they are (the norm is measured all the same)."""
    num_iterations: PositiveInt = 1
    """Passes over the batch of a step."""
    minibatches: PositiveInt = 1
    """Updates per pass; `queue.prompts_per_step` is cut into this many equal parts."""
    max_tokens_per_microbatch: PositiveInt = 2048
    """Tokens (prompt and completion) in one forward and backward pass: decides memory, never the result."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the layers and compute the rest again in the backward pass: less memory, a third more
    work."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Threads inside one operation of the learner. Left out: one while the engine works, all cores while it rests."""
    streaming: bool = True
    """Take up each group of a step as soon as it and those before it are there, while the others are still generated:
    the same micro-batches in the same order, and so the same bits, sooner. It happens where it can: with one update a
    step and no reference or critic, advantages that depend on their group alone, `queue.order: admission`, and a
    learner that does not take turns with its generators (`runtime.placement`)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights. Left out: all weights."""
    ranks: PositiveInt = 1
    """Processes that share the work and, in pieces (FSDP2), the weights, gradients and moments. They decide time and
    memory, never the result but for rounding."""
    replicas: PositiveInt = 1
    """Copies of the weights among the ranks, each spread over `ranks / replicas` of them; `replicas` equal to `ranks`
    cuts nothing."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory while it is not used: nothing, AdamW's moments, or the pieces of all weights with their
    gradients and moments, which AdamW then changes there. With `parameters` the ranks add up gradients after every
    micro-batch instead of every update, so that none holds whole ones."""

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.minibatches

    @model_validator(mode="after")
    def _ranks_are_divided_evenly(self) -> Self:
        if self.ranks % self.replicas:
            raise ValueError(
                f"learner.replicas is {self.replicas}, and learner.ranks={self.ranks} cannot be divided into as many "
                "equal parts; choose one that divides the other"
            )
        if self.offload == "parameters" and self.ranks == 1:
            raise ValueError(
                "learner.offload=parameters moves the pieces that ranks hold, and learner.ranks is 1; set "
                "learner.offload=optimizer, or more ranks"
            )
        return self

    @property
    def needs_processes(self) -> str | None:
        """The setting that one process with one device cannot follow, if there is one."""
        found = [name for name in ("ranks", "replicas") if getattr(self, name) > 1]
        found += ["offload"] if self.offload != "none" else []
        return f"learner.{found[0]}={getattr(self, found[0])}" if found else None


class CriticConfig(ConfigModel):
    """Section `critic`: the value model that `objective.advantage: gae` compares with, and `vtrace` if this section is
    there. It begins as the policy with a scalar head of zeros, and makes one update beside each of the policy's. The
    rest (schedule, AdamW, micro-batches) is that of `learner`; `objective.loss_agg` aggregates its loss too."""

    path: PathText | None = Field(None, min_length=1)
    """A model as in `model.path` with the policy's vocabulary, in `model.dtype`. Left out: the policy of version 0."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate; `learner.learning_rate` unless set. Others take 2 to 10 times the policy's."""
    clip: PositiveFloat | None = 0.5
    """Distance from the value at the start of the step beyond which a value is not drawn nearer to its target; `null`
    for the plain squared error. With one update per step it never acts."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Of `gae`: lambda of the returns that values are trained towards, apart from the policy's (decoupled GAE). 1 is
    the discounted return itself, unbiased whatever the values are."""
    pretraining_steps: NonNegativeInt = 0
    """First steps that train the critic alone, on samples of the policy as it is (value pretraining); the schedule of
    the policy's learning rate begins after them."""


class WarmStartConfig(ConfigModel):
    """Section `warm_start`: supervised steps on training prompts and their answers before step 0. The result is
    version 0."""

    steps: NonNegativeInt = 0
    """Supervised updates; 0 starts from the model as it is. Every task then needs an answer column."""
    learning_rate: PositiveFloat = 1e-4
    """Constant learning rate of the supervised updates."""
    batch_size: PositiveInt = 16
    """Prompts with answers per supervised update."""


class CheckpointConfig(ConfigModel):
    """Section `checkpoint`: Hugging Face folders with the full training state beside them."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: PositiveInt = 1
    """Checkpoints kept; older ones are removed after a newer one is complete."""
    keep_best: NonNegativeInt = 0
    """Checkpoints kept beside those for their held-out accuracy (the mean over tasks); needs `evaluation.every`."""
