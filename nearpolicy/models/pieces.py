"""Tensors that several ranks hold in pieces: what a rank has of one, how it becomes whole, how it takes new values.

A tensor in pieces is one of torch's ``DTensor``: it has the shape of the whole, and a rank holds a run of its rows.
Everything here takes plain tensors as well, as the one piece that is all there is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from nearpolicy.roles import Shard


def in_pieces(tensor: Any) -> bool:
    """Whether ranks hold it together."""
    loaded = sys.modules.get("torch.distributed.tensor")  # 0.7 s; without it nothing can be in pieces
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds, the memory itself."""
    return tensor._local_tensor if in_pieces(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; where it is in pieces, all ranks call this together."""
    if not in_pieces(tensor):
        return tensor
    found = tensor.detach().full_tensor()
    return found.wait() if hasattr(found, "wait") else found  # torch leaves the wait to the first use


def piece(tensor: Tensor) -> Shard:
    """What this rank holds, and where in the whole that lies."""
    if not in_pieces(tensor):
        return Shard(tensor=tensor.detach(), shape=tuple(tensor.shape), start=(0,) * tensor.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor=local(tensor.detach()), shape=tuple(tensor.shape), start=tuple(start))


def part_of(values: Tensor, like: Tensor) -> Tensor:
    """Of ``values``, whole or laid out as ``like`` is, what this rank holds of ``like``."""
    if in_pieces(values):
        return local(values)
    if not in_pieces(like):
        return values
    own = piece(like)
    for dim, (start, length) in enumerate(zip(own.start, own.tensor.shape, strict=True)):
        values = values.narrow(dim, min(start, values.shape[dim]), length)
    return values


def joined(own: Tensor, like: Tensor) -> Tensor:
    """The tensor whose piece on this rank is ``own``, laid out as ``like`` is."""
    if not in_pieces(like):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Copy ``values``, whole or laid out as the target is, into this rank's memory."""
    local(target).copy_(part_of(values, target))
