"""Weights that cross processes: tensors leave by a sender, arrive by a receiver, and only a description goes between.

    learner's process(es)                 controller               generator's process
    ship(weights, sender)  -> Weights without tensors, a Shipment ->  arrived(weights, receiver) -> Weights
        |                                                                ^
        +------------ segment | collective | files: the tensors ---------+

A transport is one pair of `Sender` and `Receiver`. All or nothing: `arrived` gives every tensor of the version or
raises, and what is loaded is compared, digest by digest, with what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digest, fingerprint
from nearpolicy.roles import Adapter, Entry, Shard, Shipment, VersionRecord, Weights
from nearpolicy.sync.plan import Copy, Layout, Piece, Place, box_of, dtype_called, plan, slices, whole

T = TypeVar("T")
Load = Callable[[Weights], Awaitable[Mapping[str, str]]]


class Peers(Protocol):
    """The ranks of one learner, called together."""

    rank: int
    size: int

    def exchange(self, what: str, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank; none returns before all have called. ``what`` is for
        messages."""
        ...


@dataclass(frozen=True)
class Alone:
    """A learner of one rank."""

    rank: int = 0
    size: int = 1

    def exchange(self, what: str, value: T) -> list[T]:
        return [value]


class Sender(Protocol):
    """The learner's side; in each of its ranks one, called together."""

    def send(self, record: VersionRecord, shards: Mapping[str, Shard], digests: Mapping[str, str]) -> Shipment:
        """Make a version available. ``shards``: what this rank holds. ``digests``: of the tensors in their own dtype,
        where somebody has them already; else empty, and the sender makes them. What was sent before may be gone."""
        ...

    def deliver(
        self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str] | None = None
    ) -> Sequence[str]:
        """Hand it to these receivers while they receive; who got all of it. Of ``awaited``, all by default, it waits
        for each, in bounded time; the others come along if they are there. A transport whose receivers fetch by
        themselves has nothing to do. The tensors must be those of `send` still."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The generator's side."""

    def receive(self, shipment: Shipment) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Every tensor of the version, to be read inside the context; `SyncError` if that is not to be had."""
        ...

    def close(self) -> None: ...


def ship(weights: Weights, sender: Sender, shards: Mapping[str, Shard] | None = None) -> Weights:
    """Send the tensors, in every rank of a learner; what is left is small and goes to the generators.

    ``shards``: this rank's pieces, where ``weights`` do not hold the whole tensors. If they have no digests, the record
    gets its fingerprint here.
    """
    scaling, known = None, weights.digests
    if shards is None and not weights.tensors and weights.adapter is not None:
        shards, known = whole(factors_by_name(weights.adapter)), _factor_digests(weights.adapter)
        scaling = weights.adapter.scaling
    shipment = sender.send(weights.record, shards if shards is not None else whole(weights.tensors), known)
    record, digests = weights.record, weights.digests
    if scaling is not None:
        shipment = replace(shipment, scaling=scaling)
    elif not digests:
        digests = shipment.digests
        record = replace(record, fingerprint=fingerprint(digests), digests=digests)
    else:
        digests = shipment.digests  # of the dtype that travels
    return replace(weights, record=record, tensors={}, digests=digests, adapter=None, shipment=shipment)


@contextlib.contextmanager
def arrived(weights: Weights, receiver: Receiver) -> Iterator[Weights]:
    """The weights with their tensors, to be loaded inside the context."""
    shipment = weights.shipment
    if shipment is None:
        yield weights
        return
    with receiver.receive(shipment) as tensors:
        missing = [entry.name for entry in shipment.entries if entry.name not in tensors]
        if missing:
            raise SyncError(f"{missing[0]!r} and {len(missing) - 1} more of version {shipment.version} did not arrive")
        if shipment.scaling is None:
            yield replace(weights, tensors=tensors, shipment=None)
        else:
            yield replace(weights, adapter=_adapter(shipment, tensors), shipment=None)


async def load_arrived(load: Load, weights: Weights, receiver: Receiver) -> Mapping[str, str]:
    """Receive in a thread, then ``load`` (`Generator.load`), with the tensors held until it has ended."""
    context = arrived(weights, receiver)
    here = await asyncio.to_thread(context.__enter__)
    try:
        return await load(here)
    finally:
        context.__exit__(None, None, None)


_STILL_BUSY_S = 5.0


class OneAtATime:
    """Of a receiver: a load that was given up may still receive, in its thread, when the next one begins."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, shipment: Shipment) -> Iterator[None]:
        if not self._busy.acquire(timeout=_STILL_BUSY_S):
            raise SyncError(f"version {shipment.version} cannot be received: an earlier one still is")
        try:
            yield
        finally:
            self._busy.release()


def factors_by_name(adapter: Adapter) -> dict[str, Tensor]:
    return {
        f"{name}.lora_{which}": factor
        for name, pair in adapter.factors.items()
        for which, factor in zip("AB", pair, strict=True)
    }


def _factor_digests(adapter: Adapter) -> dict[str, str]:
    return {f"{n}.lora_{w}": d for n, pair in adapter.digests.items() for w, d in zip("AB", pair, strict=True)}


def _adapter(shipment: Shipment, tensors: Mapping[str, Tensor]) -> Adapter:
    names = [entry.name.removesuffix(".lora_A") for entry in shipment.entries if entry.name.endswith(".lora_A")]
    digests = shipment.digests
    return Adapter(
        scaling=shipment.scaling,
        factors={name: (tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in names},
        digests={name: (digests[f"{name}.lora_A"], digests[f"{name}.lora_B"]) for name in names},
    )


ALIGNMENT = 4096
"""Of every tensor that lies behind another one, in bytes: whole pages, so that copies start at the best place."""


def entries_of(layout: Layout, alignment: int = ALIGNMENT) -> tuple[Entry, ...]:
    """The tensors of a canonical layout, one behind the other."""
    found, offset = [], 0
    for name, shape in layout.shapes.items():
        size = torch.Size(shape).numel() * dtype_called(layout.dtypes[name]).itemsize
        found.append(Entry(name, shape, layout.dtypes[name], offset, size))
        offset += -(-size // alignment) * alignment
    return tuple(found)


def canonical_layout(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> Layout:
    """One part that holds the canonical tensors as they are."""
    places = {
        name: (Place(0, name, tuple((0, size) for size in shape), (0,) * len(shape)),) for name, shape in shapes.items()
    }
    return Layout(shapes, dtypes, (shapes,), places)


class Route:
    """Which copies of which rank make up the canonical tensors. Planned once; ranks keep their pieces."""

    def __init__(self, peers: Peers, wire: torch.dtype | None, alignment: int = ALIGNMENT) -> None:
        """``alignment``: of the tensors on their way, in bytes."""
        self._peers, self._wire, self._alignment = peers, wire, alignment
        self._known: dict[str, Piece] | None = None
        self.layout: Layout
        self.entries: tuple[Entry, ...]
        self.copies: list[Copy]

    def update(self, shards: Mapping[str, Shard]) -> None:
        """Say what this rank holds now; every rank at once. `SyncError` on all of them if it does not fit together."""
        mine = {
            name: Piece(self._peers.rank, tuple(shard.shape), box_of(shard), self._travels_as(shard.tensor))
            for name, shard in shards.items()
        }
        changed = any(self._peers.exchange("whether pieces have changed", mine != self._known))
        if not changed:
            return
        self._known = None  # until they are known to fit together
        pieces: dict[str, list[Piece]] = {}
        for of_rank in self._peers.exchange("pieces", mine):
            for name, piece in of_rank.items():
                pieces.setdefault(name, []).append(piece)
        shapes = {name: found[0].shape for name, found in pieces.items()}
        self.layout = canonical_layout(shapes, {name: found[0].dtype for name, found in pieces.items()})
        self.entries = entries_of(self.layout, self._alignment)
        self.copies = plan(pieces, self.layout)
        self._known = mine

    def _travels_as(self, tensor: Tensor) -> str:
        return str(self._wire if self._wire is not None and tensor.is_floating_point() else tensor.dtype)


def known_digests(
    peers: Peers, digests: Mapping[str, str], shards: Mapping[str, Shard], wire: torch.dtype | None
) -> dict[str, str]:
    """The digests that the first rank has of the learner's tensors, on every rank; none if what travels is cast."""
    cast = any(wire is not None and s.tensor.is_floating_point() and s.tensor.dtype != wire for s in shards.values())
    mine = dict(digests) if not cast and digests.keys() == shards.keys() else {}
    return peers.exchange("digests", mine)[0]


@torch.no_grad()
def digests_among(peers: Peers, route: Route, shards: Mapping[str, Shard]) -> dict[str, str]:
    """Digests of the tensors as they travel, on every rank. Several ranks hand each tensor's pieces to each other, one
    tensor at a time: digests that are known already are much cheaper."""
    found = {}
    mine: dict[str, list[Copy]] = {}
    for copy in route.copies:
        if copy.holder == peers.rank:
            mine.setdefault(copy.name, []).append(copy)
    for name, shape in route.layout.shapes.items():
        dtype = dtype_called(route.layout.dtypes[name])
        pieces = [
            (copy.destination, shards[name].tensor.detach()[slices(copy.source)].to(dtype).cpu().contiguous())
            for copy in mine.get(name, [])
        ]
        whole_one = torch.empty(shape, dtype=dtype)
        for box, piece in itertools.chain.from_iterable(peers.exchange(name, pieces)):
            whole_one[slices(box)] = piece
        found[name] = digest(whole_one)
    return found
