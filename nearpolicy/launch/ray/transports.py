"""Which way weights go between actors, and both ends of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError
from nearpolicy.launch.ray import object_store
from nearpolicy.launch.ray.calls import Place

DEVICE_HANDLES = "device_handles"

if TYPE_CHECKING:
    from nearpolicy.learner.parallel import Ranks
    from nearpolicy.sync.shipping import Peers, Receiver, Sender


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where ranks and generators of a run are, and whether there are other nodes that one could come to."""

    ranks: Sequence[Place]
    generators: Mapping[int, Place]
    """By number; those that are there."""
    num_nodes: int
    """Of the cluster."""

    @property
    def everybody(self) -> tuple[Place, ...]:
        return (*self.ranks, *self.generators.values())


def chosen(config: RunConfig, there: Whereabouts) -> str:
    """The way of weights between them, and to those that may come elsewhere on the cluster: in the place of lost ones,
    or as more generators. `ConfigError` for what cannot work there."""
    grows = config.generator.most > config.generator.replicas
    may_be_elsewhere = config.runtime.address is not None and (grows or there.num_nodes > 1)
    pairs = _pairs(config, there)
    if config.sync.transport == DEVICE_HANDLES:
        for number, pair in pairs.items():
            _require_shared(f"generator {number}", *pair)
    try:
        one_host = len({place.node_id for place in there.everybody}) == 1
        if config.sync.transport == "auto" and may_be_elsewhere:
            one_host = False
        return config.sync.transport_between(
            one_process=False,
            one_host=one_host,
            one_device=config.runtime.placement == "colocated" and all(map(_share, pairs.values())),
            on_gpus=all(place.device is not None and place.device.startswith("cuda") for place in there.everybody),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _pairs(config: RunConfig, there: Whereabouts) -> dict[int, tuple[Place, Place]]:
    """Rank and generator that take turns in a place, by its number."""
    if config.runtime.placement != "colocated":
        return {}
    return {number: (there.ranks[number], generator) for number, generator in there.generators.items()}


def _share(pair: tuple[Place, Place]) -> bool:
    rank, generator = pair
    return (rank.node_id, rank.device) == (generator.node_id, generator.device)


def _require_shared(name: str, rank: Place, generator: Place) -> None:
    if not _share((rank, generator)):
        theirs, own = (f"{place.device or 'the CPU'} of {place.node}" for place in (rank, generator))
        raise ConfigError(
            f"{name} computes on {own} and its rank of the learner on {theirs}, and sync.transport=device_handles "
            "leads nowhere but on one device: set sync.transport to auto, or let them share one (0.5 for each of "
            "runtime.gpus_per_learner and gpus_per_generator)"
        )


def require_reached(transport: str, number: int, generator: Place, ranks: Sequence[Place]) -> None:
    """`ConfigError` for a generator that comes where the way does not lead from where the ranks are."""
    if transport == DEVICE_HANDLES:
        _require_shared(f"generator {number}", ranks[number], generator)
    if transport == "shared_memory" and generator.node_id not in {rank.node_id for rank in ranks}:
        raise ConfigError(
            f"generator {number} is on {generator.node}, and weights go through the memory of {ranks[0].node}: set "
            "sync.transport to broadcast, files or object_store"
        )


def peers_of(ranks: Ranks | None) -> Peers:
    from nearpolicy.sync.shipping import Alone

    return Alone() if ranks is None else ranks


def sender_of(transport: str, config: RunConfig, peers: Peers) -> Sender:
    """The end of one rank."""
    import ray

    from nearpolicy.models.device import pick_backend, pick_device
    from nearpolicy.sync.transports import make_sender

    if transport == object_store.NAME:
        return object_store.ObjectStoreSender(peers=peers)
    device = pick_device()
    return make_sender(
        config.sync,
        transport,
        run=config.run.name,
        peers=peers,
        threads=max(1, int(config.runtime.cpus_per_learner)),
        host=ray.util.get_node_ip_address(),
        backend=pick_backend(device).rpartition(":")[2],
        device=device,
    )


def receiver_of(transport: str, name: str) -> Receiver:
    """The end of a generator."""
    from nearpolicy.models.device import pick_device
    from nearpolicy.sync.transports import make_receiver

    if transport == object_store.NAME:
        return object_store.ObjectStoreReceiver()
    return make_receiver(transport, name, device=pick_device())
