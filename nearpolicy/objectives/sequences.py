"""Tokens laid out flat, and the sequences they belong to.

Every function of this folder that speaks of sequences gets the trained tokens alone, [N], and a `Sequences` beside
them. Padding, prompts and observations are not there to be counted by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within +-20 before they are exponentiated: exp(20) is 5e8, and neither float32 nor a gradient
overflows. What is held back has no gradient, and is counted (`held_back`)."""


def difference(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The log-ratio of two policies. Numbers stored in half precision are widened to float32 before they are
    subtracted."""
    return _wide(logprobs) - _wide(other_logprobs)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio of any shape, in float32 or better, finite for every finite input."""
    return _wide(log_ratio).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def held_back(log_ratio: Tensor) -> Tensor:
    """Bool, where `ratio` is not the true exponential."""
    return log_ratio.detach().abs() > LARGEST_LOG_RATIO


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Which of S sequences each of N tokens belongs to, in any order."""

    index: Tensor
    """[N] int64, from 0 to S - 1."""
    count: int
    """S; a sequence may have no token."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Sequences:
        """Sequences of these lengths, one after another."""
        counts = torch.as_tensor(lengths, dtype=torch.int64)
        return cls(torch.repeat_interleave(torch.arange(len(counts)), counts), len(counts))

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [S], added in float64: a sum over thousands of tokens keeps the digits of a float32."""
        return torch.zeros(self.count, dtype=torch.float64, device=values.device).index_add(
            0, self.index, values.double()
        )

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [S] float64; 0 where a sequence has no token."""
        return self.sum(values) / self.sizes().clamp(min=1)

    def sizes(self) -> Tensor:
        """[S] float64: tokens per sequence."""
        return self.sum(torch.ones_like(self.index))

    def spread(self, values: Tensor) -> Tensor:
        """[S] -> [N]: every token gets the value of its sequence."""
        return values[self.index]
