"""Which way weights go between actors, and both ends of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError
from nearpolicy.launch.ray import object_store
from nearpolicy.launch.ray.calls import Place

DEVICE_HANDLES = "device_handles"

if TYPE_CHECKING:
    from nearpolicy.learner.parallel import Ranks
    from nearpolicy.sync.shipping import Peers, Receiver, Sender


def chosen(config: RunConfig, places: Sequence[Place]) -> str:
    """For ranks in the first of these places and generators in the others, and for those that may come elsewhere on the
    cluster. `ConfigError` for what cannot work there."""
    may_grow = config.runtime.address is not None and config.generator.most > config.generator.replicas
    pairs = _pairs(config, places)
    if config.sync.transport == DEVICE_HANDLES:
        for number, pair in enumerate(pairs):
            _require_shared(f"generator {number}", *pair)
    try:
        one_host = len({place.node_id for place in places}) == 1
        if config.sync.transport == "auto" and may_grow:
            one_host = False
        one_device = bool(pairs) and all(map(_share, pairs))
        on_gpus = all(place.device is not None for place in places)
        return config.sync.transport_between(
            one_process=False, one_host=one_host, one_device=one_device, on_gpus=on_gpus
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _pairs(config: RunConfig, places: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Rank and generator that take turns in a place."""
    if config.runtime.placement != "colocated":
        return []
    ranks = config.learner.ranks
    return list(zip(places[:ranks], places[ranks:], strict=True))


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


def require_reached(
    transport: str, name: str, place: Place, places: Sequence[Place], rank: Place | None = None
) -> None:
    """`ConfigError` for a generator that comes to another node or device than the others, where the way does not lead.
    ``rank``: where the rank is that it takes turns with."""
    if transport == DEVICE_HANDLES and rank is not None:
        _require_shared(name, rank, place)
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
