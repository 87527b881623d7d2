"""Which way weights go between actors, and both ends of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError
from nearpolicy.launch.ray import object_store
from nearpolicy.launch.ray.calls import Place

if TYPE_CHECKING:
    from nearpolicy.learner.parallel import Ranks
    from nearpolicy.sync.shipping import Peers, Receiver, Sender


def chosen(config: RunConfig, places: Sequence[Place]) -> str:
    """For ranks and generators in these places, and for those that may come elsewhere on the cluster."""
    may_grow = config.runtime.address is not None and config.generator.most > config.generator.replicas
    try:
        one_host = len({place.node_id for place in places}) == 1
        if config.sync.transport == "auto" and may_grow:
            one_host = False
        return config.sync.transport_between(one_process=False, one_host=one_host)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def require_reached(transport: str, name: str, place: Place, places: Sequence[Place]) -> None:
    """`ConfigError` for a generator that comes to another node than the others, where the way does not lead."""
    if transport == "shared_memory" and place.node_id not in {each.node_id for each in places}:
        raise ConfigError(
            f"{name} is on {place.node}, and weights go through the memory of {places[0].node}: set sync.transport to "
            "broadcast, files or object_store"
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
