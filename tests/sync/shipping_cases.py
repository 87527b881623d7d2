"""What tests of transports share: weights of a version, and a receiver in another process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Weights
from nearpolicy.sync.shipping import arrived

_receivers: dict[str, Any] = {}
"""Of this process, by name."""


def tensors_of(version: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Shapes of a model, an uneven and an empty one among them; a scalar; integers."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"a.weight": (17, 8), "a.bias": (17,), "b.weight": (64, 33), "c.nothing": (0, 4), "d.scale": ()}
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return drawn | {"e.counts": torch.arange(5) + version}


def record_of(version: int, parts: Mapping[str, str], lineage: int = 0) -> VersionRecord:
    return VersionRecord(
        lineage=lineage, version=version, updates=version, fingerprint=fingerprint(parts), parent=None, digests=parts
    )


def weights_of(version: int, tensors: Mapping[str, Tensor] | None = None, lineage: int = 0) -> Weights:
    tensors = tensors_of(version) if tensors is None else tensors
    parts = digests(tensors)
    return Weights(record=record_of(version, parts, lineage), tensors=tensors, digests=parts)


def receiver_called(name: str, make: Any) -> Any:
    if name not in _receivers:
        _receivers[name] = make()
    return _receivers[name]


def take(name: str, make: Any, weights: Weights) -> dict[str, str]:
    """What a generator of this process that is given ``weights`` holds then."""
    with arrived(weights, receiver_called(name, make)) as here:
        return digests({n: t.clone() for n, t in here.tensors.items()})


def forget(name: str) -> None:
    receiver = _receivers.pop(name, None)
    if receiver is not None:
        receiver.close()


class ProcessPeers:
    """Ranks of the default process group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def exchange(self, what: str, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


class Together:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier = size, threading.Barrier(size)
        self._values = [None] * size

    def rank_of(self, rank: int):
        together = self

        class Rank:
            size = together.size

            def exchange(self, what, value):
                together._values[rank] = value
                together._barrier.wait(60)
                found = list(together._values)
                together._barrier.wait(60)
                return found

        peer = Rank()
        peer.rank = rank
        return peer


def by_ranks(size: int, act) -> list:
    """What ``act(rank, peers)`` gives in each of ``size`` threads, or the first error."""
    together, found = Together(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank, together.rank_of(rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
