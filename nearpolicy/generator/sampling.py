"""Drawing tokens: pure functions of logits and of counter-based random numbers.

A random number depends on (seed, admission, sample, turn, position, purpose) and on nothing else: not on the order of
arrival, not on the neighbours in the batch, not on how often a sequence was interrupted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nearpolicy.models.policy import log_softmax, restricted
from nearpolicy.roles import Request, Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256
"""Columns summed first when a cumulative distribution is inverted in two levels."""


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sequence_key(request: Request, sample: int) -> int:
    """The 64-bit key of one sequence's random numbers."""
    purpose = zlib.crc32(request.purpose.encode())
    key = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in (request.seed, purpose, request.admission, request.turn, sample):
            key = _mix((key ^ np.uint64(word & 0xFFFF_FFFF_FFFF_FFFF)) + _GOLDEN)
    return int(key[0])


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[B] float64 in [0, 1): the number of each sequence (by key) at each of its completion positions."""
    with np.errstate(over="ignore"):
        counters = np.asarray(positions, dtype=np.uint64) * _GOLDEN
        words = _mix(_mix(np.asarray(keys, dtype=np.uint64) + counters + _GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampled_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] log-probabilities of the distribution tokens are really drawn from; -inf where nothing can be drawn.

    Order: temperature, then top-k, top-p, min-p on the tempered distribution, then renormalisation over what is left.
    Temperature 0 is the point mass on the first largest logit. Logits that are not finite give NaN at any temperature.
    """
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        point = torch.full_like(logits, float("-inf"), dtype=torch.float32).scatter_(1, best, 0.0)
        return point.masked_fill(~logits.gather(1, best).isfinite(), float("nan"))
    logprobs = log_softmax(logits, sampling.temperature)
    kept = kept_tokens(logprobs, sampling)
    if kept is None:
        return logprobs
    return restricted(logprobs, kept, float("-inf"))


def kept_tokens(logprobs: Tensor, sampling: Sampling) -> Tensor | None:
    """[B, V] bool: the tokens that top-k, top-p and min-p leave, or None if they leave all. At least one stays."""
    vocabulary = logprobs.shape[-1]
    kept: Tensor | None = None
    if 0 < sampling.top_k < vocabulary:
        least = logprobs.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = logprobs >= least
    if sampling.top_p < 1.0:
        limited = logprobs if kept is None else logprobs.masked_fill(~kept, float("-inf"))
        ordered, places = limited.softmax(dim=-1, dtype=torch.float64).sort(dim=-1, descending=True, stable=True)
        inside = ordered.cumsum(dim=-1) - ordered < sampling.top_p  # the token that crosses top_p is kept
        nucleus = torch.zeros_like(inside).scatter_(1, places, inside)
        kept = nucleus if kept is None else kept & nucleus
    if sampling.min_p > 0.0:
        likely = logprobs >= logprobs.amax(dim=-1, keepdim=True) + float(np.log(sampling.min_p))
        kept = likely if kept is None else kept & likely
    return kept


def draw(logprobs: Tensor, numbers: np.ndarray) -> Tensor:
    """[B, V] log-probabilities and [B] uniform numbers -> [B] token ids, by inverting the cumulative distribution.

    Sums are in float64 and in two levels (blocks of columns, then inside one block), so that only one pass touches the
    whole vocabulary. A token of probability 0 is never drawn.
    """
    batch, vocabulary = logprobs.shape
    num_blocks = -(-vocabulary // _BLOCK)
    probabilities = logprobs.exp().cpu().numpy()
    if num_blocks * _BLOCK != vocabulary:
        probabilities = np.pad(probabilities, ((0, 0), (0, num_blocks * _BLOCK - vocabulary)))
    blocks = probabilities.reshape(batch, num_blocks, _BLOCK)
    before = blocks.sum(axis=2, dtype=np.float64).cumsum(axis=1)
    target = numbers * before[:, -1]
    block = (before <= target[:, None]).sum(axis=1)
    rows = np.arange(batch)
    start = np.where(block > 0, before[rows, block - 1], 0.0)
    inside = blocks[rows, block].astype(np.float64).cumsum(axis=1) + start[:, None]
    column = (inside <= target[:, None]).sum(axis=1)
    # Rounding between the two levels may step over the block's end: take its last token that can be drawn.
    last = _BLOCK - 1 - (blocks[rows, block][:, ::-1] > 0).argmax(axis=1)
    return torch.from_numpy(block * _BLOCK + np.minimum(column, last))
