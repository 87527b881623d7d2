"""Weights by a collective: one process group of learner ranks and generators, gloo on CPUs and nccl on GPUs.

    learner rank 0   pack | pack | pack          small pieces go together in buckets, large ones from where they are
                        \\ send | send | send     two runs are under way at once
    generator             receive | receive      into staging memory; the digests of all of it are checked there

All or nothing: what a generator computes from is touched only after every tensor has arrived with the digest that was
sent. A receiver that dies or stands still costs the others one attempt: the group is made anew of those that are still
there, and the version is sent again.

    attempt 0: members say that they are here -> the sender names the group -> broadcasts -> members say that they are
    done; who fails drops the group, and says that it is here for attempt 1 ...

All of this is arranged in a key-value store that the learner's first rank serves. Run with gloo only so far: the nccl
path (buffers on the device, as many copies as here) has not run. Roles on one device have `device_handles`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nearpolicy.errors import SyncError, described
from nearpolicy.models.weights import bytes_of, differing
from nearpolicy.models.weights import digests as digests_of
from nearpolicy.roles import Entry, Shard, Shipment, VersionRecord
from nearpolicy.sync.collective import ALIGNMENT, Group, connected, pack, store_of_ranks, stretch, two_at_once
from nearpolicy.sync.plan import Copy, dtype_called, slices
from nearpolicy.sync.shipping import Alone, OneAtATime, Peers, Route, digests_among, known_digests
from nearpolicy.waits import waiting

_LARGE = 16 << 20
"""Bytes of a piece from which it is sent from where it lies: below them a broadcast of its own costs more than a copy
into a bucket."""
_LOOK_S = 0.002
"""Between two looks at who is here."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of the version that travel in one broadcast."""

    begin: int
    end: int
    holder: int
    """Learner rank that has them."""
    first: int
    """Of the copies that they are made of."""
    last: int


def runs_of(copies: Sequence[Copy], entries: Sequence[Entry], bucket: int) -> tuple[list[Copy], list[Run]]:
    """All bytes of a version, in order, in runs of at most ``bucket`` bytes; and the copies, in the same order.
    `SyncError` for a piece that is not one stretch of its tensor."""
    where = {entry.name: entry for entry in entries}
    ordered = sorted(((*stretch(copy, where[copy.name]), copy) for copy in copies), key=lambda found: found[0])
    runs: list[Run] = []
    for number, (begin, end, copy) in enumerate(ordered):
        last = runs[-1] if runs else None
        small = end - begin < _LARGE and last is not None and not _is_large(last)
        if small and last.holder == copy.holder and end - last.begin <= bucket:
            runs[-1] = Run(last.begin, end, last.holder, last.first, number)
            continue
        for low in range(begin, end, bucket):
            runs.append(Run(low, min(end, low + bucket), copy.holder, number, number))
    return [copy for _, _, copy in ordered], runs


def _is_large(run: Run) -> bool:
    return run.first == run.last and run.end - run.begin >= _LARGE


class BroadcastSender:
    """Implements `Sender`."""

    def __init__(
        self,
        *,
        timeout_s: float,
        peers: Peers | None = None,
        wire: torch.dtype | None = None,
        bucket_mb: float = 64.0,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:
        """``timeout_s``: of a whole delivery; a quarter of it bounds each of its waits. ``host``: under which the
        generators reach the learner's first rank. ``device``: where the backend wants its memory."""
        self._timeout_s, self._backend, self._wire = timeout_s, backend, wire
        self._peers = peers or Alone()
        self._bucket = int(bucket_mb * 2**20) // ALIGNMENT * ALIGNMENT
        self._device = device or torch.device("cpu")
        self._route = Route(self._peers, wire, ALIGNMENT)
        self._group: Group | None = None
        self._names: tuple[str, ...] = ()
        self._number = self._issued = self._serial = 0
        self._table: _Table | None = None
        """Of the last shipment, until nobody will begin to broadcast it."""
        self._buffers: list[Tensor] = []
        self._shards: Mapping[str, Shard] = {}
        self._store, self._address = store_of_ranks(self._peers, host, timeout_s)

    def send(self, record: VersionRecord, shards: Mapping[str, Shard], digests: Mapping[str, str]) -> Shipment:
        self._let_go()
        self._route.update(shards)
        self._shards = shards
        entries = self._route.entries
        self._copies, self._runs = runs_of(self._route.copies, entries, self._bucket)
        self._entries = {entry.name: entry for entry in entries}
        known = known_digests(self._peers, digests, shards, self._wire)
        digests = known or digests_among(self._peers, self._route, shards)
        self._serial += 1
        self._table = _Table(self._store, self._serial)
        return Shipment(
            transport="broadcast",
            lineage=record.lineage,
            version=record.version,
            entries=entries,
            digests=dict(digests),
            place=Place(
                self._address, self._serial, self._backend, self._peers.size, self._timeout_s, tuple(self._runs)
            ),
        )

    def deliver(self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str] | None = None) -> list[str]:
        """Who has got all of it. ``awaited``: those among ``members`` whom the group waits for; the others come along
        if they are here in time. `SyncError` if nobody has."""
        if shipment.place.serial != self._serial or self._table is None:
            raise SyncError(f"version {shipment.version} cannot be broadcast any more, the learner has gone on")
        try:
            return self._delivered(shipment, self._table, members, members if awaited is None else awaited)
        finally:
            self._let_go()

    def _delivered(
        self, shipment: Shipment, table: _Table, members: Sequence[str], awaited: Sequence[str]
    ) -> list[str]:
        deadline = time.monotonic() + self._timeout_s
        reason = "no generator was there to receive it"
        for attempt in range(_ATTEMPTS):
            names = self._agreed(table, attempt, members, awaited, deadline)
            if not names:
                break
            failure = self._broadcast(names, table)
            failures = [f for f in self._peers.exchange("how the broadcast ended", failure) if f is not None]
            if not failures:
                break
            reason = failures[0]
            self._drop()
        done = table.done(members, wait_s=self._timeout_s / 4 if names else 0.0, of=names)
        if set(names) - set(done):
            self._drop()
        self._peers.exchange("the end of the broadcast", None)
        if not done:
            raise SyncError(f"version {shipment.version} reached no generator: {reason}")
        return done

    def close(self) -> None:
        self._let_go()
        self._drop()
        self._shards, self._buffers = {}, []

    def _let_go(self) -> None:
        """Receivers that still wait for the last shipment hear that it does not come: there is a next one to take."""
        if self._table is not None and self._peers.rank == 0:
            self._table.name_no_more()
        self._table = None

    def _agreed(
        self, table: _Table, attempt: int, members: Sequence[str], awaited: Sequence[str], deadline: float
    ) -> tuple[str, ...]:
        """The receivers of this attempt: the first rank looks who is here, and says it to all."""
        if self._peers.rank == 0:
            wait_s = min(self._timeout_s / 4, max(0.0, deadline - time.monotonic()))
            here = table.here(attempt, members, awaited, wait_s)
            number = self._number
            if self._group is None or self._names != tuple(here) or set(here.values()) != {number}:
                self._issued = number = self._issued + 1
            table.name_group(attempt, list(here), number)
        names, number = table.group(attempt, self._timeout_s)
        if number != self._number:
            self._drop()
            self._number, self._names = number, names
        return names

    def _broadcast(self, names: tuple[str, ...], table: _Table) -> str | None:
        """One attempt; what it failed of."""
        try:
            if self._group is None:
                size = self._peers.size + len(names)
                store = table.store_of_group(self._number)
                self._group = Group(self._backend, store, self._peers.rank, size, self._timeout_s / 4)
            with waiting("publication", f"the broadcast to {', '.join(names)}"):
                two_at_once(self._steps(self._group))
        except RuntimeError as error:  # what gloo and nccl raise for a peer that is gone, and for a timeout
            failure = described(error)
            self._drop()  # whoever still waits for this rank hears of it
            return failure
        return None

    def _steps(self, group: Group) -> Iterator[Callable[[], None]]:
        """Every run as one broadcast, begun when it is asked for."""
        for number, run in enumerate(self._runs):
            memory = self._direct(run) if run.holder == self._peers.rank else None
            if memory is None:
                memory = self._buffer(number % 2)[: run.end - run.begin]
                if run.holder == self._peers.rank:
                    pack(memory, run.begin, self._copies[run.first : run.last + 1], self._entries, self._shards)
            yield group.broadcast(memory, run.holder)

    def _buffer(self, number: int) -> Tensor:
        """Of two: one is under way while the other is packed."""
        if not self._buffers:
            self._buffers = [torch.zeros(self._bucket, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return self._buffers[number]

    def _direct(self, run: Run) -> Tensor | None:
        """The bytes of a run where they lie, if they lie as they travel."""
        if run.first != run.last:
            return None
        copy = self._copies[run.first]
        source = self._shards[copy.name].tensor.detach()[slices(copy.source)]
        entry = self._entries[copy.name]
        if str(source.dtype) != entry.dtype or not source.is_contiguous() or source.device != self._device:
            return None
        begin = run.begin - stretch(copy, entry)[0]
        return bytes_of(source)[begin : begin + run.end - run.begin]

    def _drop(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._names, self._number = None, (), 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a receiver needs to take part."""

    address: tuple[str, int]
    """Of the store."""
    serial: int
    """Of the shipment, among those of this sender."""
    backend: str
    ranks: int
    """Of the learner; receivers come behind them."""
    timeout_s: float
    runs: tuple[Run, ...]


_ATTEMPTS = 4
"""To deliver a version: each but the last loses at least one receiver."""


class _Table:
    """Who is here, who makes up the group, who is done: the keys of one shipment in the store."""

    def __init__(self, store: dist.Store, serial: int) -> None:
        self._all = store
        self._store = dist.PrefixStore(f"shipment/{serial}", store)

    def store_of_group(self, number: int) -> dist.Store:
        return dist.PrefixStore(f"group/{number}", self._all)

    def say_here(self, attempt: int, name: str, number: int) -> None:
        """``number``: of the group that this receiver is in already; 0 for none."""
        self._store.set(f"{attempt}/here/{name}", str(number))

    def here(self, attempt: int, members: Sequence[str], awaited: Sequence[str], wait_s: float) -> dict[str, int]:
        """Receivers that are here, with the group that they are in; waits for those awaited that are not done."""
        deadline = time.monotonic() + wait_s
        with waiting("publication", f"{', '.join(awaited)} to be there for the broadcast"):
            while any(not self._has(f"{attempt}/here/{n}", f"done/{n}") for n in awaited):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_LOOK_S)
        return {n: int(self._store.get(f"{attempt}/here/{n}")) for n in members if self._has(f"{attempt}/here/{n}")}

    def name_group(self, attempt: int, names: list[str], number: int) -> None:
        self._store.set(f"{attempt}/group", json.dumps([names, number]))

    def name_no_more(self) -> None:
        """In every attempt that is left: nobody."""
        for attempt in range(_ATTEMPTS):
            if not self._has(f"{attempt}/group"):
                self.name_group(attempt, [], 0)

    def group(self, attempt: int, wait_s: float) -> tuple[tuple[str, ...], int]:
        """Waits until it is named."""
        with waiting("publication", "the learner to name the group of the broadcast"):
            self._store.wait([f"{attempt}/group"], timedelta(seconds=wait_s))
        names, number = json.loads(self._store.get(f"{attempt}/group"))
        return tuple(names), number

    def say_done(self, name: str) -> None:
        self._store.set(f"done/{name}", "1")

    def done(self, members: Sequence[str], *, wait_s: float, of: Sequence[str]) -> list[str]:
        """Receivers that have everything; waits for those in ``of``."""
        if of:
            with contextlib.suppress(RuntimeError), waiting("publication", f"{', '.join(of)} to have everything"):
                self._store.wait([f"done/{name}" for name in of], timedelta(seconds=wait_s))
        return [name for name in members if self._has(f"done/{name}")]

    def _has(self, *keys: str) -> bool:
        return any(self._store.check([key]) for key in keys)


class BroadcastReceiver:
    """Implements `Receiver`."""

    def __init__(self, name: str, *, device: torch.device | None = None) -> None:
        """``name``: of this generator, as the publisher calls it."""
        self._name, self._alone = name, OneAtATime()
        self._device = device or torch.device("cpu")
        self._group: Group | None = None
        self._number = 0
        self._address: tuple[str, int] | None = None
        self._store: dist.Store | None = None
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def receive(self, shipment: Shipment) -> Iterator[Mapping[str, Tensor]]:
        with self._alone(shipment):
            size = max((entry.offset + entry.nbytes for entry in shipment.entries), default=0)
            if self._staging.numel() != size:
                self._staging = self._staging.new_empty(0)  # before there is another one
                self._staging = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._fetch(shipment)
            tensors = {entry.name: self._tensor(entry) for entry in shipment.entries}
            wrong = differing(shipment.digests, digests_of(tensors))
            if wrong:
                self._drop()
                raise SyncError(f"{wrong[0]!r} and {len(wrong) - 1} more arrived otherwise than they were sent")
            yield tensors

    def close(self) -> None:
        self._drop()
        self._store = self._address = None

    def _tensor(self, entry: Entry) -> Tensor:
        memory = self._staging[entry.offset : entry.offset + entry.nbytes]
        return memory.view(dtype_called(entry.dtype)).view(entry.shape)

    def _fetch(self, shipment: Shipment) -> None:
        place: Place = shipment.place
        table = _Table(self._at(place), place.serial)
        reason = ""
        for attempt in range(_ATTEMPTS):
            try:
                table.say_here(attempt, self._name, self._number)
                names, number = table.group(attempt, place.timeout_s)
            except RuntimeError as error:
                self._drop()
                raise SyncError(f"the learner did not begin to broadcast: {described(error)}{reason}") from None
            if self._name not in names:
                self._drop()
                raise SyncError(f"the broadcast of version {shipment.version} went on without this generator{reason}")
            try:
                self._receive(shipment, table, names, number)
            except RuntimeError as error:
                reason = f"; before that: {described(error)}"
                self._drop()
                continue
            table.say_done(self._name)  # the learner may go on; what has come is checked here
            return
        raise SyncError(f"version {shipment.version} did not arrive in {_ATTEMPTS} attempts{reason}")

    def _receive(self, shipment: Shipment, table: _Table, names: tuple[str, ...], number: int) -> None:
        place: Place = shipment.place
        if self._group is None or self._number != number:
            self._drop()
            rank, size = place.ranks + names.index(self._name), place.ranks + len(names)
            store = table.store_of_group(number)
            self._group, self._number = Group(place.backend, store, rank, size, place.timeout_s / 4), number
        with waiting(self._name, f"the broadcast of version {shipment.version}"):
            two_at_once(self._group.broadcast(self._staging[run.begin : run.end], run.holder) for run in place.runs)

    def _at(self, place: Place) -> dist.Store:
        if self._address != place.address:
            self._drop()
            self._store, self._address = connected(place.address, place.timeout_s), place.address
        return self._store

    def _drop(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._number = None, 0
