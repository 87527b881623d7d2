"""Penalties that keep the policy near a reference, and the control of its entropy.

Which estimator goes where follows from gradients, not from taste (tokens drawn from the policy itself):

    in the reward   any estimator of KL(pi || reference); k1 is unbiased there
    in the loss     k2: its gradient is, in expectation, that of KL(pi || reference)
                    k3: its gradient is that of KL(reference || pi) at pi = reference, near it elsewhere
                    full: exact, value and gradient
                    k1: its gradient is zero in expectation; refused
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearpolicy.objectives.sequences import LARGEST_LOG_RATIO


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] log(pi / reference): unbiased estimate of KL(pi || reference), of either sign (Schulman 2020)."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] (log(pi / reference))^2 / 2: biased, never negative (Schulman 2020)."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] exp(d) - 1 - d, d = log(reference / pi): unbiased estimate of KL(pi || reference), never negative (Schulman
    2020).

    Computed in float64: d = 5e-5 gives 1.25e-9, which float32 would drown. Beyond d = 20 it goes on in a straight
    line, so that value and gradient are finite and still pull towards the reference.
    """
    d = (reference_logprobs - logprobs).double()
    near = d.clamp(max=LARGEST_LOG_RATIO)
    steep = torch.expm1(near)
    return (
        (steep - near + steep.detach() * (d - near))
        .clamp(min=0.0)
        .to(torch.promote_types(logprobs.dtype, torch.float32))
    )


def full_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[N] KL(p || q) = sum_v p (log p - log q) of two [N, V] tables of log-probabilities. Exact; 0 log 0 is 0."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum(dim=-1)


def next_entropy_coefficient(coefficient: float, entropy: float, *, target: float, step: float) -> float:
    """The coefficient of the entropy bonus after a step: up by ``step`` while the mean entropy [nats] is below
    ``target``, else down, never below 0 (adaptive entropy control of Skywork-OR1, arXiv 2505.22312, section 4)."""
    return max(0.0, coefficient + (step if entropy < target else -step))
