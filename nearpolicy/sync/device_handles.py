"""Weights through the memory of a device that a rank of the learner and a generator share, by handles to it.

    rank 0, device 0   gather, pack | gather, pack | ...     generator 0, device 0
                          block A       block B         ->   opens both once, and copies out of them into its model
    rank 1, device 1   gather, pack | gather, pack | ...     generator 1, device 1

A version is cut into buckets of equal size, which all ranks fill together, each in its own two blocks of memory: one is
filled while generators read the other. Beside the models nothing else is held: a generator copies each bucket into what
it computes from. If that does not come to its end, it samples nothing until another load has succeeded.

What is told over a line between rank and generator (`Line`), n being the shipment's number:

    generator   here n, name   ready n                  read n, 0              ...
    rank                                 block, handle  filled n, 0  filled n, 1  ...  | over n: it goes on without you

Promises: a block is filled again only after all who read it have said so, or are given up and hung up on; each side
says so after its device is done. A generator that hears that its rank is gone gives the version up, whatever it has
read. All waits are bounded: a quarter of ``timeout_s``, once, for a generator that does not come or does not read on,
``timeout_s`` and a quarter for one that is there and lets its sequences end (``timeout_s``, as it counts), and twice
``timeout_s`` for everything. Ranks go in step, so that a generator that keeps its own rank waiting keeps the others so
long.

What was run are CPUs (blocks of main memory, gloo between ranks). CUDA IPC and nccl have not run.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearpolicy.errors import SyncError, described
from nearpolicy.models.device import identity, settle
from nearpolicy.models.weights import Arriving, Stretch
from nearpolicy.roles import Entry, Shard, Shipment, VersionRecord
from nearpolicy.sync.blocks import Block, Gone, Line, Listener, line_to, opened
from nearpolicy.sync.collective import ALIGNMENT, Group, pack, store_of_ranks, stretch, two_at_once
from nearpolicy.sync.plan import Copy, dtype_called
from nearpolicy.sync.shipping import Alone, OneAtATime, Peers, Route, digests_among, known_digests
from nearpolicy.waits import waiting

NAME = "device_handles"


@dataclass(frozen=True, slots=True)
class At:
    """Where a rank of the learner is."""

    device: str
    """`identity` of its device."""
    address: str
    """Of its listener."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a receiver needs to take part."""

    serial: int
    """Of the shipment, among those of this sender."""
    ranks: tuple[At, ...]
    bucket: int
    """Bytes, of each but the last."""
    timeout_s: float


def rank_of(name: str, size: int) -> int:
    """The rank of ``size`` that a generator gets its weights from: that of its own place, by the number in its name."""
    number = name.rpartition(" ")[2]
    return int(number) % size if number.isdecimal() else 0


@dataclass(eq=False)
class _Reader:
    """A generator, as its rank sees it."""

    line: Line
    name: str = ""
    here: int = 0
    """The last shipment that it has come for; and below, the last that it was ready to read, and that it has read."""
    ready: int = 0
    done: int = 0
    unread: set[int] = field(default_factory=set)
    """Buckets that it has been told of."""
    knows: list[Block] = field(default_factory=list)
    """Whose handles it has."""


class DeviceHandlesSender:
    """Implements `Sender`."""

    def __init__(
        self,
        *,
        timeout_s: float,
        peers: Peers | None = None,
        wire: torch.dtype | None = None,
        bucket_mb: float = 32.0,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:
        """``backend``, ``host``: of the collective between several ranks, and where their first one is reached."""
        self._timeout_s, self._backend, self._wire = timeout_s, backend, wire
        self._peers = peers or Alone()
        self._device = device or torch.device("cpu")
        self._most = int(bucket_mb * 2**20) // ALIGNMENT * ALIGNMENT
        self._route = Route(self._peers, wire, ALIGNMENT)
        self._listener = Listener()
        self._readers: list[_Reader] = []
        self._blocks: list[Block] = []
        self._shards: Mapping[str, Shard] | None = None
        self._serial = 0
        self._group: Group | None = None
        self._store = store_of_ranks(self._peers, host, timeout_s)[0] if self._peers.size > 1 else None
        at = At(identity(self._device), self._listener.address)
        self._ranks = tuple(self._peers.exchange("where ranks hand weights over", at))

    def send(self, record: VersionRecord, shards: Mapping[str, Shard], digests: Mapping[str, str]) -> Shipment:
        self._route.update(shards)
        entries = self._route.entries
        self._entries = {entry.name: entry for entry in entries}
        self._total = max((entry.offset + entry.nbytes for entry in entries), default=0)
        bucket = min(self._most, max(ALIGNMENT, -(-self._total // ALIGNMENT) * ALIGNMENT))
        self._parts = parts_of(self._route.copies, self._entries, bucket, self._total)
        known = known_digests(self._peers, digests, shards, self._wire)
        digests = known or digests_among(self._peers, self._route, shards)
        self._shards, self._bucket, self._serial = shards, bucket, self._serial + 1
        return Shipment(
            transport=NAME,
            lineage=record.lineage,
            version=record.version,
            entries=entries,
            digests=dict(digests),
            place=Place(self._serial, self._ranks, bucket, self._timeout_s),
        )

    def deliver(self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str] | None = None) -> list[str]:
        """Who has read all of it, of all ranks. Of ``awaited`` those of this rank are waited for. `SyncError` if nobody
        has, and on the second call: pieces that were made for it are not kept."""
        place: Place = shipment.place
        if self._shards is None or (place.serial, place.ranks) != (self._serial, self._ranks):
            raise SyncError(f"version {shipment.version} cannot be handed over any more, the learner has gone on")
        self._deadline = time.monotonic() + 2 * self._timeout_s
        mine = {name for name in members if rank_of(name, self._peers.size) == self._peers.rank}
        try:
            readers = self._come(mine, mine & set(members if awaited is None else awaited))
            somebody = any(self._peers.exchange("whether a generator is there", bool(readers)))
            failure = self._handed(readers) if somebody else None
            failures = [f for f in self._peers.exchange("how it was handed over", failure) if f is not None]
            done = [r.name for r in readers if r.done == self._serial and not failures]
            done = list(itertools.chain.from_iterable(self._peers.exchange("who has everything", done)))
        except BaseException:
            self._hang_up(self._readers)
            raise
        finally:
            self._shards = None
        if failures:
            self._hang_up(self._readers)
            self._leave_group()
        for reader in set(self._readers) - set(readers):
            if reader.here == self._serial:
                self._tell(reader, "over", self._serial)
        if not done:
            reason = failures[0] if failures else "no generator was there and read it to its end"
            raise SyncError(f"version {shipment.version} reached no generator: {reason}")
        return [name for name in members if name in done]

    def close(self) -> None:
        self._hang_up(self._readers)
        self._listener.close()
        self._leave_group()
        for block in self._blocks:
            block.close()
        self._blocks, self._shards = [], None

    # Who reads.

    def _come(self, mine: set[str], awaited: set[str]) -> list[_Reader]:
        """Those of this rank that are ready to read this shipment."""
        with waiting("publication", f"{', '.join(sorted(awaited))} to come for their weights"):
            self._listen(self._timeout_s / 4, lambda: awaited <= {r.name for r in self._at_hand(awaited)})
        with waiting("publication", "generators to let their sequences end"):
            # a generator counts ``timeout_s`` from a little later on, and then ends its pass
            self._listen(self._timeout_s * 1.25, lambda: all(r.ready == r.here for r in self._at_hand(awaited)))
        return [r for r in self._at_hand(mine) if r.ready == self._serial]

    def _at_hand(self, names: set[str]) -> list[_Reader]:
        return [r for r in self._readers if r.here == self._serial and r.name in names]

    def _listen(self, wait_s: float, until: Callable[[], bool]) -> bool:
        """Hear what generators say, until something is so; whether it is, in time. Who hangs up is forgotten."""
        deadline = min(time.monotonic() + wait_s, self._deadline)
        while True:
            is_so, left = until(), deadline - time.monotonic()
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener.socket, selectors.EVENT_READ)
                for reader in self._readers:
                    selector.register(reader.line.socket, selectors.EVENT_READ, reader)
                found = selector.select(0 if is_so else max(0.0, left))
            for key, _ in found:
                self._hear(key.data)
            if not found and (is_so or left <= 0):
                return is_so

    def _hear(self, reader: _Reader | None) -> None:
        if reader is None:
            with contextlib.suppress(Gone):
                self._readers.append(_Reader(self._listener.accept()))
            return
        try:
            (what, serial, *more), _ = reader.line.hear(0)
        except (Gone, TimeoutError):
            self._hang_up([reader])
            return
        if what == "here":
            reader.here, reader.name = serial, more[0]
            reader.unread.clear()
            self._hang_up([r for r in self._readers if r is not reader and r.name == reader.name])  # lost unnoticed
            if serial != self._serial:
                self._tell(reader, "over", serial)
        elif what == "ready":
            reader.ready = serial
        elif what == "read" and serial == self._serial:
            reader.unread.discard(more[0])
            if more[0] == len(self._parts) - 1:
                reader.done = serial

    def _hang_up(self, readers: Iterable[_Reader]) -> None:
        gone = list(readers)
        for reader in gone:
            reader.line.close()
        self._readers = [reader for reader in self._readers if reader not in gone]

    def _tell(self, reader: _Reader, *message: Any, block: Block | None = None) -> None:
        try:
            reader.line.say(*message, descriptors=block.descriptors if block is not None else ())
        except Gone:
            self._hang_up([reader])

    # What is read.

    def _handed(self, readers: Sequence[_Reader]) -> str | None:
        """Every bucket to all of them that stay; what it failed of, for every rank."""
        try:
            for number, parts in enumerate(self._parts):
                self._wait_until_read(readers, before=number - 1)
                block = self._block(number % 2)
                begin = number * self._bucket
                self._fill(block.memory[: min(self._total - begin, self._bucket)], begin, parts)
                settle(self._device)
                self._show(readers, number, block)
            self._wait_until_read(readers, before=len(self._parts))
        except (RuntimeError, SyncError) as error:  # the first is what gloo, nccl and CUDA raise
            self._leave_group()  # whoever still waits for this rank hears of it
            return described(error)
        return None

    def _wait_until_read(self, readers: Sequence[_Reader], *, before: int) -> None:
        """Those who have not read the buckets before this one in time are given up."""

        def slow() -> list[_Reader]:
            return [r for r in readers if r in self._readers and any(b < before for b in r.unread)]

        if slow():
            with waiting("publication", f"{', '.join(r.name for r in slow())} to read its weights"):
                self._listen(self._timeout_s / 4, lambda: not slow())
            self._hang_up(slow())

    def _block(self, slot: int) -> Block:
        if self._blocks and self._blocks[0].memory.numel() != self._bucket:
            for block in self._blocks:
                block.close()
            self._blocks = []
        if len(self._blocks) == slot:
            self._blocks.append(Block(self._bucket, self._device))
        return self._blocks[slot]

    @torch.no_grad()
    def _fill(self, memory: Tensor, begin: int, parts: Sequence[Part]) -> None:
        """What this rank has, and from the others what they have, in the same order on all of them."""
        mine = [part.copy for part in parts if part.copy.holder == self._peers.rank]
        pack(memory, begin, mine, self._entries, self._shards)
        if self._store is None:
            return
        if self._group is None:
            store = dist.PrefixStore(f"group/{self._serial}", self._store)
            self._group = Group(self._backend, store, self._peers.rank, self._peers.size, self._timeout_s)
        runs = (list(run) for _, run in itertools.groupby(parts, key=lambda part: part.copy.holder))
        two_at_once(
            self._group.broadcast(memory[run[0].begin - begin : run[-1].end - begin], run[0].copy.holder)
            for run in runs
        )

    def _show(self, readers: Sequence[_Reader], number: int, block: Block) -> None:
        for reader in readers:
            if reader in self._readers and block not in reader.knows:
                reader.knows = [b for b in reader.knows if b in self._blocks] + [block]
                self._tell(reader, "block", number % 2, block.handle(), block=block)
            if reader in self._readers:
                reader.unread.add(number)
                self._tell(reader, "filled", self._serial, number)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a version that one rank has, inside one bucket."""

    begin: int
    end: int
    copy: Copy


def parts_of(copies: Sequence[Copy], entries: Mapping[str, Entry], bucket: int, total: int) -> list[list[Part]]:
    """What each bucket is made of, in order. `SyncError` for a piece that is not one stretch of its tensor."""
    found: list[list[Part]] = [[] for _ in range(-(-total // bucket))]
    for copy in copies:
        begin, end = stretch(copy, entries[copy.name])
        for number in range(begin // bucket, -(-end // bucket)):
            low, high = number * bucket, (number + 1) * bucket
            found[number].append(Part(max(begin, low), min(end, high), copy))
    for parts in found:
        parts.sort(key=lambda part: part.begin)
    return found


class DeviceHandlesReceiver:
    """Implements `Receiver`."""

    def __init__(self, name: str, *, device: torch.device | None = None) -> None:
        """``name``: of this generator, as the publisher calls it; the number at its end is that of its place."""
        self._name, self._alone = name, OneAtATime()
        self._device = device or torch.device("cpu")
        self._address: str | None = None
        self._line: Line | None = None
        self._open: dict[int, Tensor] = {}
        """Blocks of the rank that the line leads to."""

    @contextlib.contextmanager
    def receive(self, shipment: Shipment) -> Iterator[Mapping[str, Tensor]]:
        """What is yielded comes while it is read (`Arriving`)."""
        with self._alone(shipment):
            deadline = time.monotonic() + 2 * shipment.place.timeout_s
            line = self._come(shipment)
            stream = _Stream(shipment, line, self._open, self._device, self._name, deadline)
            try:
                yield stream
            finally:
                if not stream.is_over:  # the rank is not to wait; who still reads, in the engine's thread, gives it up
                    self.close()

    def _come(self, shipment: Shipment) -> Line:
        place: Place = shipment.place
        at = place.ranks[rank_of(self._name, len(place.ranks))]
        own = identity(self._device)
        if own != at.device:
            raise SyncError(
                f"{self._name} computes on {own} and its rank of the learner on {at.device}, and handles lead only to "
                "memory of the same device; set sync.transport to shared_memory or broadcast"
            )
        try:
            if self._address == at.address:
                with contextlib.suppress(Gone):  # hung up on, or another process there: once more
                    self._line.say("here", place.serial, self._name)
                    return self._line
            self.close()
            self._line, self._address = line_to(at.address), at.address
            self._line.say("here", place.serial, self._name)
        except Gone as error:
            self.close()
            raise SyncError(f"version {shipment.version} is lost with the rank that held it: {error}") from None
        return self._line

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._address, self._open = None, None, {}


class _Stream(Arriving):
    """One version as it comes."""

    def __init__(
        self,
        shipment: Shipment,
        line: Line,
        blocks: dict[int, Tensor],
        device: torch.device,
        name: str,
        deadline: float,
    ) -> None:
        super().__init__({e.name: (e.shape, dtype_called(e.dtype)) for e in shipment.entries}, device)
        self._shipment, self._line, self._blocks, self._device = shipment, line, blocks, device
        self._name, self._deadline = name, deadline
        self.is_over = False
        """The rank waits for nothing more."""

    def rounds(self) -> Iterator[Sequence[Stretch]]:
        place: Place = self._shipment.place
        entries, serial = self._shipment.entries, place.serial
        total = max((entry.offset + entry.nbytes for entry in entries), default=0)
        version = self._shipment.version
        try:
            self._line.say("ready", serial)
            for number in range(-(-total // place.bucket)):
                with waiting(self._name, f"its rank to hand version {version} over"):
                    self._hear_of(number)
                yield list(_stretches(entries, self._blocks[number % 2], number * place.bucket))
                settle(self._device)
                self._line.say("read", serial, number)
        except Gone as error:
            raise SyncError(f"the rank that hands version {version} over is gone, or gave up: {error}") from None
        except TimeoutError:
            raise SyncError(
                f"version {version} was not handed over within {2 * place.timeout_s:g} s (twice sync.timeout_s)"
            ) from None
        self.is_over = True

    def _hear_of(self, bucket: int) -> None:
        """Until the rank says that this bucket is filled."""
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            (what, *more), descriptors = self._line.hear(left)
            if what == "block":
                self._blocks[more[0]] = opened(more[1], descriptors, self._device)
            elif what == "over" and more[0] == self._shipment.place.serial:
                self.is_over = True
                raise SyncError(f"version {self._shipment.version} was handed over without this generator")
            elif what == "filled" and more == [self._shipment.place.serial, bucket]:
                return


def _stretches(entries: Sequence[Entry], block: Tensor, begin: int) -> Iterator[Stretch]:
    """What lies in a bucket that begins at this byte of the version."""
    end = begin + block.numel()
    for entry in entries:
        low, high = max(entry.offset, begin), min(entry.offset + entry.nbytes, end)
        if low < high:
            dtype = dtype_called(entry.dtype)
            values = block[low - begin : high - begin].view(dtype)
            yield Stretch(entry.name, (low - entry.offset) // dtype.itemsize, values)
