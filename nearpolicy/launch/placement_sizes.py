"""What each process of a run with Ray holds, worked out from the recipe and the model's shape, without loading torch.

    certain   what a process holds in any case: weights, gradients, moments, keys and values; of the learner's ranks
              the pieces that FSDP2 gives each of them
    passing   an estimate of what comes and goes beside it in forward and backward passes: activations, layers that are
              whole for a moment, gradients before they are added up; updating: of what an update adds
    loading   before there is anything else: whole models of a generator, or of a rank that is alone; of several ranks
              their pieces, and what they read of one tensor

Numbers are MB. A process with a GPU computes there; what it holds in main memory is counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nearpolicy.config import RunConfig
from nearpolicy.launch.adapter_sizes import adapter_size
from nearpolicy.launch.sizes import (
    LIBRARIES_MB,
    MB,
    ModelShape,
    critic_shape,
    memory_by_owner,
    number_bytes,
    reference_shape,
)

GRADIENTS = "gradients"
MOMENTS = "AdamW's moments"
KEYS_AND_VALUES = "keys and values"
OBJECT_STORE_MB = 2048.0
"""Ray's object store, where Ray is started by the run itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Of one process of a role: owner -> MB."""

    certain: Mapping[str, float]
    """Where it computes."""
    host: Mapping[str, float] = field(default_factory=dict)
    """In main memory, wherever it computes."""
    passing: Mapping[str, float] = field(default_factory=dict)
    """Where it computes, at most, in forward and backward passes."""
    updating: Mapping[str, float] = field(default_factory=dict)
    """Where it computes, when they are over."""
    loading: float = 0.0
    """Where it computes, before there is anything else."""
    reading: float = 0.0
    """In main memory beside it, wherever it computes: of pieces, what is read at a time."""
    on_the_way: float = 0.0
    """In main memory before there is anything else, if it computes on a GPU."""

    @property
    def held(self) -> float:
        return sum(self.certain.values())

    @property
    def comes_and_goes(self) -> float:
        """At most."""
        return max(sum(self.passing.values()), sum(self.updating.values()))

    @property
    def most(self) -> float:
        """Where it computes, what lies in main memory apart."""
        return max(self.held + self.comes_and_goes, self.loading)

    @property
    def held_on_host(self) -> float:
        return sum(self.host.values())

    def needed(self, *, has_gpu: bool) -> float:
        """Where it computes, in any case."""
        return max(self.held + (0.0 if has_gpu else self.held_on_host), self.needed_to_load(has_gpu=has_gpu))

    def needed_to_load(self, *, has_gpu: bool) -> float:
        """Where it computes."""
        return self.loading + (0.0 if has_gpu else self.reading)


def rank_memory(config: RunConfig, shape: ModelShape) -> RoleMemory:
    """Of a rank of the learner."""
    learner, size = config.learner, number_bytes(config.model)
    parts = learner.ranks // learner.replicas
    away = learner.offload == "parameters"
    reference, critic = reference_shape(config, shape), critic_shape(config, shape)
    held = _trained_mb(config, shape, parts)
    if reference is not None:
        held["reference"] = reference.parameters * size / parts / MB
    if critic is not None:
        held["critic: weights"] = critic.parameters * size / parts / MB
        held |= {f"critic: {owner}": mb for owner, mb in _adamw_mb(critic.parameters, size, parts).items()}
        held[GRADIENTS] = max(held[GRADIENTS], held["critic: weights"])  # one update is over when the other begins
    if _keeps_for_deltas(config):
        held["weights before the next delta"] = published_mb(config, shape) / parts
    host = {owner: mb for owner, mb in held.items() if away or (learner.offload == "optimizer" and MOMENTS in owner)}
    certain = {owner: mb for owner, mb in held.items() if owner not in host}
    if config.hands_over:
        certain["weights handed over"] = handed_over_mb(config, published_mb(config, shape))
    models = [model for model in (shape, reference, critic) if model is not None]
    trained = [model.parameters for model in (None if learner.lora else shape, critic) if model is not None]
    passing = {"activations": memory_by_owner(config, shape)["learner: activations"]}
    if learner.ranks > 1 and trained and not away:  # whole, in float32, until an update's last micro-batch
        passing["unsummed gradients"] = max(trained) * 4 / MB
    if parts > 1 or away:
        passing["gathered layers"] = gathered_mb(shape, size)
    updating = {}
    if size < 4 and trained and not away:
        updating["float32 gradients"] = max(trained) * 4 / parts / MB
    if learner.offload == "optimizer":
        updating["moments, brought back"] = max(host.values())
    return RoleMemory(
        certain=certain,
        host=host,
        passing=passing,
        updating=updating,
        **_loading_mb(config, models),
    )


def _loading_mb(config: RunConfig, models: Sequence[ModelShape]) -> dict[str, float]:
    """What of `RoleMemory` comes before everything else. A rank of several reads its pieces alone where it can."""
    learner, size = config.learner, number_bytes(config.model)
    parts = learner.ranks // learner.replicas
    whole = [model for model in models if learner.ranks == 1 or model.why_whole is not None]
    read = [model for model in models if model not in whole]
    of_whole = sum(model.parameters for model in whole) * size / MB
    pieces = sum(model.parameters for model in read) * size / parts / MB
    reading = max((_largest_read_mb(model, size) / parts for model in read), default=0.0)
    away = learner.offload == "parameters"
    return {
        "loading": of_whole + (0.0 if away else pieces),
        "reading": reading,
        "on_the_way": of_whole + reading + (pieces if away else 0.0),
    }


def _largest_read_mb(model: ModelShape, size: int) -> float:
    """Of what is read at once: the embedding, or the experts of a layer, which are put together out of several tensors
    and are there twice for a moment."""
    layer = (model.parameters - model.embeddings) / model.layers
    return max(model.vocabulary * model.hidden, 2 * layer if model.experts > 1 else layer) * size / MB


def _trained_mb(config: RunConfig, shape: ModelShape, parts: int) -> dict[str, float]:
    """Of the policy. Factors of an adapter are float32 in any model, and not cut."""
    weights = shape.parameters * number_bytes(config.model) / parts / MB
    if config.learner.lora is None:
        return {"weights": weights, GRADIENTS: weights} | _adamw_mb(shape.parameters, number_bytes(config.model), parts)
    adapter = adapter_size(config.learner.lora, shape)
    factors = adapter.trained * 4 / MB
    return {
        "weights": weights + factors,
        GRADIENTS: factors,
        MOMENTS: 2 * factors,
        "merged copies": adapter.changed * number_bytes(config.model) / parts / MB,
    }


def _adamw_mb(parameters: int, size: int, parts: int) -> dict[str, float]:
    """Two means in float32; for narrower weights also a copy of them."""
    moments = {MOMENTS: 8 * parameters / parts / MB}
    return moments if size == 4 else moments | {"float32 weights": 4 * parameters / parts / MB}


def gathered_mb(shape: ModelShape, size: int) -> float:
    """The root of a model in pieces, embeddings and head, and two of its layers: the one at work and the next."""
    embeddings = shape.embeddings
    return (embeddings + 2 * (shape.parameters - embeddings) / shape.layers) * size / MB


def generator_memory(config: RunConfig, shape: ModelShape, transport: str | None = None) -> RoleMemory:
    """Of one replica. ``transport``: the way that weights come, where it is known."""
    owners = {
        owner.removeprefix("engine: "): mb
        for owner, mb in memory_by_owner(config, shape).items()
        if owner.startswith("engine")
    }
    passing, host = {"activations": owners.pop("activations")}, {}
    loading = owners["weights"]
    transport = transport or config.sync.transport
    if transport == "broadcast":
        owners["weights on arrival"] = published_mb(config, shape)
    if _keeps_for_deltas(config):
        host["weights before the next delta"] = published_mb(config, shape)
    return RoleMemory(certain=owners, host=host, passing=passing, loading=loading, on_the_way=loading)


def saved_by_turns(rank: RoleMemory, generator: RoleMemory, *, on_gpu: bool) -> float:
    """Of what both hold in one place, where they take turns: a step has its gradients, or generation its keys and
    values."""
    gradients = rank.certain.get(GRADIENTS, 0.0) + (0.0 if on_gpu else rank.host.get(GRADIENTS, 0.0))
    return min(gradients, generator.certain[KEYS_AND_VALUES])


def published_mb(config: RunConfig, shape: ModelShape) -> float:
    """Of one version, as it goes to a generator."""
    if config.sync.adapters == "adapter_only" and config.learner.lora is not None:
        return adapter_size(config.learner.lora, shape).trained * 4 / MB
    return shape.parameters * number_bytes(config.model) / MB


def handed_over_mb(config: RunConfig, version: float) -> float:
    """Of a rank, with `sync.transport: device_handles`: two buckets, or less where a version is smaller."""
    return min(2 * config.sync.block_mb, version)


def on_the_way_mb(config: RunConfig, shape: ModelShape, transport: str) -> float:
    """Of main memory on a node that weights come to, beside its processes: once, however many generators it has."""
    return published_mb(config, shape) if transport in ("shared_memory", "object_store") else 0.0


def tokens_kept_mb(config: RunConfig) -> float:
    """At most, in the object store of the record's node: tokens and log-probabilities of all that is under way or
    waits for a step, four bytes each. What comes with them for `objective.same_support` is not counted."""
    tokens = config.num_slots * config.completions_per_group * config.sampling.max_completion_length
    return tokens * 8 / MB


def _keeps_for_deltas(config: RunConfig) -> bool:
    return config.sync.transport == "files" and config.sync.delta is not False


def held_on_this_machine(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Role -> MB that its processes take together in any case, where they compute on the processors of this machine.
    Nothing is known here of the nodes of a cluster, nor of GPUs."""
    runtime = config.runtime
    if runtime.address is not None or runtime.gpus_per_learner or runtime.gpus_per_generator:
        return {}
    one_device = runtime.placement == "colocated"
    transport = config.sync.transport_between(one_process=False, one_host=True, one_device=one_device)
    rank, generator = rank_memory(config, shape), generator_memory(config, shape)
    ranks, replicas = config.learner.ranks, config.generator.replicas
    held = {
        "ranks of the learner": ranks * (rank.held + rank.held_on_host),
        "generators": replicas * (generator.held + generator.held_on_host),
        "weights on their way": on_the_way_mb(config, shape, transport),
    }
    if runtime.placement == "colocated":
        held["generators"] -= replicas * saved_by_turns(rank, generator, on_gpu=False)
    loading = {
        "ranks of the learner": ranks * rank.needed_to_load(has_gpu=False),
        "generators": replicas * generator.needed_to_load(has_gpu=False),
    }
    return max(held, loading, key=lambda owners: sum(owners.values()))


def peak_on_this_machine(config: RunConfig, shape: ModelShape) -> float:
    """The same with what comes and goes, the libraries of each process, and a tenth for the allocator."""
    held = held_on_this_machine(config, shape)
    if not held:
        return 0.0
    rank, generator = rank_memory(config, shape), generator_memory(config, shape)
    more = config.learner.ranks * (LIBRARIES_MB + rank.comes_and_goes)
    more += config.generator.replicas * (LIBRARIES_MB + generator.comes_and_goes)
    return (sum(held.values()) + more) * 1.1
