"""Importance weights from the behaviour policy (which sampled) to the proximal policy (start of the step).

A correction gives every token a weight, and may reject tokens: those leave the sum of the loss and its divisor. Raw
ratios and applied weights are both reported, so that what the correction hides is seen.

Granularity: a token's ratio w_t = proximal_t / behaviour_t, a sequence's product of them, or its geometric mean. With
the product and without bounds the expected gradient is exactly that of the proximal policy; everything else here trades
some of that for less variance. A token's own ratio corrects the choice of the token, not how often its prefix came up
or what followed: it is exact for sequences of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearpolicy.objectives.sequences import Sequences, difference, ratio


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
    raw = ratio(_log_ratio(proximal_logprobs, behavior_logprobs))
    return Correction(torch.ones_like(raw), _all(raw), raw)


def token_truncate(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float, floor: float | None = None
) -> Correction:
    """Weights clip(w_t, floor, cap) (truncated importance sampling, Ionides 2008;
    against engine mismatch, Yao et al. 2025).

    With the engine and the learner at the same weights and exact numerics every weight is exactly 1.
    """
    raw = ratio(_log_ratio(proximal_logprobs, behavior_logprobs))
    return Correction(raw.clamp(min=floor, max=cap), _all(raw), raw)


def token_mask(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float, floor: float | None = None, weighted: bool
) -> Correction:
    """Tokens with w_t outside [floor, cap] are rejected; the others weigh w_t, or 1 if not ``weighted`` (IcePop, Ling
    team 2025)."""
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs)
    raw = ratio(log_ratio)
    return Correction(raw if weighted else torch.ones_like(raw), _inside(log_ratio, floor, cap), raw)


def sequence_truncate(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    *,
    cap: float,
    floor: float | None = None,
) -> Correction:
    """All tokens of a sequence weigh clip(prod_t w_t, floor, cap)."""
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs)
    raw, product = ratio(log_ratio), ratio(sequences.spread(sequences.sum(log_ratio)))
    return Correction(product.clamp(min=floor, max=cap).to(raw.dtype), _all(raw), raw)


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
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs)
    log_product = sequences.spread(sequences.sum(log_ratio))
    raw = ratio(log_ratio)
    weights = ratio(log_product).to(raw.dtype) if weighted else torch.ones_like(raw)
    return Correction(weights, _inside(log_product, floor, cap), raw)


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
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs)
    raw = ratio(log_ratio)
    return Correction(torch.ones_like(raw), _inside(sequences.spread(sequences.mean(log_ratio)), floor, cap), raw)


def _log_ratio(proximal: Tensor, behavior: Tensor) -> Tensor:
    return difference(proximal, behavior).detach()


def _inside(log_ratio: Tensor, floor: float | None, cap: float) -> Tensor:
    """Decided on the true exponential, infinity and 0 among them, and not on one that is held back."""
    true = log_ratio.exp()
    return (true <= cap) & (true >= (0.0 if floor is None else floor))


def _all(like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool)
