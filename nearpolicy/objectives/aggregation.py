"""What share of the loss a token carries.

The loss of an update is

    sum over kept tokens of  share x token loss,   divided by   the update's divisor

A share depends on the token's own sequence alone, the divisor on the whole update; both are sums over parts. So any
cut into micro-batches, any packing, order or number of ranks gives the same loss and the same gradient.

A mean over each sequence's tokens ascends advantage per token: a token of a long wrong answer is pushed down less than
one of a short one. The other modes ascend advantage, up to a factor that a large update does not notice.

                              share            divisor
    token_mean                1                kept tokens                            (DAPO)
    seq_mean_token_sum        1                sequences with a kept token
    seq_mean_token_mean       1 / kept tokens  sequences with a kept token            (GRPO)
                              of the sequence
    seq_mean_token_sum_norm   1 / max_length   sequences with a kept token            (Dr. GRPO)
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nearpolicy.objectives.sequences import Sequences

LossAggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def shares(kept: Tensor, sequences: Sequences, loss_agg: LossAggregation, max_length: int) -> Tensor:
    """[N] float32 share of each token, 0 where ``kept`` [N] is False. Sequences must be whole unless it is a token
    mean."""
    if loss_agg not in get_args(LossAggregation):
        raise ValueError(
            f"objective.loss_agg {loss_agg!r} is not known; known are {', '.join(get_args(LossAggregation))}"
        )
    if loss_agg == "seq_mean_token_mean":
        share = 1.0 / sequences.spread(sequences.sum(kept).clamp(min=1.0))
    else:
        share = torch.full(
            kept.shape, 1.0 / max_length if loss_agg == "seq_mean_token_sum_norm" else 1.0, device=kept.device
        )
    return torch.where(kept, share.float(), 0.0)


def divisor(kept: Tensor, sequences: Sequences, loss_agg: LossAggregation) -> float:
    """What these tokens add to the divisor of their update."""
    if loss_agg == "token_mean":
        return float(kept.sum())
    return float((sequences.sum(kept) > 0).sum())
