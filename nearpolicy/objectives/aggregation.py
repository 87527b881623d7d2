"""What share of the loss a token carries, decided for the whole update before anything is cut into micro-batches.

The loss of an update is the sum over its trained tokens of share x token loss. Shares are numbers known in advance, so
any cut, order or number of ranks gives the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_shares(trained_tokens: Sequence[int], loss_agg: str, max_length: int) -> np.ndarray:
    """[S] float64: the share of each trained token of each sequence.

    trained_tokens: trained tokens per sequence, in any order; sequences without any take no part.

    - token_mean: 1 / all trained tokens (DAPO)
    - seq_mean_token_mean: 1 / (sequences x tokens of the sequence) (GRPO)
    - seq_mean_token_sum_norm: 1 / (sequences x ``max_length``) (Dr. GRPO)
    """
    tokens = np.asarray(trained_tokens, dtype=np.float64)
    sequences = np.count_nonzero(tokens)
    if sequences == 0:
        return np.zeros(len(tokens))
    if loss_agg == "token_mean":
        return np.full(len(tokens), 1.0 / tokens.sum())
    if loss_agg == "seq_mean_token_mean":
        return np.where(tokens > 0, 1.0 / (sequences * np.maximum(tokens, 1.0)), 0.0)
    if loss_agg == "seq_mean_token_sum_norm":
        return np.full(len(tokens), 1.0 / (sequences * max_length))
    raise ValueError(f"objective.loss_agg {loss_agg!r} is not known")
