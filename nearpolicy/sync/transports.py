"""Both ends of each transport, from the settings; nothing of a transport is loaded that is not used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nearpolicy.sync.config import SyncConfig, Transport
from nearpolicy.sync.shipping import Peers, Receiver, Sender

if TYPE_CHECKING:
    import torch

BUCKET_MB, ANCHOR_EVERY = 64.0, 16


def make_sender(
    config: SyncConfig,
    transport: Transport,
    *,
    run: str,
    peers: Peers | None = None,
    wire: torch.dtype | None = None,
    threads: int | None = None,
    host: str = "127.0.0.1",
    backend: str = "gloo",
    device: torch.device | None = None,
    folder: Path | None = None,
) -> Sender:
    """The learner's end, in each of its ranks. ``run``: unique name. ``wire``: dtype of the generators, where it is not
    the learner's. ``host``, ``backend``, ``device``: of a broadcast and of handles; ``threads``, ``folder``: of shared
    memory."""
    if transport == "shared_memory":
        from nearpolicy.sync.shared_memory import SharedMemorySender

        return SharedMemorySender(run, peers=peers, wire=wire, threads=threads, folder=folder)
    if transport == "broadcast":
        from nearpolicy.sync.broadcast import BroadcastSender

        return BroadcastSender(
            timeout_s=config.timeout_s,
            peers=peers,
            wire=wire,
            bucket_mb=config.bucket_mb or BUCKET_MB,
            host=host,
            backend=backend,
            device=device,
        )
    if transport == "device_handles":
        from nearpolicy.sync.device_handles import DeviceHandlesSender

        return DeviceHandlesSender(
            timeout_s=config.timeout_s,
            peers=peers,
            wire=wire,
            bucket_mb=config.block_mb,
            host=host,
            backend=backend,
            device=device,
        )
    if transport == "files":
        from nearpolicy.sync.files import FileSender

        return FileSender(
            config.path,
            run,
            timeout_s=config.timeout_s * 2,
            peers=peers,
            wire=wire,
            delta=config.delta is not False,
            anchor_every=config.anchor_every or ANCHOR_EVERY,
        )
    raise ValueError(f"{transport} has no ends: learner and generator share the tensors")


def make_receiver(transport: Transport, name: str, *, device: torch.device | None = None) -> Receiver:
    """The generator's end. ``name``: as the publisher calls this generator. ``device``: that it computes on."""
    if transport == "shared_memory":
        from nearpolicy.sync.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver()
    if transport == "broadcast":
        from nearpolicy.sync.broadcast import BroadcastReceiver

        return BroadcastReceiver(name, device=device)
    if transport == "device_handles":
        from nearpolicy.sync.device_handles import DeviceHandlesReceiver

        return DeviceHandlesReceiver(name, device=device)
    if transport == "files":
        from nearpolicy.sync.files import FileReceiver

        return FileReceiver(name)
    raise ValueError(f"{transport} has no ends: learner and generator share the tensors")
