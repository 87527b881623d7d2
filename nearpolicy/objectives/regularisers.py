"""Penalties that keep the policy near a reference, and the control of its entropy.

Which estimator goes where follows from gradients, not from taste (tokens drawn from the policy itself):

    in the reward   k1 and k3 have the mean KL(pi || reference), k2 only near it. k1 as the reward of its token gives
                    policy gradient the gradient of the KL of whole sequences
    in the loss     position by position, what came before taken as given:
                    k2: its gradient is, in expectation, that of KL(pi || reference)
                    k3: its gradient is, in expectation, that of KL(reference || pi)
                    full: KL(pi || reference), value and gradient, without sampling noise
                    k1: its gradient is zero in expectation; refused
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearpolicy.objectives.sequences import LARGEST_LOG_RATIO, difference


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] log(pi / reference): unbiased estimate of KL(pi || reference), of either sign (Schulman 2020)."""
    return difference(logprobs, reference_logprobs)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] (log(pi / reference))^2 / 2: biased, never negative (Schulman 2020)."""
    return 0.5 * difference(logprobs, reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] exp(d) - 1 - d, d = log(reference / pi): unbiased estimate of KL(pi || reference), never negative (Schulman
    2020).

    Computed in float64: d = 5e-5 gives 1.25e-9, which float32 would drown. Beyond d = 20 it goes on in a straight
    line, so that value and gradient are finite and still pull towards the reference.
    """
    d = difference(reference_logprobs, logprobs)
    near = d.double().clamp(max=LARGEST_LOG_RATIO)
    steep = torch.expm1(near)
    return (steep - near + steep * (d - near)).clamp(min=0.0).to(d.dtype)


def full_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[N] KL(p || q) = sum_v p (log p - log q) of two [N, V] tables of log-probabilities. Exact; 0 log 0 is 0, without
    gradient. Infinite where q = 0 < p."""
    gap = difference(log_p, log_q)
    p = log_p.to(gap.dtype).exp()
    return (p * torch.where(p > 0, gap, 0.0)).sum(dim=-1)


def next_entropy_coefficient(coefficient: float, entropy: float, *, target: float, step: float) -> float:
    """The coefficient of the entropy bonus after a step: up by ``step`` while the mean entropy [nats] is below
    ``target``, else down, never below 0 (adaptive entropy control of Skywork-OR1, arXiv 2505.22312, which
    leaves the bonus out of the steps above the target)."""
    return max(0.0, coefficient + (step if entropy < target else -step))
