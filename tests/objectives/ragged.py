"""What the proofs of the losses share: ragged batches in float64, and gradients of a formula by finite differences.

A formula is a plain function of lists of numbers, written from a paper. What stands in it under a stop-gradient it
computes from ``frozen``, a second copy of the current log-probabilities that the differences do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nearpolicy.objectives.sequences import Sequences

STEP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """A batch of N tokens in sequences that may be empty or interleaved. ``now`` etc. are log-probabilities."""

    index: list[int]
    count: int
    now: list[float]
    proximal: list[float]
    behavior: list[float]
    advantages: list[float]
    weights: list[float]
    mixing: list[float]
    """Coefficients of the tokens' losses, to see the whole Jacobian and not only the gradient of a sum."""

    @property
    def sequences(self) -> Sequences:
        return Sequences(torch.tensor(self.index, dtype=torch.int64), self.count)

    @property
    def tokens_of(self) -> list[list[int]]:
        return [[t for t, of in enumerate(self.index) if of == s] for s in range(self.count)]

    def tensor(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(getattr(self, name), dtype=dtype)

    @property
    def mask(self) -> np.ndarray:
        """[S, T] of the padded batch."""
        longest = max([1, *map(len, self.tokens_of)])
        return np.array([[t < len(tokens) for t in range(longest)] for tokens in self.tokens_of]).reshape(-1, longest)

    def padded(self, values: Sequence[float], *, padding: float = 0.0) -> np.ndarray:
        """[N] -> [S, T]: one row per sequence, as implementations want it that keep padding."""
        out = np.full(self.mask.shape, padding)
        for s, tokens in enumerate(self.tokens_of):
            out[s, : len(tokens)] = [values[t] for t in tokens]
        return out

    def flat(self, padded: np.ndarray) -> np.ndarray:
        """[S, T] -> [N]."""
        out = np.zeros(len(self.index))
        for s, tokens in enumerate(self.tokens_of):
            out[tokens] = padded[s, : len(tokens)]
        return out


@st.composite
def ragged(draw, *, smallest: int = 0, largest: int = 9, by_sequence: bool = False) -> Ragged:
    """Batches of ``smallest`` to ``largest`` tokens; the policies agree, are near, or are far (log-ratios around 2).

    ``by_sequence``: one advantage per sequence, as some losses demand.
    """
    count = draw(st.integers(min(smallest, 1), 4))
    index = draw(st.lists(st.integers(0, count - 1), min_size=smallest, max_size=largest)) if count else []
    distance = draw(st.sampled_from([0.0, 1e-3, 0.1, 0.5, 2.0]))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    now = -numbers.exponential(2.0, len(index))
    advantages = numbers.normal(size=count)[index] if by_sequence else numbers.normal(size=len(index))
    return Ragged(
        index=index,
        count=count,
        now=now.tolist(),
        proximal=(-abs(now + distance * numbers.normal(size=len(index)))).tolist(),
        behavior=(-abs(now + distance * numbers.normal(size=len(index)))).tolist(),
        advantages=np.asarray(advantages, dtype=np.float64).tolist(),
        weights=numbers.uniform(0.0, 2.0, len(index)).tolist(),
        mixing=numbers.normal(size=len(index)).tolist(),
    )


Formula = Callable[[Sequence[float], Sequence[float]], list[float]]
"""(moving, frozen) -> values."""


def differences(formula: Formula, at: Sequence[float], mixing: Sequence[float]) -> np.ndarray:
    """[3, N] gradient of sum_i mixing_i formula_i in the moving argument: to both sides, to the left, to the right."""

    def mixed(moving: Sequence[float]) -> float:
        return sum(c * value for c, value in zip(mixing, formula(moving, at), strict=True))

    here, slopes = mixed(at), []
    for t, x in enumerate(at):
        up, down = list(at), list(at)
        up[t], down[t] = x + STEP, x - STEP
        right, left = (mixed(up) - here) / STEP, (here - mixed(down)) / STEP
        slopes.append(((left + right) / 2, left, right))
    return np.array(slopes).T


def agrees(ours: Callable[[Tensor], Tensor], formula: Formula, at: Sequence[float], mixing: Sequence[float]) -> None:
    """``ours`` has the values of the formula at this point, and its gradient.

    Where the bound of a clip lies within a step, the slopes to the left and to the right differ: one of them is right.
    """
    moving = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    found = ours(moving)
    np.testing.assert_allclose(found.detach().numpy(), formula(at, at), rtol=1e-9, atol=1e-12)
    if not len(at):
        return
    (found * torch.tensor(mixing, dtype=torch.float64)).sum().backward()
    gradient, (central, left, right) = moving.grad.numpy(), differences(formula, at, mixing)
    scale = 1.0 + max(abs(x) for x in formula(at, at))
    at_a_kink = np.isclose(gradient, left, rtol=1e-4, atol=1e-5 * scale) | np.isclose(
        gradient, right, rtol=1e-4, atol=1e-5 * scale
    )
    at_a_kink &= ~np.isclose(left, right, rtol=1e-3, atol=1e-4 * scale)
    np.testing.assert_allclose(np.where(at_a_kink, central, gradient), central, rtol=1e-5, atol=1e-7 * scale)
