"""Which way weights go between actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearpolicy.config import RunConfig
from nearpolicy.launch.ray import object_store
from nearpolicy.launch.ray.calls import Place

if TYPE_CHECKING:
    from nearpolicy.sync.shipping import Receiver, Sender


def chosen(config: RunConfig, places: Sequence[Place]) -> str:
    """Through memory that all of them share, if they are on one node; else Ray's object store."""
    return "shared_memory" if len({place.node_id for place in places}) == 1 else object_store.NAME


def sender_of(transport: str, config: RunConfig) -> Sender:
    from nearpolicy.sync.shared_memory import SharedMemorySender

    if transport == object_store.NAME:
        return object_store.ObjectStoreSender()
    return SharedMemorySender(config.run.name, threads=max(1, int(config.runtime.cpus_per_learner)))


def receiver_of(transport: str, config: RunConfig) -> Receiver:
    from nearpolicy.sync.shared_memory import SharedMemoryReceiver

    return object_store.ObjectStoreReceiver() if transport == object_store.NAME else SharedMemoryReceiver()
