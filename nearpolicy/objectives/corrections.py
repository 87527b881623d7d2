"""Importance weights from the behaviour policy (which sampled) to the proximal policy (start of the step).

A correction gives every token a weight, and may reject tokens: those leave the sum of the loss and its divisor. Raw
ratios and applied weights are both reported, so that what the correction hides is seen.

Granularity: a token's ratio w_t = proximal_t / behaviour_t, a sequence's product of them, or its geometric mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearpolicy.objectives.sequences import Sequences, ratio


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What a correction says of N tokens; nothing in it has a gradient."""

    weights: Tensor
    """[N] factor of each token's loss."""
    kept: Tensor
    """[N] bool: False for tokens that leave both the sum and the divisor."""
    raw: Tensor
    """[N] ratio of each token before truncation or rejection."""


def none(proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Correction:
    """Weights of 1: the data are taken as if the proximal policy had sampled them. The ratio is only measured."""
    raw = ratio((proximal_logprobs - behavior_logprobs).detach())
    return Correction(torch.ones_like(raw), _all(raw), raw)


def token_truncate(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float, floor: float | None = None
) -> Correction:
    """Weights clip(w_t, floor, cap) (truncated importance sampling, Ionides 2008;
    against engine mismatch, Yao et al. 2025).

    With the engine and the learner at the same weights and exact numerics every weight is exactly 1.
    """
    raw = ratio((proximal_logprobs - behavior_logprobs).detach())
    return Correction(raw.clamp(min=floor, max=cap), _all(raw), raw)


def token_mask(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float, floor: float | None = None, weighted: bool
) -> Correction:
    """Tokens with w_t outside [floor, cap] are rejected; the others weigh w_t, or 1 if not ``weighted`` (IcePop, Ling
    team 2025)."""
    raw = ratio((proximal_logprobs - behavior_logprobs).detach())
    return Correction(raw if weighted else torch.ones_like(raw), _inside(raw, floor, cap), raw)


def sequence_truncate(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    *,
    cap: float,
    floor: float | None = None,
) -> Correction:
    """All tokens of a sequence weigh clip(prod_t w_t, floor, cap)."""
    product, raw = _products(proximal_logprobs, behavior_logprobs, sequences)
    return Correction(product.clamp(min=floor, max=cap), _all(raw), raw)


def sequence_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    *,
    cap: float,
    floor: float | None = None,
    weighted: bool,
) -> Correction:
    """Sequences with prod_t w_t outside [floor, cap] are rejected; tokens of the others weigh the product, or 1 if not
    ``weighted`` (masked importance sampling, Liu et al. 2025)."""
    product, raw = _products(proximal_logprobs, behavior_logprobs, sequences)
    return Correction(product if weighted else torch.ones_like(raw), _inside(product, floor, cap), raw)


def geometric_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    *,
    cap: float,
    floor: float | None = None,
) -> Correction:
    """Sequences whose geometric mean exp(mean_t log w_t) lies outside [floor, cap] are rejected, whatever their
    length; the tokens of the others weigh 1: a geometric mean is a distance, not an importance weight."""
    log_ratio = (proximal_logprobs - behavior_logprobs).detach()
    mean = ratio(sequences.spread(sequences.mean(log_ratio))).to(log_ratio.dtype)
    raw = ratio(log_ratio)
    return Correction(torch.ones_like(raw), _inside(mean, floor, cap), raw)


def _products(proximal: Tensor, behavior: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    log_ratio = (proximal - behavior).detach()
    raw = ratio(log_ratio)
    return ratio(sequences.spread(sequences.sum(log_ratio))).to(raw.dtype), raw


def _inside(values: Tensor, floor: float | None, cap: float) -> Tensor:
    return (values <= cap) & (values >= (0.0 if floor is None else floor))


def _all(like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool)
