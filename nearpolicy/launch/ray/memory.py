"""Whether the roles of a run fit the nodes, and the GPUs, that they were given: before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError
from nearpolicy.launch.placement_sizes import (
    RoleMemory,
    generator_memory,
    on_the_way_mb,
    rank_memory,
    saved_by_turns,
)
from nearpolicy.launch.ray.calls import Place
from nearpolicy.launch.sizes import ModelShape


@dataclass(frozen=True, slots=True)
class _Resident:
    """A process, and where it lives."""

    role: str
    memory: RoleMemory
    place: Place


def require_memory(
    config: RunConfig, shape: ModelShape, ranks: Sequence[Place], generators: Sequence[Place], transport: str
) -> None:
    """`ConfigError` with every node, and every GPU, that has less than its roles hold in any case: weights, gradients,
    moments, a reference, a critic, keys and values, weights on their way by ``transport``. What comes and goes, such as
    activations, is not counted."""
    rank, generator = rank_memory(config, shape), generator_memory(config, shape, transport)
    residents = [_Resident("rank of the learner", rank, place) for place in ranks]
    residents += [_Resident("generator", generator, place) for place in generators]
    on_the_way = on_the_way_mb(config, shape, transport)
    problems: list[str] = []
    for on_gpu, also in ((False, on_the_way), (True, 0.0)):
        saved = saved_by_turns(rank, generator, on_gpu=on_gpu) if config.runtime.placement == "colocated" else 0.0
        problems += _short(residents, saved, also, on_gpu=on_gpu)
    if problems:
        raise ConfigError("\n".join(problems))


def _short(residents: Sequence[_Resident], saved: float, also: float, *, on_gpu: bool) -> Iterator[str]:
    """A sentence for each node, or GPU, with less than it needs. ``saved``: by each pair that takes turns there.
    ``also``: once where there is a generator."""
    by_place: dict[tuple[str, ...], list[_Resident]] = {}
    for each in residents:
        if each.place.gpus or not on_gpu:
            by_place.setdefault((each.place.node_id, *(each.place.gpus[:1] if on_gpu else ())), []).append(each)
    for here in by_place.values():
        place, roles = here[0].place, Counter(each.role for each in here if bool(each.place.gpus) == on_gpu)
        held = sum(_held(each, on_gpu=on_gpu) for each in here)
        held += also * any(each.role == "generator" for each in here)
        held -= saved * min(roles["generator"], roles["rank of the learner"])
        needed = max(held, sum(_to_load(each, on_gpu=on_gpu) for each in here))  # all load at the same time
        free = place.free_gpu_mb if on_gpu else place.free_mb
        if free is not None and needed > free:
            where = f"GPU {place.gpus[0]} of node {place.node}" if on_gpu else f"node {place.node}"
            yield _sentence(where, here, needed, free)


def _held(resident: _Resident, *, on_gpu: bool) -> float:
    memory = resident.memory
    if on_gpu:
        return memory.held
    return memory.held_on_host + (0.0 if resident.place.gpus else memory.held)


def _to_load(resident: _Resident, *, on_gpu: bool) -> float:
    """Before it holds anything: there, or in main memory on the way to its GPU."""
    memory = resident.memory
    if resident.place.gpus and not on_gpu:
        return memory.on_the_way
    return memory.needed_to_load(has_gpu=on_gpu)


def _sentence(where: str, here: Sequence[_Resident], needed: float, free: float) -> str:
    roles = Counter(each.role for each in here)
    knobs = {
        "rank of the learner": "more learner.ranks (each holds a smaller piece), learner.offload or learner.lora",
        "generator": "fewer generator.replicas, generator.kv_memory_mb or generator.max_running",
    }
    who = " and ".join(f"{number} x {role}" for role, number in roles.items())
    return (
        f"{where} has {free:,.0f} MB free and is to hold {who}, which need {needed:,.0f} MB before any activation. "
        f"Turn {'; '.join(knobs[role] for role in roles)}; or use a smaller model or larger nodes (`nearpolicy check` "
        "says what each process holds)"
    )
