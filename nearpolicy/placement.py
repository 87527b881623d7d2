"""Where the roles of a run live, and how much room they take there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from nearpolicy.settings import ConfigModel, Seconds


class RuntimeConfig(ConfigModel):
    """Section `runtime`: where the roles live. `runtime: inline` is short for `runtime: {kind: inline}`."""

    kind: Literal["inline", "ray"] = "inline"
    """`inline`: one process, a thread for the engine and one for the learner. `ray`: every role an actor of its own, on
    this machine or on a cluster; needs the extra `nearpolicy[ray]`."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated`: generators and learner work at the same time, each on its own share of the machine.
    `colocated`: on the same devices, in turn; while the learner makes a step the generators sleep and hold no keys and
    values, and with `learner.offload` the learner holds less while they work. With `ray` every rank of the learner
    shares its place with one generator."""
    address: str | None = Field(None, min_length=1, max_length=300)
    """With `ray`: `HOST:PORT` of a cluster's head node, or `auto` for the cluster that this machine belongs to. Left
    out: a Ray of its own is started here, and ended with the run."""
    controller: Literal["driver", "actor"] = "driver"
    """With `ray`: where the run itself lives, its loop and its record. `driver`: in the process that was started.
    `actor`: in an actor of the cluster, which takes one CPU; if its process or its node dies another one goes on from
    the record, at most three times without a new step. The folder that the run is started from, and `run.dir`, must
    then be reachable by the same path from every node."""
    start_timeout_s: Seconds = 300.0
    """With `ray`: bound on each step of the start: connecting, room for the actors, loading the model."""
    silence_s: Seconds = 60.0
    """With `ray`: a generator or verifier that answers nothing for so long is lost; another one is started in its
    place."""
    verifiers: NonNegativeInt = Field(1, le=10_000)
    """With `ray`: actors that hold verifiers, each with `verifier.workers` processes. 0: they run beside the
    controller."""
    most_verifiers: NonNegativeInt | None = Field(None, le=10_000)
    """With `ray`: as many of them as the work may ask for: arrivals per second times seconds of judging, over the
    workers of each. Left out: always `runtime.verifiers`."""
    cpus_per_generator: float = Field(1.0, gt=0, le=1024)
    """With `ray`: processors that Ray sets aside for a generator, which computes with so many threads unless
    `generator.threads` says otherwise."""
    gpus_per_generator: float = Field(0.0, ge=0, le=64)
    """With `ray`: GPUs that Ray sets aside for a generator, a fraction where it shares one."""
    cpus_per_learner: float = Field(1.0, gt=0, le=1024)
    """With `ray`: processors of a rank of the learner; as `cpus_per_generator`."""
    rank_timeout_s: Seconds = 600.0
    """With `ray`: bound on every wait of one rank of the learner for another, and on the answer of a single one, so
    longer than the longest step of any; then the learner begins on new ranks, from the record."""
    gpus_per_learner: float = Field(0.0, ge=0, le=64)
    """With `ray`: GPUs of a rank of the learner."""

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_the_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        idle = [name for name in type(self).model_fields if name not in ("kind", "placement") and self._is_set(name)]
        if self.kind == "inline" and idle:
            raise ValueError(
                f"{', '.join(f'runtime.{name}' for name in idle)} has no effect in one process; set runtime.kind: ray, "
                "or leave it out"
            )
        if self.most_verifiers is not None and not 0 < self.verifiers <= self.most_verifiers:
            raise ValueError(
                f"runtime.most_verifiers={self.most_verifiers} and runtime.verifiers={self.verifiers} are the two "
                "limits on their number; the first is the larger one, and the second at least 1"
            )
        for name in ("cpus_per_generator", "gpus_per_generator", "cpus_per_learner", "gpus_per_learner"):
            number = getattr(self, name)
            if 0 < number < 1e-4:
                raise ValueError(f"runtime.{name}={number:g} is less than Ray can set aside, which is 0.0001")
        if (self.address or "").startswith("ray://"):
            raise ValueError(
                f"runtime.address={self.address} is that of a client, which would have all data of the run go through "
                "one connection; start the run on the cluster (`ray job submit -- nearpolicy train ...`) with "
                "runtime.address: auto"
            )
        return self

    @property
    def most(self) -> int:
        """Verifiers that there may be at a time."""
        return self.verifiers if self.most_verifiers is None else self.most_verifiers

    def _is_set(self, name: str) -> bool:
        return getattr(self, name) != type(self).model_fields[name].default


Resources = Mapping[str, float]
"""CPU and GPU -> how many."""
OF_CONTROLLER: Resources = {"CPU": 1.0}
"""What an actor of the controller takes, beside all bundles."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one process takes of a bundle."""

    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Rooms:
    """Bundles of resources, each of them on one node, and who lives in which."""

    bundles: Sequence[Resources]
    of: Mapping[str, Sequence[Room]]
    """learner, generator, verifier -> the room of each rank, replica, pool."""
    more: Mapping[int, Resources]
    """Bundles that are taken when the cluster has room for them."""

    @classmethod
    def of_roles(cls, config: RuntimeConfig, *, ranks: int, replicas: int, most_replicas: int) -> Rooms:
        """Colocated, a rank and a generator share a bundle; else each process has its own. Generators beyond
        ``replicas`` have theirs behind all others, in ``more``."""
        shared = config.placement == "colocated"
        first_generator, first_verifier = (0, ranks) if shared else (ranks, ranks + replicas)
        of = {
            "learner": [Room(i, config.cpus_per_learner, config.gpus_per_learner) for i in range(ranks)],
            "generator": [
                Room(first_generator + i, config.cpus_per_generator, config.gpus_per_generator) for i in range(replicas)
            ],
            "verifier": [Room(first_verifier + i, 1.0, 0.0) for i in range(config.most)],
        }
        first_extra = first_verifier + config.most
        of["generator"] += [
            Room(first_extra + i, config.cpus_per_generator, config.gpus_per_generator)
            for i in range(most_replicas - replicas)
        ]
        bundles: dict[int, dict[str, float]] = {}
        for rooms in of.values():
            for room in rooms:
                bundle = bundles.setdefault(room.bundle, {})
                for name, amount in (("CPU", room.cpus), ("GPU", room.gpus)):
                    if amount:
                        bundle[name] = bundle.get(name, 0.0) + amount
        first = [bundles[number] for number in range(first_extra)]
        return cls(first, of, {number: bundle for number, bundle in bundles.items() if number >= first_extra})

    @property
    def total(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                found[name] = found.get(name, 0.0) + amount
        return found
