"""Weights through Ray's object store: to any node of a cluster, without a file system or a process group in common.

Each rank puts what it holds into the store of its node, packed one piece behind the other; Ray moves a copy to every
node that has a generator, once per node, and generators of a node read the same memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import bytes_of
from nearpolicy.roles import Shard, Shipment, VersionRecord, Weights
from nearpolicy.sync.plan import Copy, dtype_called, slices
from nearpolicy.sync.shipping import Alone, Peers, Route, digests_among, known_digests

NAME = "object_store"


class ObjectStoreSender:
    """Implements `nearpolicy.sync.shipping.Sender`. A shipment has the part of its rank alone: references may only
    travel by Ray, so that whoever hears from all ranks puts the parts together (`of_all_ranks`)."""

    def __init__(self, *, peers: Peers | None = None, wire: torch.dtype | None = None) -> None:
        self._peers = peers or Alone()
        self._wire = wire
        self._route = Route(self._peers, wire)

    def send(self, record: VersionRecord, shards: Mapping[str, Shard], digests: Mapping[str, str]) -> Shipment:
        import ray

        self._route.update(shards)
        mine = [copy for copy in self._route.copies if copy.holder == self._peers.rank]
        packed = self._packed(mine, shards)
        known = known_digests(self._peers, digests, shards, self._wire)
        digests = known or digests_among(self._peers, self._route, shards)
        return Shipment(
            transport=NAME,
            lineage=record.lineage,
            version=record.version,
            entries=self._route.entries,
            digests=dict(digests),
            place=[(ray.put(packed.numpy()), mine)],
        )

    def _packed(self, copies: Sequence[Copy], shards: Mapping[str, Shard]) -> Tensor:
        dtypes = {name: dtype_called(dtype) for name, dtype in self._route.layout.dtypes.items()}
        pieces = [
            shards[copy.name].tensor.detach()[slices(copy.source)].to(dtypes[copy.name]).cpu().contiguous()
            for copy in copies
        ]
        return torch.cat([torch.zeros(0, dtype=torch.uint8), *(bytes_of(piece) for piece in pieces)])

    def deliver(
        self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str] | None = None
    ) -> Sequence[str]:
        return members

    def close(self) -> None: ...


def of_all_ranks(found: Sequence[Weights]) -> Weights:
    """What ranks have shipped, as one."""
    first = found[0]
    if first.shipment is None or first.shipment.transport != NAME:
        return first
    parts = [part for weights in found for part in weights.shipment.place]
    return replace(first, shipment=replace(first.shipment, place=parts))


class ObjectStoreReceiver:
    """Implements `nearpolicy.sync.shipping.Receiver`. The actor's method gets the parts by reference."""

    @contextlib.contextmanager
    def receive(self, shipment: Shipment) -> Iterator[Mapping[str, Tensor]]:
        import ray

        try:
            parts = [(ray.get(reference), copies) for reference, copies in shipment.place]
        except ray.exceptions.RayError as error:
            raise SyncError(f"version {shipment.version} is lost with the rank that held it: {error}") from error
        yield assembled(shipment, parts)

    def close(self) -> None: ...


def assembled(shipment: Shipment, parts: Sequence[tuple[Any, Sequence[Copy]]]) -> dict[str, Tensor]:
    """Whole tensors: of one part the memory itself, else a copy."""
    whole = {e.name: torch.empty(e.shape, dtype=dtype_called(e.dtype)) for e in shipment.entries if not e.nbytes}
    entries = {entry.name: entry for entry in shipment.entries}
    for packed, copies in parts:
        offset = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that may only be read
            memory = torch.from_numpy(packed)
        for copy in copies:
            entry = entries[copy.name]
            dtype = dtype_called(entry.dtype)
            shape = [stop - start for start, stop in copy.destination]
            size = torch.Size(shape).numel() * dtype.itemsize
            piece = memory[offset : offset + size]
            if offset % dtype.itemsize:  # no number of this width may begin here
                piece = piece.clone()
            piece = piece.view(dtype).view(shape)
            offset += size
            if tuple(shape) == entry.shape:
                whole[copy.name] = piece
            else:
                target = whole.setdefault(copy.name, torch.empty(entry.shape, dtype=dtype))
                target[slices(copy.destination)] = piece
    return whole
