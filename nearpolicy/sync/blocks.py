"""Memory of a device that another process on the machine opens by a handle, and then reads where it lies.

    CPU     a file without a name in main memory; the handle is its descriptor, which goes over a Unix socket. It is
            gone with the last process that has it, however that ends, and takes nothing of /dev/shm
    CUDA    an allocation; the handle is CUDA's own (cudaIpcMemHandle), made and opened by torch.multiprocessing, which
            counts who has it in a file of 80 KB in /dev/shm; that of a process that is killed stays there

What lies in a block is told over a `Line`. The CPU side is what is tested; the CUDA side has not run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import secrets
import socket
import struct
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearpolicy.errors import SyncError, described
from nearpolicy.models.device import allocations_of_their_own, settle

_LONGEST = 1 << 16
"""Bytes of a message."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user, group: of who is at the other end of a Unix socket."""
_TO_SAY_S = 5.0
"""For a message to find room: there is room for dozens, and a few are under way."""


class Block:
    """Memory of this process that others may open."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.descriptors: Sequence[int] = ()
        if device.type == "cpu":
            self.memory, self.descriptors = _of_a_file(nbytes)
        elif device.type == "cuda":
            with allocations_of_their_own():
                self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            settle(device)
        else:
            raise SyncError(
                f"memory of {device} cannot be opened by another process; set sync.transport to shared_memory or "
                "broadcast"
            )

    def handle(self) -> bytes:
        """For one process that opens it, once: torch counts who has opened an allocation of CUDA's, by handle."""
        if self.memory.device.type == "cpu":
            return pickle.dumps((self.memory.numel(), None))
        from torch.multiprocessing.reductions import reduce_tensor

        return pickle.dumps((self.memory.numel(), (self.memory.device.index, *reduce_tensor(self.memory))))

    def close(self) -> None:
        """Who has opened it reads what is there until he lets go of it, and nothing of use."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


def _of_a_file(nbytes: int) -> tuple[Tensor, tuple[int]]:
    descriptor = os.memfd_create("nearpolicy-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # what is missing is known now
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except OSError as error:
        os.close(descriptor)
        raise SyncError(f"no {nbytes / 2**20:,.0f} MB for weights on their way: {described(error)}") from None
    return torch.frombuffer(memory, dtype=torch.uint8), (descriptor,)


def opened(handle: bytes, descriptors: Sequence[int], device: torch.device) -> Tensor:
    """[nbytes] uint8: the memory of a block of another process. `SyncError` where it cannot be opened."""
    nbytes, cuda = pickle.loads(handle)
    if cuda is None:
        (descriptor,) = descriptors
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            memory = mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that may only be read
            return torch.frombuffer(memory, dtype=torch.uint8)
    index, rebuild, arguments = cuda
    own = torch.empty(0, device=device).device.index
    if index != own:  # the handle says by number where to open it
        raise SyncError(
            f"the learner calls its device {index}, and this generator calls the same one {own}: let both see "
            "that device alone (CUDA_VISIBLE_DEVICES)"
        )
    try:
        return rebuild(*arguments)
    except RuntimeError as error:
        raise SyncError(
            f"memory of the learner cannot be opened on {device}: {described(error)}. Set sync.transport to "
            "shared_memory or broadcast"
        ) from error


class Gone(Exception):
    """The other end of a line is not there any more."""


class Line:
    """One end of a connection between two processes of a user on one machine: whole messages, in order."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.getuid():
            end.close()
            raise Gone(f"a process of user {user} is there")

    def say(self, *message: Any, descriptors: Sequence[int] = ()) -> None:
        """`Gone` if nobody hears it."""
        try:
            self.socket.settimeout(_TO_SAY_S)
            socket.send_fds(self.socket, [pickle.dumps(message)], list(descriptors))
        except OSError as error:
            raise Gone(described(error)) from None

    def hear(self, wait_s: float) -> tuple[tuple[Any, ...], list[int]]:
        """A message, and descriptors that came with it. `TimeoutError`, or `Gone`."""
        try:
            self.socket.settimeout(max(wait_s, 1e-3))
            message, descriptors, _, _ = socket.recv_fds(self.socket, _LONGEST, 1)
        except ConnectionResetError:
            message = b""  # it had not heard all that was said to it
        except TimeoutError:
            raise
        except OSError as error:
            raise Gone(described(error)) from None
        if not message:
            raise Gone("it has ended, or hung up")
        return pickle.loads(message), descriptors

    def close(self) -> None:
        """From any thread: who waits for a message hears of it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Listener:
    """Where lines come in. Its name is Linux's own, and leaves nothing in a file system."""

    def __init__(self) -> None:
        require_linux()
        self.address = f"\0nearpolicy-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.bind(self.address)
        self.socket.listen(64)

    def accept(self) -> Line:
        """One that has come already. `Gone` if it is no more, or somebody else's."""
        try:
            return Line(self.socket.accept()[0])
        except OSError as error:
            raise Gone(described(error)) from None

    def close(self) -> None:
        self.socket.close()


def line_to(address: str) -> Line:
    """`Gone` if nobody of this user listens there, on this machine."""
    require_linux()
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    end.settimeout(_TO_SAY_S)
    try:
        end.connect(address)
    except OSError as error:
        end.close()
        raise Gone(described(error)) from None
    return Line(end)


def require_linux() -> None:
    """`SyncError` where there are no such sockets."""
    if not sys.platform.startswith("linux"):
        raise SyncError(f"sync.transport=device_handles needs Linux, and this is {sys.platform}; leave it out")
