"""Policy losses per token. Which tokens count, and with what share, is the business of `aggregation`.

All take [N] tensors over trained tokens: ``logprobs`` of the current policy pi (with gradient), ``proximal_logprobs``
of the policy at the start of the step, ``advantages``, and ``weights`` of the behaviour correction (no gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_gradient(logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """[N] REINFORCE: -w A log pi (Williams 1992); the correction weight w carries no gradient."""
    return -weights * advantages * logprobs


def ppo_clip(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """[N] -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / proximal (Schulman et al. 2017, equation 7).

    The correction weight stands outside the minimum: it corrects which tokens were sampled, not how far pi may move
    (decoupled form, Hilton et al. 2022).
    """
    ratio = (logprobs - proximal_logprobs).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights * torch.minimum(ratio * advantages, clipped * advantages)


def clip_shares(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """[N] bool, [N] bool: tokens whose gradient the lower and the upper bound stops."""
    ratio = (logprobs.detach() - proximal_logprobs).exp()
    return (ratio < 1.0 - clip_low) & (advantages < 0), (ratio > 1.0 + clip_high) & (advantages > 0)
