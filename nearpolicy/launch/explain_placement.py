"""What ``nearpolicy check`` says of a recipe with `runtime.kind: ray`: who lives where, what each process holds, how
weights get from one to the other, and what to watch. Loads no torch, and asks no cluster."""

from __future__ import annotations

from collections.abc import Iterator

from nearpolicy.config import RunConfig
from nearpolicy.launch.placement_sizes import (
    OBJECT_STORE_MB,
    RoleMemory,
    generator_memory,
    handed_over_mb,
    published_mb,
    rank_memory,
    tokens_kept_mb,
)
from nearpolicy.launch.sizes import LIBRARIES_MB, ModelShape, critic_shape, memory_warning, reference_shape
from nearpolicy.launch.words import count
from nearpolicy.machine import num_cores
from nearpolicy.placement import OF_CONTROLLER, Resources, Rooms

Lines = Iterator[tuple[str, str]]


def sections(config: RunConfig, shape: ModelShape | None) -> list[tuple[str, Lines]]:
    """Title and lines of each."""
    unknown = iter([("together", "unknown until the model is fetched from the hub")])
    if shape is None:
        return [("placement", _placement(config, shape)), ("memory", unknown)]
    rank, generator, runtime = rank_memory(config, shape), generator_memory(config, shape), config.runtime
    return [
        ("placement", _placement(config, shape)),
        ("memory of a rank of the learner", _memory(rank, runtime.gpus_per_learner > 0)),
        ("memory of a generator", _memory(generator, runtime.gpus_per_generator > 0)),
        ("publication", _publication(config, shape)),
        ("tokens", _tokens(config)),
    ]


def rooms_of(config: RunConfig) -> Rooms:
    """The bundles of a recipe."""
    return Rooms.of_roles(
        config.runtime,
        ranks=config.learner.ranks,
        replicas=config.generator.replicas,
        most_replicas=config.generator.most,
    )


def _placement(config: RunConfig, shape: ModelShape | None) -> Lines:
    runtime, learner, generator = config.runtime, config.learner, config.generator
    rooms = rooms_of(config)
    where = "a Ray of its own on this machine" if runtime.address is None else f"the cluster at {runtime.address}"
    yield "runtime", f"{runtime.placement}, {where}"
    parts = learner.ranks // learner.replicas
    cut = f"{learner.replicas} x the weights in {parts} parts" if parts > 1 else "all weights in each"
    yield "learner", f"{count(learner.ranks, 'rank')}, each {_amounts(rooms, 'learner')}; {cut}"
    joins = f", and up to {generator.most} as there is room" if generator.most > generator.replicas else ""
    yield "generators", f"{generator.replicas}, each {_amounts(rooms, 'generator')}, all weights in each{joins}"
    if runtime.verifiers:
        most = f", and up to {runtime.most} by the work there is" if runtime.most > runtime.verifiers else ""
        yield "verifiers", f"{runtime.verifiers}, each 1 CPU and {count(config.verifier.workers, 'worker')}{most}"
    else:
        yield "verifiers", f"{count(config.verifier.workers, 'worker')} beside the controller"
    if runtime.controller == "actor":
        holds = f"{_named(OF_CONTROLLER)} on any node, which must see the run folder"
        yield "controller", f"an actor, {holds}; another one goes on from the record if it dies"
    else:
        yield "controller", "the process that is started: queue, telemetry; no place of its own"
    yield "record", "an actor beside the controller; no place of its own"
    largest = max(rooms.bundles, key=lambda bundle: (bundle.get("GPU", 0), bundle.get("CPU", 0)))
    yield (
        "together",
        f"{count(len(rooms.bundles), 'place')}: {_named(rooms.total)}; one node must have {_named(largest)}",
    )
    if runtime.placement == "colocated":
        yield "each place", "a rank and a generator that take turns: keys and values are given back during a step"
    if runtime.address is None:
        gpus = rooms.total.get("GPU", 0.0)
        or_not = f"; without {gpus:g} GPU a run is refused (runtime.address: join a cluster)" if gpus else ""
        yield "nodes", f"this machine, which has {count(num_cores(), 'core')}{or_not}"
    else:
        yield "nodes", "Ray fills one after the other; what is free on each is compared with its roles at the start"
    for warning in warnings(config, shape):
        yield "WATCH", warning


def _amounts(rooms: Rooms, role: str) -> str:
    room = rooms.of[role][0]
    return _named({"CPU": room.cpus, "GPU": room.gpus})


def _named(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount)


def _memory(role: RoleMemory, has_gpu: bool) -> Lines:
    where = "on its GPU" if has_gpu else "in main memory"
    for owner, mb in role.certain.items():
        yield owner, _mb(mb)
    for owner, mb in role.host.items():
        yield owner, f"{_mb(mb)} in main memory" if has_gpu else _mb(mb)
    for owner, mb in role.passing.items():
        yield owner, f"at most {_mb(mb)}, in forward and backward passes"
    for owner, mb in role.updating.items():
        yield owner, f"{_mb(mb)}, in an update"
    if not has_gpu:
        yield "libraries", _mb(LIBRARIES_MB)
    yield "while loading", _loading(role, has_gpu)
    beside = 0.0 if has_gpu else LIBRARIES_MB
    high = role.most + (0.0 if has_gpu else role.held_on_host)
    low = f"{_mb(role.needed(has_gpu=has_gpu) + beside)} in any case"
    yield "together", f"{low}, at most about {_mb(high + beside)}, {where}"
    if has_gpu and role.host:
        yield "beside it", f"{_mb(role.held_on_host)} in main memory"


def _loading(role: RoleMemory, has_gpu: bool) -> str:
    if not role.reading:
        return f"{_mb(role.loading)}: whole models" + (", in main memory on their way" if has_gpu else "")
    if not has_gpu:
        return f"{_mb(role.loading)}: its pieces, and {_mb(role.reading)} that are read at a time"
    if not role.loading:
        return f"nothing; in main memory {_mb(role.on_the_way)}: its pieces, and what is read at a time"
    return f"{_mb(role.loading)}: its pieces; in main memory {_mb(role.on_the_way)} that are read at a time"


def _publication(config: RunConfig, shape: ModelShape) -> Lines:
    version, replicas = published_mb(config, shape), config.generator.replicas
    every = config.sync.weight_sync_steps
    often = "after every step" if every == 1 else f"every {every} steps"
    yield "one version", f"{_mb(version)}, {often}, to {count(replicas, 'generator')}"
    yield "transport", _transport(config, version)


def _tokens(config: RunConfig) -> Lines:
    completions = count(config.num_slots * config.completions_per_group, "completion")
    yield (
        "under way",
        f"at most {_mb(tokens_kept_mb(config))}, of {completions}, in the object store of the record's node until a "
        "step has used them",
    )


def _transport(config: RunConfig, version: float) -> str:
    transport, one_host = config.sync.transport, config.runtime.address is None
    if config.hands_over:
        return f"{transport}: {_WAYS['device_handles'].format(mb=_mb(handed_over_mb(config, version)))}"
    if transport == "auto" and not one_host:
        shared, spread = (_WAYS[way].format(mb=_mb(version)) for way in ("shared_memory", "broadcast"))
        return f"auto: if the cluster is one node {shared}; else {spread}"
    chosen = config.sync.transport_between(one_process=False, one_host=one_host)
    how = "anchors and deltas" if config.sync.delta is not False else "whole versions"
    return f"{chosen}: {_WAYS[chosen].format(mb=_mb(version), how=how)}"


_WAYS = {
    "shared_memory": "{mb} of /dev/shm on that node, which every generator copies from",
    "broadcast": "one collective, for which every generator holds {mb} more",
    "device_handles": "each rank hands all of it to the generator beside it, out of {mb} of its own on the device that "
    "both have",
    "files": "{how} in sync.path, read by every generator",
    "object_store": "{mb} in the object store of every node with a generator, and in main memory of each of them while "
    "the parts of ranks are put together",
}


def _cut_whole(config: RunConfig, shape: ModelShape | None) -> Iterator[str]:
    """Models that every rank loads whole before they are cut."""
    if shape is None or config.learner.ranks == 1:
        return
    named = {config.model.path: shape}
    if config.objective.reference not in ("none", "initial"):
        named[config.objective.reference] = reference_shape(config, shape)
    if config.critic is not None and config.critic.path is not None:
        named[config.critic.path] = critic_shape(config, shape)
    for name, model in named.items():
        if model is not None and model.why_whole is not None:
            yield f"every rank loads {name} whole before it is cut: {model.why_whole}"


def warnings(config: RunConfig, shape: ModelShape | None) -> Iterator[str]:
    """What works, but hardly as it is meant."""
    runtime, generator, rooms = config.runtime, config.generator, rooms_of(config)
    own = runtime.address is None
    yield from _cut_whole(config, shape)
    if own and (wanted := rooms.total.get("CPU", 0.0)) > num_cores():
        yield (
            f"the roles ask for {wanted:g} CPU and this machine has {num_cores()}: they get in each other's way, which "
            "costs time and changes no result"
        )
    if runtime.placement == "colocated" and runtime.gpus_per_learner + runtime.gpus_per_generator > 1:
        yield (
            f"runtime.gpus_per_learner={runtime.gpus_per_learner:g} and gpus_per_generator="
            f"{runtime.gpus_per_generator:g} give rank and generator of a place GPUs of their own; with 0.5 each they "
            "share one"
        )
    ahead = config.num_slots * config.completions_per_group
    if generator.replicas > 1 and (generator.replicas - 1) * generator.max_running >= ahead:
        yield (
            f"at most {ahead:,} completions are under way, and {generator.replicas} generators decode "
            f"{generator.replicas * generator.max_running:,} at once: some will have nothing to do; lower "
            "generator.replicas or generator.max_running, or raise queue.prompts_per_step"
        )
    version = 0.0 if shape is None else published_mb(config, shape)
    if own and config.sync.transport == "object_store" and version > OBJECT_STORE_MB:
        yield (
            f"a version of {version:,.0f} MB is larger than the object store of a Ray that is started here, "
            f"{OBJECT_STORE_MB:,.0f} MB, and goes to disk; use sync.transport=shared_memory, or "
            "join a cluster (runtime.address)"
        )
    if own and (tokens := tokens_kept_mb(config)) > OBJECT_STORE_MB:
        yield (
            f"tokens under way may take {tokens:,.0f} MB, more than the object store of a Ray that is started here, "
            f"{OBJECT_STORE_MB:,.0f} MB, and go to disk; lower queue.prompts_per_step, queue.max_staleness or "
            "sampling.max_completion_length, or start a Ray with more (--object-store-memory) and name its "
            "runtime.address"
        )
    if shape is not None and (warning := memory_warning(config, shape)) is not None:
        yield warning


def _mb(mb: float) -> str:
    if 0 < mb < 0.1:
        return "less than 0.1 MB"
    return f"{mb:,.0f} MB" if mb >= 10 or not mb else f"{mb:.1f} MB"
