"""Importance weights from the behaviour policy (which sampled) to the proximal policy (start of the step)."""

from __future__ import annotations

import torch
from torch import Tensor


def token_truncate(proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Tensor:
    """[N] min(proximal / behaviour, cap) per token, without gradient (truncated importance sampling, Ionides 2008).

    With the engine and the learner at the same weights and exact numerics every weight is exactly 1.
    """
    log_ratio = proximal_logprobs.detach() - behavior_logprobs
    return log_ratio.clamp(max=_LARGEST).exp().clamp(max=cap)


_LARGEST = 80.0
"""exp(80) is finite in float32."""


def no_correction(behavior_logprobs: Tensor) -> Tensor:
    """[N] ones: the data are taken as if the proximal policy had sampled them."""
    return torch.ones_like(behavior_logprobs)
