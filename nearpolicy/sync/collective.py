"""Collective operations on bytes of a version: the process group, the stretches that travel, how they are packed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearpolicy.errors import SyncError, described
from nearpolicy.roles import Entry, Shard
from nearpolicy.sync.plan import Copy, dtype_called, slices
from nearpolicy.sync.shipping import Peers

ALIGNMENT = 64
"""Of every tensor that lies behind another one on the way, in bytes."""


def stretch(copy: Copy, entry: Entry) -> tuple[int, int]:
    """First byte and the one behind the last, of a box that is one stretch of its tensor; `SyncError` for another."""
    item = dtype_called(entry.dtype).itemsize
    if any((low, high) != (0, size) for (low, high), size in zip(copy.destination[1:], entry.shape[1:], strict=True)):
        raise SyncError(
            f"{copy.name!r} of rank {copy.holder} is not cut along its first dimension only, which a collective needs; "
            "use sync.transport=shared_memory or files"
        )
    row = torch.Size(entry.shape[1:]).numel() * item
    low, high = copy.destination[0] if copy.destination else (0, 1)
    return entry.offset + low * row, entry.offset + high * row


def pack(
    memory: Tensor, begin: int, copies: Sequence[Copy], entries: Mapping[str, Entry], shards: Mapping[str, Shard]
) -> None:
    """Write what ``copies`` have of the bytes that ``memory`` stands for, from ``begin`` on, as they travel."""
    end = begin + memory.numel()
    for copy in copies:
        entry = entries[copy.name]
        first, behind = stretch(copy, entry)
        low, high = max(first, begin), min(behind, end)
        if low >= high:
            continue
        dtype = dtype_called(entry.dtype)
        source = shards[copy.name].tensor.detach()[slices(copy.source)]
        part = source.reshape(-1)[(low - first) // dtype.itemsize : (high - first) // dtype.itemsize]
        memory[low - begin : high - begin].view(dtype).copy_(part)


class Group:
    """A process group without a name in `torch.distributed`: the learner has its own."""

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, size, self._timeout)
        elif backend == "nccl":
            self._group = dist.ProcessGroupNCCL(store, rank, size, self._timeout)
        else:
            raise SyncError(f"there is no broadcast over {backend!r}; use gloo or nccl")

    def broadcast(self, memory: Tensor, root: int) -> Callable[[], None]:
        """Begin; what is returned waits for the end."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = self._group.broadcast([memory], options)
        return lambda: _wait(work, self._timeout)

    def close(self) -> None:
        """Whoever still waits for this process gets an error at once."""
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()
        self._group = None


def _wait(work: Any, timeout: timedelta) -> None:
    if not work.wait(timeout):
        raise RuntimeError(f"a broadcast did not end within {timeout.total_seconds():g} s")


def two_at_once(begun: Iterable[Callable[[], None]]) -> None:
    """Begin each and wait for it, at most two under way: making the next one ready may take its time meanwhile."""
    under_way: deque[Callable[[], None]] = deque()
    for wait in begun:
        under_way.append(wait)
        if len(under_way) == 2:
            under_way.popleft()()
    for wait in under_way:
        wait()


def store_of_ranks(peers: Peers, host: str, timeout_s: float) -> tuple[dist.Store, tuple[str, int]]:
    """What all ranks have in common, and where it is. The first one serves it, under ``host``."""
    served, limit = None, timedelta(seconds=timeout_s)
    if peers.rank == 0:
        served = dist.TCPStore(host, 0, None, True, limit, wait_for_workers=False)
    port = peers.exchange("the port of the collective", served.port if served is not None else None)[0]
    return (served if served is not None else connected((host, port), timeout_s)), (host, port)


def connected(address: tuple[str, int], timeout_s: float) -> dist.Store:
    """The store that the learner's first rank serves."""
    try:
        return dist.TCPStore(*address, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise SyncError(f"the learner at {address[0]}:{address[1]} cannot be reached: {described(error)}") from None
