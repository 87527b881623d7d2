"""What is optimised: advantages, loss, divisor, and the correction for the lag between generator and learner."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nearpolicy.settings import ConfigModel


def _with_clipping(value: float) -> Any:
    return lambda data: value if data.get("loss") == "ppo_clip" else None


class ObjectiveConfig(ConfigModel):
    """Section `objective`: from rewards to a loss."""

    advantage: Literal["grpo"] = "grpo"
    """`grpo`: the reward minus the mean of its group."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide advantages by the spread of rewards within the group, or not at all."""
    loss: Literal["pg", "ppo_clip"] = "ppo_clip"
    """`pg`: plain policy gradient, for one update per step. `ppo_clip`: the ratio to the policy at the start of the
    step is clipped; with one update per step both give the same gradient."""
    clip_low: float | None = Field(default_factory=_with_clipping(0.2), gt=0, lt=1)
    """Distance below 1 at which `ppo_clip` clips the ratio; 0.2 unless set. Refused with another loss."""
    clip_high: float | None = Field(default_factory=_with_clipping(0.28), gt=0)
    """Distance above 1 at which `ppo_clip` clips the ratio; 0.28 unless set. Refused with another loss."""
    loss_agg: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """Divisor: all trained tokens of the batch; each completion's own tokens, then the number of completions; or
    the number of completions times `sampling.max_completion_length`."""
    correction: Literal["none", "token_truncate"] = "token_truncate"
    """Weight for the difference between the policy that sampled a token and the policy at the start of the step:
    `token_truncate` multiplies each token by that ratio, at most `correction_cap`. `none` only measures it."""
    correction_cap: float | None = Field(
        default_factory=lambda data: 2.0 if data.get("correction") == "token_truncate" else None, gt=0
    )
    """Largest correction weight; 2.0 unless set. Refused with `correction: none`."""
    mask_truncated_completions: bool = False
    """Keep completions cut by the length limit out of the loss (they still count in their group's mean)."""

    @model_validator(mode="after")
    def _every_number_has_a_use(self) -> Self:
        for key in ("clip_low", "clip_high"):
            self._used_exactly_if(key, "loss", "ppo_clip")
        self._used_exactly_if("correction_cap", "correction", "token_truncate")
        return self

    def _used_exactly_if(self, key: str, switch: str, needed: str) -> None:
        value, chosen = getattr(self, key), getattr(self, switch)
        if value is not None and chosen != needed:
            raise ValueError(
                f"objective.{key}={value} has no effect with objective.{switch}={chosen}; "
                f"leave it out or set objective.{switch}: {needed}"
            )
        if value is None and chosen == needed:
            raise ValueError(
                f"objective.{key} is empty, but objective.{switch}={chosen} needs it; leave it out for its default"
            )
