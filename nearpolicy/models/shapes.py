"""Sizes a model really uses, seen rather than derived from a config: every family spells its config differently."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from nearpolicy.models.attention import PAGE, Rule
from nearpolicy.models.policy import PolicyModel, last_hidden
from nearpolicy.models.rows import Node, RowContext


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Widths of what one attention layer keeps per position."""

    kv_heads: int
    key_size: int
    value_size: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page, the column of ones included."""
        return dtype.itemsize * PAGE * self.kv_heads * (self.key_size + self.value_size + 1)


class _Watching(RowContext):
    def __init__(self, device: torch.device) -> None:
        super().__init__([Node(0, 4)], 4, device)
        self.seen: dict[int, AttentionShape] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        self.seen[layer] = AttentionShape(k.shape[1], k.shape[2], v.shape[2])
        return super().attend(layer, q, k, v, rule)


@torch.no_grad()
def attention_shapes(policy: PolicyModel) -> dict[int, AttentionShape]:
    """Layer index -> widths, from one forward pass over four tokens. A model without weights is tried with zeros."""
    context, decoder = _Watching(policy.device), policy.model.get_decoder()
    ids, zeros = torch.zeros(4, dtype=torch.long, device=policy.device), _stand_ins(decoder, policy.device)
    last_hidden(lambda **inputs: functional_call(decoder, zeros, (), inputs), ids, context.positions, context)
    return context.seen


def _stand_ins(model: torch.nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Zeros for parameters that have no memory, all of them in that of the largest."""
    absent = {name: p for name, p in model.named_parameters() if p.is_meta}
    sizes = {
        dtype: max(p.numel() for p in absent.values() if p.dtype == dtype)
        for dtype in {p.dtype for p in absent.values()}
    }
    memory = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    return {name: memory[p.dtype][: p.numel()].view(p.shape) for name, p in absent.items()}


def linear_shapes(policy: PolicyModel) -> set[tuple[int, int]]:
    """(in, out) of every linear layer, head included."""
    return {(m.in_features, m.out_features) for m in policy.modules() if isinstance(m, torch.nn.Linear)}


def is_mixture(policy: PolicyModel) -> bool:
    """Whether it has experts: they see what is routed to them, so that the rows of their products are no tiles, and
    bits may depend on neighbours where everything else is exact."""
    config = policy.config.get_text_config()
    return any(getattr(config, count, None) for count in ("num_experts", "num_local_experts", "n_routed_experts"))
