"""Which way weights go between actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nearpolicy.config import RunConfig
from nearpolicy.launch.ray import object_store
from nearpolicy.launch.ray.calls import Place

if TYPE_CHECKING:
    from nearpolicy.learner.parallel import Ranks
    from nearpolicy.sync.shipping import Peers, Receiver, Sender

T = TypeVar("T")


def chosen(config: RunConfig, places: Sequence[Place]) -> str:
    """Through memory that all of them share, if they are on one node; else Ray's object store."""
    return "shared_memory" if len({place.node_id for place in places}) == 1 else object_store.NAME


@dataclass(frozen=True)
class RankPeers:
    """Implements `nearpolicy.sync.shipping.Peers` over the ranks of a learner."""

    ranks: Ranks

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def exchange(self, value: T) -> list[T]:
        return self.ranks.exchange("weights on their way", value)


def peers_of(ranks: Ranks | None) -> Peers:
    from nearpolicy.sync.shipping import Alone

    return Alone() if ranks is None else RankPeers(ranks)


def sender_of(transport: str, config: RunConfig, peers: Peers) -> Sender:
    from nearpolicy.sync.shared_memory import SharedMemorySender

    if transport == object_store.NAME:
        return object_store.ObjectStoreSender(peers=peers)
    threads = max(1, int(config.runtime.cpus_per_learner))
    return SharedMemorySender(config.run.name, peers=peers, threads=threads)


def receiver_of(transport: str, config: RunConfig) -> Receiver:
    from nearpolicy.sync.shared_memory import SharedMemoryReceiver

    return object_store.ObjectStoreReceiver() if transport == object_store.NAME else SharedMemoryReceiver()
