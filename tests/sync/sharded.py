"""Learner layouts for tests: tensors cut as FSDP2 cuts them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nearpolicy.roles import Shard


def cut_as_fsdp2(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[dict[str, Shard]]:
    """Dimension 0 in the fashion of `torch.chunk`: pieces of equal size, a shorter last one, then empty ones."""
    held: list[dict[str, Shard]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        chunks = list(torch.chunk(tensor, ranks)) if tensor.ndim else [tensor] * ranks
        chunks += [tensor[:0] if tensor.ndim else tensor] * (ranks - len(chunks))
        start = 0
        for rank, chunk in enumerate(chunks):
            first = (start, *(0,) * (tensor.ndim - 1)) if tensor.ndim else ()
            held[rank][name] = Shard(tensor=chunk, shape=tuple(tensor.shape), start=first)
            start += len(chunk) if tensor.ndim else 0
    return held
