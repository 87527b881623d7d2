"""How far generation may run ahead of training, and how long anything may wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from nearpolicy.settings import ConfigModel, Seconds

HOPELESS_ROUNDS = 3
LEAST_HOPELESS = 6


def hopeless_after(num_slots: int, *, has_worked: bool) -> int:
    """Failed groups in a row after which a run ends: whatever fails them will fail the next ones.

    One round of all slots if no group has ever succeeded; several rounds once one has, since what worked before may
    only be disturbed; but never fewer groups than chance may fail.
    """
    return max(LEAST_HOPELESS, num_slots * (HOPELESS_ROUNDS if has_worked else 1))


def _longer_than_hopeless(others: Mapping[str, Any]) -> float:
    """Time for so many groups to fail one after the other, and half a group more: the reason comes first."""
    num_slots = (others["max_staleness"] + 1) * others["prompts_per_step"]
    rounds = math.ceil(hopeless_after(num_slots, has_worked=True) / num_slots)
    return (rounds + 0.5) * longest_rollout_s(others["rollout_timeout_s"], others["rollout_retries"])


class ReplayConfig(ConfigModel):
    """Section `queue.replay`: train successes of earlier steps once more, beside the groups of each step (arXiv
    2507.07451)."""

    share: float = Field(gt=0, le=1)
    """Groups drawn from earlier steps for each group of a step; at least one, and none while there are none."""
    min_reward: float
    """A completion is a success from this reward on. Of a group that is drawn the successes are trained, with the
    advantages that they have in their group; groups without spread have none."""
    max_age: PositiveInt = 50
    """Bound on the age of a group that is drawn: steps completed since the oldest weights among its tokens."""


class QueueConfig(ConfigModel):
    """Section `queue`: groups between generation and training."""

    prompts_per_step: int = Field(8, ge=1, le=100_000)
    """Groups consumed by one step (which makes `learner.num_iterations` x `learner.minibatches` updates)."""
    max_staleness: int = Field(1, ge=0, le=10_000)
    """Bound on the age of a group when it is consumed: steps completed since the oldest weights among its tokens.
    0 is synchronous training."""
    order: Literal["admission", "ready"] = "admission"
    """`admission`: groups are consumed in the order of their prompts, whatever ends first. With `max_staleness: 0` the
    run can then be repeated bit for bit; above it which weights sample a token depends on time, and only what was
    recorded can be trained on again. `ready`: finished groups go first as far as the bound allows; faster with
    stragglers."""
    at_bound: Literal["wait", "drop", "requeue"] = "wait"
    """With `order: ready`, what happens to groups that would pass the bound. `wait`: the learner waits for them in
    time. `drop`: it does not; groups beyond the bound, finished or not, expire after the step. `requeue`: their prompts
    are asked once more."""
    soft_staleness: int | None = Field(None, ge=0, le=10_000)
    """Below the bound: groups older than this count less, the more the older they are (half at one step beyond it, a
    third at two, ...): their advantages are multiplied. Left out: all count alike."""
    adaptive_slots: bool = False
    """While the learner is the bottleneck (it never waits, and a batch is ready), admit fewer groups at a time, one
    batch less after each publication, so that they are younger when they are consumed; more again when it waits. Never
    fewer than `sync.weight_sync_steps * prompts_per_step`."""
    drop_zero_variance_groups: bool = False
    """Leave groups whose scored completions all have one reward (with `remax`: that of the greedy one) out of the
    batch. Their place stays empty; the divisor counts what is left."""
    max_pass_rate: float | None = Field(None, gt=0, le=1)
    """Leave groups out, in the same way, whose share of right completions (reward 1 or more) is this or higher."""
    dynamic_sampling: bool = False
    """Fill the places of groups that are left out, those without spread among them, with groups of later prompts."""
    max_rounds: PositiveInt | None = Field(
        default_factory=lambda others: 10 if others.get("dynamic_sampling") else None
    )
    """With `dynamic_sampling`: the groups of a step are sought among this many times `prompts_per_step` prompts. If
    they do not suffice the run saves its state and stops. 10 unless set."""
    replay: ReplayConfig | None = None
    """Train successes of earlier steps once more. Their tokens are counted apart (fate `replayed`), and they have their
    own bound on age; `objective.correction` weighs them."""
    rollout_timeout_s: Seconds = 600.0
    """Bound on one attempt at a prompt, generation and verification together."""
    rollout_retries: int = Field(1, ge=0, le=100)
    """Further attempts, with the same random numbers, before a prompt is given up as failed."""
    stall_timeout_s: float = Field(default_factory=_longer_than_hopeless, gt=0, le=1e9)
    """Bound on the learner's wait for a batch; when it is passed the run stops and says who waited for whom. Left out:
    3.5 times what one prompt may take with its retries, `rollout_timeout_s * (1 + rollout_retries)` (more with fewer
    than two slots), so that a run in which everything fails ends with the reason of the failures before that. Less than
    the product is refused."""

    @model_validator(mode="after")
    def _a_slow_prompt_is_no_standstill(self) -> Self:
        longest = longest_rollout_s(self.rollout_timeout_s, self.rollout_retries)
        if self.stall_timeout_s < longest:
            raise ValueError(
                f"queue.stall_timeout_s={self.stall_timeout_s:g} would end the run while one prompt may still take "
                f"rollout_timeout_s * (1 + rollout_retries) = {longest:g} s; raise it, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _soft_is_below_hard(self) -> Self:
        if self.soft_staleness is not None and self.soft_staleness >= self.max_staleness:
            raise ValueError(
                f"queue.soft_staleness={self.soft_staleness} has no effect: no group is consumed beyond "
                f"queue.max_staleness={self.max_staleness}; make it smaller or leave it out"
            )
        if self.adaptive_slots and self.max_staleness == 0:
            raise ValueError("queue.adaptive_slots has no effect with queue.max_staleness=0; leave it out")
        return self

    @model_validator(mode="after")
    def _dropping_belongs_to_ready(self) -> Self:
        if self.at_bound != "wait" and self.order != "ready":
            raise ValueError(
                f"queue.at_bound={self.at_bound} has no effect with queue.order={self.order}, where the learner waits "
                "for each group in turn; set queue.order: ready or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _rounds_belong_to_dynamic_sampling(self) -> Self:
        if not self.dynamic_sampling and self.max_rounds is not None:
            raise ValueError(
                f"queue.max_rounds={self.max_rounds} has no effect without queue.dynamic_sampling; leave it out"
            )
        if self.dynamic_sampling and (self.max_rounds or 0) <= self.max_staleness:
            raise ValueError(
                f"queue.max_rounds={self.max_rounds} would keep generation from running queue.max_staleness="
                f"{self.max_staleness} steps ahead; use at least {self.max_staleness + 1}"
            )
        return self

    @property
    def leaves_out(self) -> bool:
        """Whether any group may be left out for its rewards."""
        return self.drop_zero_variance_groups or self.dynamic_sampling or self.max_pass_rate is not None

    @property
    def num_slots(self) -> int:
        """Groups admitted but not yet in published weights, at most, but for `generator.oversample`."""
        return (self.max_staleness + 1) * self.prompts_per_step


def longest_rollout_s(rollout_timeout_s: float, rollout_retries: int) -> float:
    """What one prompt may take before it is given up."""
    return rollout_timeout_s * (1 + rollout_retries)
