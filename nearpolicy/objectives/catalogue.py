"""The parts an objective is put together from, and which of them go together. No torch, no pydantic.

A part *reads* settings, each with its default, and may *fix* axes that it decides by itself: a loss that weighs tokens
against the policy that sampled them fixes `correction`, for another weight would be applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One entry of an axis: `objective.advantage`, `objective.loss` or `objective.correction`."""

    reads: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `objective` that it uses -> their default; None where they may stay empty."""
    fixes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that it decides -> the only value they can have."""
    prefers: Mapping[str, Any] = field(default_factory=dict)
    """Axes that have another default beside it, and settings of the part that it prefers there."""
    by_sequence: bool = False
    """It needs all tokens of a rollout at once."""
    rejects: bool = False
    """It may take tokens out of the sum of the loss and its divisor."""
    smallest_group: int = 1
    """Completions per prompt that it needs."""
    greedy_baseline: bool = False
    """It compares them with a greedy completion of the prompt, which the environment has to ask for."""
    one_update: bool = False
    """It is right for a single update per step only."""
    by_token: bool = False
    """It gives the tokens of a rollout different advantages."""
    uses_values: bool = False
    """It takes the values of a critic where there is one."""
    needs_one_advantage: bool = False
    """It is right only if all tokens of a rollout have one advantage."""


_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
_MEANS = {"loss_agg": "seq_mean_token_mean"}
_NO_WEIGHT = {"correction": "none"}

LOSSES: Mapping[str, Part] = {
    "pg": Part(one_update=True),
    "ppo_clip": Part(reads={**_CLIP, "dual_clip": None}),
    "decoupled_ppo": Part(
        reads={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "proximal": "recomputed"},
        prefers={"correction": "token_mask", "correction_cap": 5.0, "correction_floor": None},
    ),
    "gspo": Part(reads={"clip_low": 3e-4, "clip_high": 4e-4}, fixes=_MEANS, by_sequence=True),
    "gspo_token": Part(reads={"clip_low": 3e-4, "clip_high": 4e-4}, fixes=_MEANS, by_sequence=True),
    "gmpo": Part(reads={"clip_low": 0.4, "clip_high": 0.4}, fixes=_MEANS, by_sequence=True, needs_one_advantage=True),
    "cispo": Part(reads={"clip_low": 1.0, "clip_high": 4.0}, fixes=_NO_WEIGHT),
    "sapo": Part(reads={"sapo_temperature_positive": 1.0, "sapo_temperature_negative": 1.05}),
    "aipo": Part(reads={"aipo_cap": 2.0}, fixes=_NO_WEIGHT),
    "kimi": Part(
        reads={"kimi_tau": 0.1}, fixes={"scale_rewards": "none", "loss_agg": "seq_mean_token_sum"}, by_sequence=True
    ),
    "dppo": Part(reads={"clip_low": 0.2, "clip_high": 0.2}, fixes=_NO_WEIGHT),
    "clip_cov": Part(reads={"clip_low": 0.2, "clip_high": 0.2, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0}),
    "kl_cov": Part(reads={"cov_share": 2e-3, "kl_cov_coef": 1.0}),
    "opd": Part(fixes={"advantage": "teacher", "scale_rewards": "none"}, one_update=True),
}

ADVANTAGES: Mapping[str, Part] = {
    "grpo": Part(reads={"scale_rewards": "group"}, smallest_group=2),
    "dr_grpo": Part(fixes={"scale_rewards": "none"}, smallest_group=2),
    "rloo": Part(fixes={"scale_rewards": "none"}, smallest_group=2),
    "reinforce": Part(fixes={"scale_rewards": "none"}),
    "reinforce_baseline": Part(fixes={"scale_rewards": "none"}),
    "reinforce_plus_plus": Part(reads={"gamma": 1.0}, fixes={"scale_rewards": "batch"}),
    "reinforce_plus_plus_baseline": Part(fixes={"scale_rewards": "batch"}, smallest_group=2),
    "remax": Part(fixes={"scale_rewards": "none"}, greedy_baseline=True),
    "opo": Part(fixes={"scale_rewards": "none"}, smallest_group=2),
    "grpo_passk": Part(reads={"pass_k": 4}, fixes={"scale_rewards": "none"}, smallest_group=2),
    "gae": Part(
        reads={"gamma": 1.0, "gae_lambda": 1.0, "gae_alpha": None, "scale_rewards": "batch"},
        by_token=True,
        uses_values=True,
    ),
    "vtrace": Part(
        reads={"gamma": 1.0, "vtrace_rho": 1.0, "vtrace_c": 1.0},
        fixes={"scale_rewards": "none", **_NO_WEIGHT},
        smallest_group=2,
        by_token=True,
        uses_values=True,
    ),
    "teacher": Part(fixes={"scale_rewards": "none"}),
}

CORRECTIONS: Mapping[str, Part] = {
    "none": Part(),
    "token_truncate": Part(reads={"correction_cap": 2.0, "correction_floor": None}),
    "token_mask": Part(
        reads={"correction_cap": 2.0, "correction_floor": 0.5, "correction_weighted": True}, rejects=True
    ),
    "sequence_truncate": Part(reads={"correction_cap": 5.0, "correction_floor": None}, by_sequence=True),
    "sequence_mask": Part(
        reads={"correction_cap": 3.0, "correction_floor": None, "correction_weighted": True},
        by_sequence=True,
        rejects=True,
    ),
    "geometric_mask": Part(reads={"correction_cap": 1.01, "correction_floor": 0.99}, by_sequence=True, rejects=True),
}

AXES: Mapping[str, Mapping[str, Part]] = {"loss": LOSSES, "advantage": ADVANTAGES, "correction": CORRECTIONS}
"""In the order in which they decide: an earlier axis may fix a later one."""


def chosen(settings: Mapping[str, Any]) -> Mapping[str, Part]:
    """Axis -> the part that these settings choose, as far as they name one that exists."""
    return {axis: parts[name] for axis, parts in AXES.items() if (name := settings.get(axis)) in parts}


def default_of(key: str, settings: Mapping[str, Any], otherwise: Any = None) -> Any:
    """What ``key`` is where nobody sets it: what a chosen part fixes, else what one prefers, else what the part that
    reads it says, else ``otherwise``."""
    parts = list(chosen(settings).values())
    for part in parts:
        if key in part.fixes:
            return part.fixes[key]
    if key in AXES or any(key in part.reads for part in parts):
        for part in parts:
            others = part.prefers.keys() & AXES.keys() - {key}
            if key in part.prefers and all(settings.get(axis) == part.prefers[axis] for axis in others):
                return part.prefers[key]
    for part in parts:
        if key in part.reads:
            return part.reads[key]
    return otherwise
