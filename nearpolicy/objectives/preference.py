"""Losses on pairs and on labelled answers: preference optimisation, reward models, maximum likelihood.

Log-probabilities of whole answers, [B] sums over their trained tokens; ``beta`` is the strength of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """[B] -log sigmoid(beta (log-ratio of chosen - log-ratio of rejected)) (DPO, Rafailov et al. 2023, equation 7).

    ``label_smoothing`` e: the chance that a label is wrong; (1 - e) and e weigh the two signs (conservative DPO).
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """[B] (h - 1 / (2 beta))^2, h the difference of the two log-ratios (IPO, Azar et al. 2023, equation 17). Give means
    over tokens instead of sums to make it independent of length."""
    h = (chosen - reference_chosen) - (rejected - reference_rejected)
    return (h - 1.0 / (2.0 * beta)).square()


def kto(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """[B] weight (1 - v), v = sigmoid(beta (r - z)) for desirable and sigmoid(beta (z - r)) for undesirable answers, r
    the log-ratio (KTO, Ethayarajh et al. 2024, equation 7).

    ``kl``: scalar estimate z of KL(pi || reference), from mismatched pairs; used without gradient and not below 0.
    """
    r, z = logprobs - reference_logprobs, kl.detach().clamp(min=0.0)
    good = desirable_weight * (1.0 - torch.sigmoid(beta * (r - z)))
    bad = undesirable_weight * (1.0 - torch.sigmoid(beta * (z - r)))
    return torch.where(desirable, good, bad)


def best_and_worst(rewards_G: Sequence[float | None]) -> tuple[int, int] | None:
    """Online DPO's pair of a group: the samples with the highest and the lowest reward, first ones among equals; None
    where all scored samples have one reward (Guo et al. 2024; pairs as in Async RLHF, Noukhovitch et al. 2025)."""
    scored = [(reward, i) for i, reward in enumerate(rewards_G) if reward is not None]
    if len(scored) < 2:
        return None
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    return None if best[0] == worst[0] else (best[1], worst[1])


def bradley_terry(chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor | None = None) -> Tensor:
    """[B] -log sigmoid(s_chosen - s_rejected - margin): the reward model's loss (Bradley and Terry 1952; margins as in
    Llama 2, arXiv 2307.09288)."""
    difference = chosen_scores - rejected_scores
    return -logsigmoid(difference if margins is None else difference - margins)


def maximum_likelihood(logprobs: Tensor) -> Tensor:
    """[N] -log pi of given tokens: supervised fine-tuning."""
    return -logprobs
