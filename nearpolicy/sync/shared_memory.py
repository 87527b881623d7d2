"""Weights through memory that learner and generators of one host share.

    learner rank 0 | header | tensor | tensor | ...      generator
    learner rank 1 |  each rank writes its own pieces -> maps the segment and copies from it

A segment is a file of a memory file system (/dev/shm). It is used again for the next version, so that its pages are
faulted in once, unless somebody still reads it: a reader holds a shared lock on the file, and a writer that finds one
takes a new segment. Nobody reads a version that is not whole: the header says which one it is, under that lock.

A segment is removed when it is replaced and when its sender closes. Those of a run that was killed are removed by the
next sender on the host: the owner of a segment holds a lock that ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import struct
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nearpolicy.errors import SyncError
from nearpolicy.machine import num_cores
from nearpolicy.models.weights import digests as digests_of
from nearpolicy.roles import Entry, Shard, Shipment, VersionRecord
from nearpolicy.sync.copying import blocks_of, copy_blocks
from nearpolicy.sync.plan import Copy, dtype_called, slices
from nearpolicy.sync.shipping import Alone, OneAtATime, Peers, Route, known_digests

_HEADER = struct.Struct("<8sqqq")
_MAGIC = b"npweight"
_HEADER_BYTES = 4096


def default_folder() -> Path:
    """Where files are memory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


_Target = tuple[str, tuple[slice, ...], Tensor]
"""A name, which part of that shard goes there, and where that is."""


class _Segment:
    """A mapped file."""

    def __init__(self, path: Path, fd: int, size: int, *, writable: bool) -> None:
        self.path, self.fd, self.size = path, fd, size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        populate = getattr(mmap, "MAP_POPULATE", 0)  # one call instead of a fault every 4 KB
        self._memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | populate, prot=protection)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that may only be read
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._entries: Sequence[Entry] = ()
        self._tensors: Mapping[str, Tensor] = {}
        self._copies: Sequence[Copy] | None = None
        self._targets: Sequence[_Target] = ()

    @classmethod
    def create(cls, path: Path, size: int) -> _Segment:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # what is missing is known now, and not by SIGBUS in the middle of a copy
            return cls(path, fd, size, writable=True)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            room = os.statvfs(path.parent)
            raise SyncError(
                f"weights need {size / 2**20:,.0f} MB in {path.parent}, which has "
                f"{room.f_bavail * room.f_frsize / 2**20:,.0f} MB left; make it larger (--shm-size in a container) or "
                "use sync.transport=broadcast"
            ) from None

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> _Segment:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            return cls(path, fd, os.fstat(fd).st_size, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def tensors(self, entries: Sequence[Entry]) -> Mapping[str, Tensor]:
        """By name; made once, since what is to be where hardly ever changes."""
        if self._entries != entries:
            self._tensors, self._entries = {entry.name: self._tensor(entry) for entry in entries}, entries
        return self._tensors

    def targets_of(self, route: Route, rank: int) -> Sequence[_Target]:
        """What this rank of a learner writes; made once for a plan."""
        if self._copies is not route.copies:
            tensors = self.tensors(route.entries)
            mine = [copy for copy in route.copies if copy.holder == rank]
            self._targets = [(c.name, slices(c.source), tensors[c.name][slices(c.destination)]) for c in mine]
            self._copies = route.copies
        return self._targets

    def _tensor(self, entry: Entry) -> Tensor:
        begin = _HEADER_BYTES + entry.offset
        return self._bytes[begin : begin + entry.nbytes].view(dtype_called(entry.dtype)).view(entry.shape)

    @property
    def holds(self) -> tuple[int, int] | None:
        """Lineage and version; None while it is written."""
        magic, lineage, version, whole = _HEADER.unpack_from(self._memory)
        return (lineage, version) if magic == _MAGIC and whole else None

    def mark(self, lineage: int, version: int, *, whole: bool) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, lineage, version, int(whole))

    def lock(self, how: int) -> bool:
        """Take a lock without waiting; whether it was to be had."""
        try:
            fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def give_back(self) -> None:
        """Its memory, at once, although others still map it. Whoever opens it later finds that it holds nothing."""
        self.mark(0, 0, whole=False)
        os.ftruncate(self.fd, _HEADER_BYTES)

    def close(self) -> None:
        """The mapping goes with its last tensor."""
        os.close(self.fd)


class SharedMemorySender:
    """Implements `Sender`."""

    def __init__(
        self,
        run: str,
        *,
        peers: Peers | None = None,
        wire: torch.dtype | None = None,
        folder: Path | None = None,
        threads: int | None = None,
    ) -> None:
        """``run``: whose weights these are, for the names of files. ``wire``: the dtype of the generators, where it is
        not the learner's. ``threads``: that copy at once, in each rank; None for all cores."""
        self._peers = peers or Alone()
        self._wire, self._folder = wire, folder or default_folder()
        self._route = Route(self._peers, wire)
        self._threads = threads or num_cores()
        self._segment: _Segment | None = None
        self._owner: int | None = None
        self._count = 0
        if self._peers.rank == 0:
            remove_leftovers(self._folder)
            self._stem = f"nearpolicy-{re.sub('[^A-Za-z0-9_.]', '_', run)[:80]}-{uuid.uuid4().hex[:12]}"
            self._owner = _own(self._folder / f"{self._stem}.owner")

    def send(self, record: VersionRecord, shards: Mapping[str, Shard], digests: Mapping[str, str]) -> Shipment:
        self._route.update(shards)
        entries = self._route.entries
        size = _HEADER_BYTES + (entries[-1].offset + entries[-1].nbytes if entries else 0)
        segment = self._taken(record, size)
        self._write(segment, shards)
        self._peers.exchange("all pieces are written", None)
        digests = known_digests(self._peers, digests, shards, self._wire) or self._digested(segment.tensors(entries))
        if self._peers.rank == 0:
            segment.mark(record.lineage, record.version, whole=True)
            segment.unlock()
        self._peers.exchange("the segment is whole", None)
        return Shipment(
            transport="shared_memory",
            lineage=record.lineage,
            version=record.version,
            entries=entries,
            digests=dict(digests),
            place=str(segment.path),
        )

    def deliver(
        self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str] | None = None
    ) -> Sequence[str]:
        return members

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        if self._peers.rank == 0:
            if self._segment is not None:
                self._segment.path.unlink(missing_ok=True)
            if self._owner is not None:
                (self._folder / f"{self._stem}.owner").unlink(missing_ok=True)
                os.close(self._owner)
        self._segment = self._owner = None

    def _taken(self, record: VersionRecord, size: int) -> _Segment:
        """The segment to write, on every rank: the last one, or a new one if that is read or has another size."""
        path = None
        try:
            if self._peers.rank == 0:
                path = self._prepared(record, size)
        except SyncError as error:
            self._peers.exchange("the segment", error)
            raise
        told = self._peers.exchange("the segment", path)[0]
        if isinstance(told, SyncError):
            raise told
        if self._segment is None or self._segment.path != told:
            if self._segment is not None:
                self._segment.close()
            self._segment = _Segment.open(told, writable=True)
        return self._segment

    def _prepared(self, record: VersionRecord, size: int) -> Path:
        last = self._segment
        is_free = last is not None and last.lock(fcntl.LOCK_EX)
        if last is None or last.size != size or not is_free:
            if last is not None:
                if is_free:
                    last.give_back()  # before the next one takes its own
                last.path.unlink(missing_ok=True)  # who reads it keeps it until he is done
                last.close()
                self._segment = None
            self._count += 1
            self._segment = _Segment.create(self._folder / f"{self._stem}-{self._count}", size)
            self._segment.lock(fcntl.LOCK_EX)
        self._segment.mark(record.lineage, record.version, whole=False)
        return self._segment.path

    def _write(self, segment: _Segment, shards: Mapping[str, Shard]) -> None:
        blocks = []
        for name, where, target in segment.targets_of(self._route, self._peers.rank):
            blocks += blocks_of(target, shards[name].tensor.detach()[where])
        copy_blocks(blocks, self._threads)

    def _digested(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Every rank digests its share of what all have written."""
        order = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
        mine = digests_of({name: tensors[name] for name in order[self._peers.rank :: self._peers.size]})
        found = {name: value for part in self._peers.exchange("digests", mine) for name, value in part.items()}
        return {name: found[name] for name in tensors}


class SharedMemoryReceiver:
    """Implements `Receiver`."""

    def __init__(self) -> None:
        self._alone = OneAtATime()
        self._segment: _Segment | None = None

    @contextlib.contextmanager
    def receive(self, shipment: Shipment) -> Iterator[Mapping[str, Tensor]]:
        with self._alone(shipment):
            gone = f"version {shipment.version} is not in shared memory any more, the learner has gone on"
            segment = self._mapped(Path(shipment.place), gone)
            if not segment.lock(fcntl.LOCK_SH):
                raise SyncError(gone)
            try:
                if segment.holds != (shipment.lineage, shipment.version):
                    raise SyncError(gone)
                yield segment.tensors(shipment.entries)
            finally:
                segment.unlock()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _mapped(self, path: Path, gone: str) -> _Segment:
        """Mapped once, and again only when the learner takes another one."""
        if self._segment is None or self._segment.path != path:
            self.close()
            try:
                self._segment = _Segment.open(path, writable=False)
            except FileNotFoundError:
                raise SyncError(f"{gone} ({path} does not exist here: is this the learner's host?)") from None
        return self._segment


def _own(path: Path) -> int:
    """Make a file that is locked for as long as this process lives."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):  # taken for a leftover between the two calls
            pass
        os.close(fd)


def remove_leftovers(folder: Path) -> None:
    """Remove the segments of runs that ended without doing it."""
    for owner in folder.glob("nearpolicy-*.owner"):
        with contextlib.suppress(OSError):  # of another user, or just removed by another sender
            fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for segment in folder.glob(f"{owner.name.removesuffix('.owner')}-*"):
                    segment.unlink(missing_ok=True)
                owner.unlink(missing_ok=True)
            finally:
                os.close(fd)
