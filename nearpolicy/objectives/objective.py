"""An objective put together from its parts: advantage x loss x correction x aggregation.

The parts meet in two places. `assign_advantages` runs in the pipeline, on rewards alone. `Objective.token_losses` runs
in the learner, on log-probabilities. Neither knows about micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nearpolicy.objectives import advantages, aggregation
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Finish, Group, Row

if TYPE_CHECKING:
    from torch import Tensor


def assign_advantages(groups: Sequence[Group], config: ObjectiveConfig) -> tuple[Row, ...]:
    """One `Row` per segment, in (group, sample, segment) order.

    Tokens of unscored rollouts, and of truncated ones where the objective masks them, are not trained.
    """
    rows = []
    for group in groups:
        values = advantages.grpo(group.rewards, scale=config.scale_rewards == "group")
        for rollout, reward, value in zip(group.rollouts, group.rewards, values, strict=True):
            cut = config.mask_truncated_completions and rollout.finish is not Finish.STOP
            for segment in rollout.segments:
                trained = segment.mask & (reward is not None and not cut)
                rows.append(
                    Row(
                        group=group.index,
                        sample=rollout.sample,
                        segment=segment,
                        trained=trained,
                        advantages=np.where(trained, np.float32(value), np.float32(0.0)),
                    )
                )
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Objective:
    """What the learner needs to know of an objective."""

    config: ObjectiveConfig
    max_completion_length: int

    def shares(self, trained_tokens: Sequence[int]) -> np.ndarray:
        """[S] share of each trained token, per sequence of one update."""
        return aggregation.token_shares(trained_tokens, self.config.loss_agg, self.max_completion_length)

    @property
    def skips_zero_advantage(self) -> bool:
        """Tokens with advantage 0 add nothing to loss or gradient, so their forward pass can be left out."""
        return True

    def token_losses(
        self, logprobs: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses, and [N] diagnostics whose token means are logged under their names."""
        from nearpolicy.objectives import corrections, losses

        config = self.config
        if config.correction == "token_truncate":
            weights = corrections.token_truncate(proximal_logprobs, behavior_logprobs, cap=config.correction_cap)
        else:
            weights = corrections.no_correction(behavior_logprobs)
        named = {"correction/weight_mean": weights}
        if config.loss == "pg":
            return losses.policy_gradient(logprobs, advantages, weights), named
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        low, high = losses.clip_shares(logprobs, proximal_logprobs, advantages, **clip)
        named |= {"policy/clip_low_share": low.float(), "policy/clip_high_share": high.float()}
        return losses.ppo_clip(logprobs, proximal_logprobs, advantages, weights, **clip), named


@dataclass(frozen=True, slots=True)
class Supervised:
    """Maximum likelihood of given tokens: what a warm start trains with. Shares are those of a token mean."""

    skips_zero_advantage = False

    def shares(self, trained_tokens: Sequence[int]) -> np.ndarray:
        return aggregation.token_shares(trained_tokens, "token_mean", 1)

    def token_losses(
        self, logprobs: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {}
