"""How far generation may run ahead of training, and how long anything may wait."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from nearpolicy.settings import ConfigModel


class QueueConfig(ConfigModel):
    """Section `queue`: groups between generation and training."""

    prompts_per_step: PositiveInt = 8
    """Groups consumed by one step (which makes `learner.num_iterations` x `learner.minibatches` updates)."""
    max_staleness: NonNegativeInt = 1
    """Bound on the age of a group when it is consumed: steps completed since the oldest weights among its tokens.
    0 is synchronous training."""
    order: Literal["admission", "ready"] = "admission"
    """`admission`: groups are consumed in the order of their prompts, whatever ends first; the run can be repeated
    bit for bit. `ready`: finished groups go first as far as the bound allows; faster with stragglers, not
    repeatable."""
    rollout_timeout_s: PositiveFloat = 600.0
    """Bound on one attempt at a prompt, generation and verification together."""
    rollout_retries: NonNegativeInt = 1
    """Further attempts, with the same random numbers, before a prompt is given up as failed."""
    stall_timeout_s: PositiveFloat = 900.0
    """Bound on the learner's wait for a batch; when it is passed the run stops and says who waited for whom."""

    @property
    def num_slots(self) -> int:
        """Groups admitted but not yet in published weights, at most."""
        return (self.max_staleness + 1) * self.prompts_per_step
