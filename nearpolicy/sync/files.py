"""Weights as files: in a folder that learner and generators share, or in an object store (any fsspec path).

    PATH/RUN/00000007/model.safetensors     all weights (an *anchor*); model-RANK... with several ranks
    PATH/RUN/00000008/delta-0.bin           what has changed since 00000007
    PATH/RUN/00000008/manifest.json         written last: a folder without it is no version
    PATH/RUN/readers/NAME.json              the oldest folder that a receiver reads at the moment

Folders are numbered as they are sent. A receiver that holds the folder before applies one change; one that missed some
goes back to what it holds, or to an anchor, and follows from there. It touches what it holds only after every byte it
needs has come with its checksum, and shows the tensors only if they have the digests that were sent.

Nothing is removed that a receiver may still need: the last two anchors and all behind them stay, and whatever a reader
has named, until it has been silent about it for as long as a delivery may take.

With a learner of one rank an anchor is an ordinary safetensors file. Sender and receiver both keep a copy of the
weights in memory to make and to apply changes; without `delta` neither does.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import safetensors.torch
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from nearpolicy.errors import SyncError, described
from nearpolicy.machine import num_cores
from nearpolicy.models.weights import differing
from nearpolicy.models.weights import digests as digests_of
from nearpolicy.roles import Shard, Shipment, VersionRecord
from nearpolicy.sync import delta
from nearpolicy.sync.plan import Box, dtype_called, slices
from nearpolicy.sync.shipping import Alone, OneAtATime, Peers, Route, digests_among, known_digests
from nearpolicy.waits import waiting

_MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class FilePlace:
    """What a receiver needs to find a version."""

    path: str
    folder: int
    changes: bool
    """Whether later versions may be written as changes of this one."""


class _Folder:
    """The numbered folders of one run."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fs, self._root = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise SyncError(f"sync.path {path!r} cannot be used: {described(error)}") from None

    def read(self, name: str) -> bytes:
        with self._fs.open(f"{self._root}/{name}", "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """All of it or nothing, and durable where that is in our hands."""
        path = f"{self._root}/{name}"
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if not isinstance(self._fs, LocalFileSystem):
                self._fs.pipe_file(path, data)  # object stores show whole objects only
                return
            with open(f"{path}.part", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.part", path)
        except OSError as error:
            raise SyncError(f"weights cannot be written to {path}: {described(error)}") from None

    def manifest(self, folder: int) -> dict[str, Any]:
        """`FileNotFoundError` if the version is not there, or not whole."""
        found = json.loads(self.read(f"{folder:08d}/{_MANIFEST}"))
        if found["format"] != _FORMAT:
            raise SyncError(f"folder {folder:08d} of {self.path} has format {found['format']}, this reads {_FORMAT}")
        return found

    def numbers(self) -> list[int]:
        """Folders that are there, whole or not."""
        return sorted(int(name) for name in self._names("") if name.isdecimal())

    def readers(self) -> dict[str, str]:
        """What receivers say that they read; those that end in this moment are left out."""
        found = {}
        for name in self._names("readers"):
            if not name.endswith(".json"):  # half written
                continue
            with contextlib.suppress(FileNotFoundError):
                found[name] = self.read(f"readers/{name}").decode()
        return found

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _names(self, below: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(f"{self._root}/{below}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SyncError(f"sync.path {self.path!r} cannot be read: {described(error)}") from None
        return [path.rstrip("/").rpartition("/")[2] for path in found]


class FileSender:
    """Implements `Sender`."""

    def __init__(
        self,
        path: str,
        run: str,
        *,
        timeout_s: float,
        peers: Peers | None = None,
        wire: torch.dtype | None = None,
        delta: bool = True,
        anchor_every: int = 16,
    ) -> None:
        """``timeout_s``: after which a receiver that reads without a sign of life is given up. ``anchor_every``: of so
        many versions one is written whole."""
        self._folder = _Folder(f"{path.rstrip('/')}/{run}")
        self._timeout_s = timeout_s
        self._peers, self._wire = peers or Alone(), wire
        self._route = Route(self._peers, wire)
        self._delta, self._anchor_every = delta, anchor_every
        self._last: dict[str, Tensor] = {}
        """What was sent last, of this rank's pieces; and below, where each belongs."""
        self._boxes: dict[str, Box] = {}
        self._number = self._peers.exchange("the last folder", max(self._folder.numbers(), default=0))[0]
        self._base = self._number
        """The last folder that is whole."""
        self._anchors: list[int] = []
        self._readers = _Silence()

    def send(self, record: VersionRecord, shards: Mapping[str, Shard], digests: Mapping[str, str]) -> Shipment:
        self._route.update(shards)
        known = known_digests(self._peers, digests, shards, self._wire)
        digests = known or digests_among(self._peers, self._route, shards)
        pieces, boxes = self._pieces(shards)
        changes = self._changes(pieces, boxes)
        kind, base = ("full", None) if changes is None else ("delta", self._base)
        self._number += 1
        file, data, places = self._written(pieces, changes)
        mine = {"file": file, "checksum": xxhash.xxh3_128_hexdigest(data), "pieces": places, "boxes": boxes}
        self._folder.write(f"{self._number:08d}/{file}", data)
        files = self._peers.exchange("written files", mine)
        entries = self._route.entries
        if self._peers.rank == 0:
            manifest = {
                "format": _FORMAT,
                "lineage": record.lineage,
                "version": record.version,
                "kind": kind,
                "base": base,
                "tensors": {entry.name: [list(entry.shape), entry.dtype] for entry in entries},
                "digests": dict(digests),
                "files": files,
            }
            self._folder.write(f"{self._number:08d}/{_MANIFEST}", json.dumps(manifest).encode())
            if kind == "full":
                self._anchors.append(self._number)
                self._collect_garbage()
        elif kind == "full":
            self._anchors.append(self._number)
        self._peers.exchange("the manifest is written", None)
        self._base = self._number
        self._remember(pieces, boxes)
        return Shipment(
            transport="files",
            lineage=record.lineage,
            version=record.version,
            entries=entries,
            digests=dict(digests),
            place=FilePlace(self._folder.path, self._number, self._delta),
        )

    def deliver(
        self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str] | None = None
    ) -> Sequence[str]:
        return members

    def close(self) -> None:
        """The last versions stay: a run that is taken up again, or a receiver, may want them."""
        self._last = {}

    def _pieces(self, shards: Mapping[str, Shard]) -> tuple[dict[str, Tensor], dict[str, Box]]:
        """This rank's pieces as they travel, by a key of their own; and where each belongs."""
        pieces, boxes = {}, {}
        for copy in self._route.copies:
            if copy.holder == self._peers.rank:
                dtype = dtype_called(self._route.layout.dtypes[copy.name])
                source = shards[copy.name].tensor.detach()[slices(copy.source)]
                piece = source.to(dtype).cpu().contiguous()
                owns = piece.untyped_storage().nbytes() == piece.nbytes
                pieces[copy.name] = piece if owns else piece.clone()  # safetensors wants tensors that share nothing
                boxes[copy.name] = copy.destination
        return pieces, boxes

    def _changes(self, pieces: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> dict[str, tuple[str, bytes]] | None:
        """Since the last version, or None where all are to be written; all ranks decide alike."""
        due = not self._anchors or self._number + 1 - self._anchors[-1] >= self._anchor_every
        fits = boxes == self._boxes and _forms(pieces) == _forms(self._last)
        if any(self._peers.exchange("whether an anchor is due", due or not self._delta or not fits)):
            return None
        found = _each(lambda name: delta.encode(self._last[name], pieces[name]), list(pieces))
        sizes = self._peers.exchange(
            "sizes", (sum(len(data) for _, data in found.values()), sum(tensor.nbytes for tensor in pieces.values()))
        )
        return found if sum(small for small, _ in sizes) < sum(full for _, full in sizes) else None

    def _written(
        self, pieces: Mapping[str, Tensor], changes: Mapping[str, tuple[str, bytes]] | None
    ) -> tuple[str, bytes, dict[str, Any]]:
        """Name and content of this rank's file, and where each change lies in it."""
        if changes is None:
            name = "model.safetensors" if self._peers.size == 1 else f"model-{self._peers.rank}.safetensors"
            return name, safetensors.torch.save(dict(pieces), metadata={"format": "pt"}), {}
        places, parts, offset = {}, [], 0
        for name, (method, data) in changes.items():
            places[name] = [method, offset, len(data)]
            parts.append(data)
            offset += len(data)
        return f"delta-{self._peers.rank}.bin", b"".join(parts), places

    @torch.no_grad()
    def _remember(self, pieces: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> None:
        if not self._delta:
            return
        self._boxes = dict(boxes)
        if _forms(self._last) != _forms(pieces):
            self._last = {name: tensor.clone() for name, tensor in pieces.items()}
            return
        for name, tensor in pieces.items():
            self._last[name].copy_(tensor)

    def _collect_garbage(self) -> None:
        """After an anchor: what lies before the one before it, and before what readers have named."""
        if len(self._anchors) < 2:
            return
        self._anchors = self._anchors[-2:]
        oldest = min([self._anchors[0], *self._readers.heard(self._folder.readers(), self._timeout_s)])
        for number in self._folder.numbers():
            if number < oldest:
                self._folder.remove(f"{number:08d}/{_MANIFEST}")  # first, so that no half of a version looks whole
                self._folder.remove(f"{number:08d}")


def _forms(pieces: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in pieces.items()}


class _Silence:
    """How long readers have said the same, by our own clock: those of other hosts may differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[str, float]] = {}

    def heard(self, readers: Mapping[str, str], timeout_s: float) -> list[int]:
        """Folders named by readers that have spoken within ``timeout_s``."""
        now, found = self._clock(), {}
        for name, text in readers.items():
            before = self._said.get(name)
            found[name] = before if before is not None and before[0] == text else (text, now)
        self._said = found
        return [json.loads(text)["folder"] for text, since in found.values() if now - since <= timeout_s]


class FileReceiver:
    """Implements `Receiver`."""

    def __init__(self, name: str) -> None:
        """``name``: of this generator, as the publisher calls it."""
        self._name, self._alone = name, OneAtATime()
        self._held: dict[str, Tensor] = {}
        self._holds: tuple[str, int] | None = None
        """Path and folder of what is held."""
        self._count = 0

    @contextlib.contextmanager
    def receive(self, shipment: Shipment) -> Iterator[Mapping[str, Tensor]]:
        with self._alone(shipment):
            yield self._received(shipment)
            if not shipment.place.changes:
                self._forget()

    def _received(self, shipment: Shipment) -> dict[str, Tensor]:
        place: FilePlace = shipment.place
        folder = _Folder(place.path)
        try:
            with waiting(self._name, f"the files of version {shipment.version}"), self._reading(folder, place):
                tensors = self._fetched(folder, place, shipment)
        except FileNotFoundError as error:
            raise SyncError(
                f"version {shipment.version} is not in {place.path} any more, or cannot be seen from here: "
                f"{described(error)}"
            ) from None
        wrong = differing(shipment.digests, digests_of(tensors))
        if wrong:
            self._forget()
            raise SyncError(f"{wrong[0]!r} and {len(wrong) - 1} more of {place.path} differ from what was sent")
        return tensors

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._held, self._holds = {}, None

    @contextlib.contextmanager
    def _reading(self, folder: _Folder, place: FilePlace) -> Iterator[None]:
        """Say what is read, so that it stays."""
        self._count += 1
        oldest = place.folder if self._holds is None or self._holds[0] != place.path else self._holds[1]
        oldest = min(oldest, place.folder)
        folder.write(f"readers/{self._name}.json", json.dumps({"folder": oldest, "count": self._count}).encode())
        try:
            yield
        finally:
            folder.remove(f"readers/{self._name}.json")

    def _fetched(self, folder: _Folder, place: FilePlace, shipment: Shipment) -> dict[str, Tensor]:
        chain = self._chain(folder, place, shipment)
        files = [self._files(folder, manifest) for manifest in chain]  # all of it, before anything is touched
        for manifest, of_ranks in zip(chain, files, strict=True):
            self._holds = None  # until it is all there
            if manifest["kind"] == "full":
                self._held = {}  # before there is another one
                self._held = _whole_tensors(manifest, of_ranks)
            else:
                _apply(manifest, of_ranks, self._held)
        self._holds = (place.path, place.folder)
        return self._held

    def _chain(self, folder: _Folder, place: FilePlace, shipment: Shipment) -> list[dict[str, Any]]:
        """Manifests that lead from what is held, or from an anchor, to the version; the first one first."""
        if self._holds == (place.path, place.folder):
            return []
        found = [folder.manifest(place.folder) | {"folder": place.folder}]
        if (found[0]["lineage"], found[0]["version"]) != (shipment.lineage, shipment.version):
            raise SyncError(f"folder {place.folder:08d} of {place.path} holds version {found[0]['version']} by now")
        while found[-1]["kind"] == "delta" and self._holds != (place.path, found[-1]["base"]):
            base = found[-1]["base"]
            found.append(folder.manifest(base) | {"folder": base})
        return found[::-1]

    def _files(self, folder: _Folder, manifest: Mapping[str, Any]) -> list[tuple[dict[str, Any], Any]]:
        found = []
        for of_rank in manifest["files"]:
            name = f"{manifest['folder']:08d}/{of_rank['file']}"
            data = folder.read(name)
            if xxhash.xxh3_128_hexdigest(data) != of_rank["checksum"]:
                raise SyncError(f"{folder.path}/{name} is not what was written there")
            found.append((of_rank, data))
        return found


def _whole_tensors(manifest: Mapping[str, Any], files: Sequence[tuple[dict[str, Any], bytes]]) -> dict[str, Tensor]:
    loaded = [(of_rank["boxes"], safetensors.torch.load(data)) for of_rank, data in files]
    found = {n: torch.empty(shape, dtype=dtype_called(dtype)) for n, (shape, dtype) in manifest["tensors"].items()}
    for boxes, pieces in loaded:
        for name, piece in pieces.items():
            if piece.shape == found[name].shape:
                found[name] = piece
            else:
                found[name][slices(boxes[name])] = piece
    return found


def _apply(
    manifest: Mapping[str, Any], files: Sequence[tuple[dict[str, Any], bytes]], held: Mapping[str, Tensor]
) -> None:
    for of_rank, data in files:

        def change(name: str, of_rank: Mapping[str, Any] = of_rank, data: bytes = data) -> None:
            method, offset, size = of_rank["pieces"][name]
            target = held[name][slices(of_rank["boxes"][name])]
            piece = target.contiguous()
            delta.apply(method, data[offset : offset + size], piece)
            if piece.data_ptr() != target.data_ptr():
                target.copy_(piece)

        _each(change, [name for name, (method, _, _) in of_rank["pieces"].items() if method != "same"])


def _each(act: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
    """On all cores: neither comparing nor compressing holds the interpreter for long."""
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="weights") as cores:
        return dict(zip(names, cores.map(act, names), strict=True))
