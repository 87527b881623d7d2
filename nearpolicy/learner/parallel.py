"""Several processes that are one learner: how they find each other, agree, and fall apart without a hang.

    join(rank, size, address) -> Ranks -> PolicyLearner(..., ranks=ranks) -> leave()

Every rank makes the same calls with the same arguments; rows, packing and annotations are the same on all of them, so
what follows is too. Two kinds of failure:

- What a rank does by itself (a loss function, a disk) fails at a point where ranks *agree*: all of them raise the same
  error, and all can go on.
- Anything else (memory that is not there, a rank that is killed, one that does not come) leaves the others inside a
  collective operation. The rank that fails raises at once, and writes the reason where all can read it; the others
  raise it too, as soon as they notice: at once if its process ends, else after `timeout_s` (gloo cannot be told to
  give up earlier). So whoever runs the ranks should end them all at the first error. The ranks have come *apart*:
  every call raises the same reason until they join anew.

A call that not all ranks make, or not in the same order, is not an error that can be caught: gloo ends the process.

Runs over gloo on CPUs. The nccl side (`pick_backend`) has never been run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout

from nearpolicy import errors
from nearpolicy.errors import NearpolicyError, StandstillError, described
from nearpolicy.learner.ranks import Together
from nearpolicy.learner.sharding import FullySharded, Sharding
from nearpolicy.models.device import pick_backend, pick_device
from nearpolicy.waits import waiting

T = TypeVar("T")

_FAILED = "failed"
"""Key of the reason why the ranks have come apart."""


def join(rank: int, size: int, address: str, timeout_s: float, device: torch.device | None = None) -> Ranks:
    """Take part as ``rank`` of ``size``; returns when all have. ``address``: host and port, where rank 0 listens.
    `StandstillError` after ``timeout_s`` without the others; later, this bounds every wait of one rank for another."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    try:
        with waiting(f"learner rank {rank}", f"{size} ranks at {address}"):
            store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=limit)
            device = device or pick_device()
            dist.init_process_group(pick_backend(device), store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        leave()
        raise StandstillError(
            f"learner rank {rank} of {size} has not met the others at {address} within {timeout_s:g} s: "
            f"{described(error)}. Start all ranks with one address, where rank 0 runs and can be reached"
        ) from error
    return Ranks(rank, size, store, device, timeout_s)


def leave() -> None:
    """Take part no more. May be called at any time, also after the ranks have come apart."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks(Together):
    """The processes of one learner, seen from one of them. The thread of the learner calls it."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self._store = store
        self._meshes: dict[int, DeviceMesh] = {}
        self._calls = 0
        self._inside: str | None = None
        self._agreed: Exception | None = None
        """The last error that all ranks have raised together."""
        self._apart: NearpolicyError | None = None

    def mesh(self, replicas: int) -> DeviceMesh:
        """``replicas`` copies of the weights, each spread over an equal part of the ranks."""
        if self.size % replicas:
            raise ValueError(f"{self.size} ranks cannot hold {replicas} copies of the weights in equal parts")
        if replicas not in self._meshes:
            shape = (self.size,) if replicas == 1 else (replicas, self.size // replicas)
            names = ("shard",) if replicas == 1 else ("replicate", "shard")
            mesh = self._meshes[replicas] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            for group in mesh.get_all_groups():
                _set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        return self._meshes[replicas]

    def shard(self, model: torch.nn.Module, *, replicas: int, offload: bool) -> Sharding:
        mesh = self.mesh(replicas)
        with self.agreement("the weights of a model"):  # which each may have to read
            return FullySharded(model, mesh, rank=self.rank, offload=offload)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        if self._apart is not None:
            raise type(self._apart)(f"{self._apart}. Nothing can be done with them any more: start the ranks anew")
        if self._inside is not None:  # a part of a longer call
            yield
            return
        self._inside, self._calls = what, self._calls + 1
        try:
            self._store.set(f"at/{self.rank}", json.dumps([self._calls, what]))
            with waiting(f"learner rank {self.rank}", f"the other ranks in {what}"):
                yield
        except BaseException as error:
            if error is self._agreed:
                raise
            self._apart = self._come_apart(what, error)
            if not isinstance(error, Exception):
                raise
            raise self._apart from error
        finally:
            self._inside = None

    @contextmanager
    def agreement(self, what: str) -> Iterator[None]:
        found = None
        try:
            yield
        except Exception as error:
            found = error
        self.agree(what, found)

    def agree(self, what: str, error: Exception | None = None, *, same: Any = None) -> None:
        own = None if error is None else _told(error)
        answers = self.exchange(what, (own, zlib.crc32(repr(same).encode())))
        for rank, (told, _) in enumerate(answers):
            if told is not None:
                self._agreed = _error_of(rank, told)
                raise self._agreed from error
        if len({value for _, value in answers}) > 1:
            self._agreed = NearpolicyError(
                f"the ranks of the learner come with different {what}; call every rank with the same arguments, in "
                "the same order"
            )
            raise self._agreed

    def exchange(self, what: str, value: T) -> list[T]:
        with self.together(what):
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, value)
            return answers

    def merged(self, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        with self.together(what):
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat.view(torch.uint8))  # bytes: all but one are 0, and none is lost to rounding
            parts = flat.split([tensor.numel() for tensor in tensors])
            return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _come_apart(self, what: str, error: BaseException) -> NearpolicyError:
        """The reason that all ranks give; it is written down before the connections are cut."""
        told = _told(error)
        try:
            if _of_connections(error) and not self._store.check([_FAILED]):
                told = [*_told(self._missing(what, error))]
            said = self._store.compare_set(_FAILED, "", json.dumps([self.rank, told]))
            rank, told = json.loads(said)
        except RuntimeError:  # the store is gone
            rank, told = self.rank, _told(self._missing(what, error))
        if dist.is_initialized():
            _abort_process_group()
        return _error_of(rank, told)

    def _missing(self, what: str, error: BaseException) -> StandstillError:
        """Who has not come to where this rank waits, as far as can be seen."""
        late = []
        for rank in range(self.size):
            try:
                key = f"at/{rank}"
                number, where = json.loads(self._store.get(key)) if self._store.check([key]) else (0, "nothing yet")
            except RuntimeError:
                late = ["rank 0, which keeps the ranks' common record and cannot be reached"]
                break
            if rank != self.rank and (number, where) != (self._calls, what):
                late.append(f"rank {rank}, last seen in {where}")
        whom = "; ".join(late) or "a rank that is in the same call and has died, or stands still"
        return StandstillError(
            f"waited in {what}, at most {self.timeout_s:g} s, for {whom} ({described(error, 160)}). Look into that "
            "rank's own output; start the ranks anew from a checkpoint"
        )


def _of_connections(error: BaseException) -> bool:
    """Whether this is what is met of another rank's failure, and not the failure itself."""
    if isinstance(error, dist.DistError):
        return True
    if type(error) is RuntimeError and any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
        return True
    return error.__cause__ is not None and _of_connections(error.__cause__)


def _told(error: BaseException) -> list[str]:
    """An error in words that another process can make one of."""
    known = isinstance(error, NearpolicyError)
    return [type(error).__name__ if known else "", str(error) if known else described(error)]


def _error_of(rank: int, told: Sequence[str]) -> NearpolicyError:
    name, message = told
    kind = getattr(errors, name, NearpolicyError) if name else NearpolicyError
    return kind(message if message.startswith("learner rank ") else f"learner rank {rank}: {message}")
