"""How two objectives differ on the same batch: direction, bias and variance of their gradients, from the parts of it
that each group of rollouts gives.

An update's gradient is (sum over groups of g_k) / (sum over groups of d_k), so resampling groups resamples updates
(bootstrap), and one pass over the batch is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupGradients:
    """What one objective says of a batch, group by group."""

    gradients: np.ndarray
    """[K, D] gradient of each group's sum of losses, before any division; D may be a sketch of the parameters."""
    losses: np.ndarray
    """[K] sums of losses."""
    divisors: np.ndarray
    """[K] what each group adds to the divisor."""
    means: Mapping[str, float]
    """Metrics of the batch under this objective."""

    @property
    def loss(self) -> float:
        total = self.divisors.sum()
        return float(self.losses.sum() / total) if total else 0.0

    def gradient(self) -> np.ndarray:
        """[D] gradient of the update."""
        return self.parts(np.ones(len(self.divisors))) @ self.gradients

    def parts(self, counts: np.ndarray) -> np.ndarray:
        """[..., K] factors of the groups' gradients in an update in which group k stands ``counts[..., k]`` times;
        zeros where nothing is left to divide by."""
        total = counts @ self.divisors
        return counts / np.where(total > 0, total, np.inf)[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far an objective's gradient is from a reference's, both relative to the length of the reference's."""

    bias: float
    """|E g - E g_ref| / |E g_ref|, with the batch's own groups as the expectation."""
    bias_low: float
    """2.5 % of the bootstrap."""
    bias_high: float
    """97.5 % of the bootstrap."""
    variance: float
    """E |g - E g|^2 / |E g_ref|^2 over resampled updates of the batch's size."""
    reference_variance: float
    """The same for the reference: below 1 the trade is good news for the objective."""


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    """Of the angle between two gradients; None where one of them is zero."""
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths > 0 else None


def distance(of: GroupGradients, reference: GroupGradients, *, rounds: int, seed: int) -> Distance | None:
    """Bias and variance by resampling groups ``rounds`` times, the same groups for both; None if the reference has no
    gradient."""
    length = np.linalg.norm(reference.gradient())
    if not length > 0:
        return None
    groups = len(of.divisors)
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1.0 / groups), size=rounds)
    own, theirs = of.parts(drawn), reference.parts(drawn)
    # Resampled gradients are sums of the same few vectors, so their inner products say everything.
    vectors = np.concatenate([of.gradients, reference.gradients])
    products = vectors @ vectors.T
    biases = _lengths(np.concatenate([own, -theirs], axis=1), products) / length
    low, high = np.quantile(biases, [0.025, 0.975])
    return Distance(
        bias=float(np.linalg.norm(of.gradient() - reference.gradient()) / length),
        bias_low=float(low),
        bias_high=float(high),
        variance=_variance(own, products[:groups, :groups]) / float(length) ** 2,
        reference_variance=_variance(theirs, products[groups:, groups:]) / float(length) ** 2,
    )


def _lengths(parts: np.ndarray, products: np.ndarray) -> np.ndarray:
    """[R] lengths of the sums of vectors with these factors [R, K], from the vectors' inner products."""
    return np.sqrt(np.einsum("rk,kl,rl->r", parts, products, parts, optimize=True).clip(min=0.0))


def _variance(parts: np.ndarray, products: np.ndarray) -> float:
    return float(np.square(_lengths(parts - parts.mean(axis=0), products)).mean())
