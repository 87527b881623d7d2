"""The value model: a number after every token, from the decoder of a language model through the same packed attention.

Promise: a token's value depends on its sequence alone wherever the hidden states do. The head is no matrix product,
whose kernels for a single column may look at how many rows there are: each row is multiplied and added up by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from nearpolicy.models.attention import PackedContext
from nearpolicy.models.policy import PolicyModel, chosen_rows, last_hidden

T = TypeVar("T")


class ValueModel(nn.Module):
    """V(s) = w . h + b on the last hidden state h, with w = b = 0 at first: every value starts at 0.

    The decoder is the one of the policy that is handed in, which is used up: its vocabulary head is not kept.
    """

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        self.decoder = policy.model.get_decoder()
        self.files = policy.files
        """Where the decoder's weights are, as long as it has none."""
        width = policy.config.get_text_config().hidden_size
        wide = torch.promote_types(next(self.decoder.parameters()).dtype, torch.float32)
        self.weight = nn.Parameter(torch.zeros(width, dtype=wide, device=policy.device))
        """[hidden] in float32 or better, whatever the decoder computes in."""
        self.bias = nn.Parameter(torch.zeros((), dtype=wide, device=policy.device))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def within(self, call: Callable[[], T]) -> T:
        """As `PolicyModel.within`."""
        return call()

    def forward(self, input_ids: Tensor, positions: Tensor, context: PackedContext, rows: Tensor) -> Tensor:
        """[N] values of the states that the chosen packed ``rows`` [N] end in: what is still to come from there."""
        states = chosen_rows(last_hidden(self.decoder, input_ids, positions, context), rows)
        return (states.to(self.weight.dtype) * self.weight).sum(dim=-1) + self.bias
