"""The connection to Ray, room for the roles, and their actors. Every wait is bounded, and what was begun here is ended.

connect -> require (is there enough at all?) -> make room (a placement group) -> actors -> close
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nearpolicy.errors import ConfigError, described
from nearpolicy.launch.ray.hosts import Process
from nearpolicy.machine import num_cores
from nearpolicy.placement import Resources, Room, RuntimeConfig
from nearpolicy.waits import waiting

T = TypeVar("T")

OBJECT_STORE_BYTES = 2 << 30
"""Of a Ray that is started here: weights on their way, and batches."""
REST_S = 10.0
"""What actors get at the end of a run."""
PROBE_S = 10.0
"""For a first word from a cluster's address."""


@dataclass(eq=False)
class Cluster:
    """A connection, and what was started through it."""

    config: RuntimeConfig
    is_own: bool
    """Ray was started here, and ends with the run."""
    _bundles: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Number of a bundle -> its placement group, and its place there."""
    _actors: list[Any] = field(default_factory=list)

    @classmethod
    async def connect(cls, config: RuntimeConfig, needed: Resources) -> Cluster:
        """`ConfigError` if there is no Ray, no answer, or less than ``needed``."""
        ray = imported_ray()
        is_own = False
        if not ray.is_initialized():
            is_own = True
            await _within(config.start_timeout_s, _init(ray, config, needed), _where(config))
        cluster = cls(config, is_own)
        try:
            cluster._require(needed)
        except BaseException:
            await cluster.close()
            raise
        return cluster

    def _require(self, needed: Resources) -> None:
        import ray

        there = ray.cluster_resources()
        short = [
            f"{amount:g} {name}, and it has {there.get(name, 0.0):g}"
            for name, amount in needed.items()
            if amount > there.get(name, 0.0)
        ]
        if short:
            raise ConfigError(
                f"the roles of this recipe need {' and '.join(short)} ({_where(self.config)}). Use fewer "
                "generator.replicas, learner.ranks or runtime.verifiers, lower runtime.cpus_per_* and gpus_per_*, or "
                "add nodes"
            )

    async def make_room(self, bundles: Sequence[Resources]) -> None:
        """All bundles or none."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        self._bundles = {number: (group, number) for number in range(len(bundles))}
        what = f"room for {len(bundles)} actors"
        with waiting("the run", what):
            await _within(self.config.start_timeout_s, _done(group.ready()), what, self._why_no_room)

    async def more_room(self, number: int, bundle: Resources) -> None:
        """One more bundle, whenever the cluster has room for it."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(bundle)])
        self._bundles[number] = group, 0
        await _done(group.ready())

    def _why_no_room(self) -> str:
        import ray

        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        left = " and ".join(f"{amount:g} {name}" for name, amount in sorted(free.items())) or "nothing"
        return f"free at the moment: {left}. Other runs hold the rest, or no node has one bundle's share by itself"

    def process(self, room: Room) -> Any:
        """An actor that takes its share of a bundle. Ray does not start it again: who comes back must first show its
        weights."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, place = self._bundles[room.bundle]
        made = (
            ray.remote(Process)
            .options(
                num_cpus=room.cpus,
                num_gpus=room.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
            )
            .remote()
        )
        self._actors.append(made)
        return made

    def kill(self, actor: Any) -> None:
        """At once; one that is dead already stays so."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)
        with contextlib.suppress(ValueError):
            self._actors.remove(actor)

    async def close(self) -> None:
        try:
            await self._rest()
        finally:  # also if nobody waits for the end of it
            self._end()
            await self._disconnect()

    async def _rest(self) -> None:
        """What actors share with others is given back; who does not answer is killed all the same."""
        resting = [asyncio.ensure_future(_done(actor.rest.remote())) for actor in self._actors]
        if resting:
            try:
                await asyncio.wait(resting, timeout=REST_S)
            finally:
                for each in resting:
                    each.cancel()
                await asyncio.gather(*resting, return_exceptions=True)

    def _end(self) -> None:
        for actor in list(self._actors):
            self.kill(actor)
        from ray.util.placement_group import remove_placement_group

        for group in {id(group): group for group, _ in self._bundles.values()}.values():
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self._bundles.clear()

    async def _disconnect(self) -> None:
        import ray

        if self.is_own and ray.is_initialized():
            self.is_own = False
            await asyncio.to_thread(ray.shutdown)


def imported_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "runtime.kind=ray needs the package ray, which is not installed here: pip install 'nearpolicy[ray]', or "
            "set runtime.kind: inline"
        ) from None
    return ray


async def _init(ray: Any, config: RuntimeConfig, needed: Resources) -> None:
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if config.address is None:
        cores = max(num_cores(), int(-(-needed.get("CPU", 0) // 1)))  # one machine may run more roles than it has cores
        await asyncio.to_thread(
            ray.init,
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
        return
    if config.address != "auto":
        await _answers(config.address)
    try:
        await asyncio.to_thread(ray.init, address=config.address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"runtime.address={config.address}: no Ray cluster to join ({described(error)}). Start one (`ray start "
            "--head`), correct the address, or leave it out for a Ray on this machine alone"
        ) from error


async def _answers(address: str) -> None:
    """`ConfigError` unless something listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"runtime.address={address} is not of the form HOST:PORT (6379 unless chosen otherwise)")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError, socket.gaierror) as error:
        raise ConfigError(
            f"runtime.address={address}: nothing answers there ({described(error)}). Is the head node up, and its port "
            "open from here? `ray status` on it says so"
        ) from error
    writer.close()


def _where(config: RuntimeConfig) -> str:
    return f"the cluster at {config.address}" if config.address else "the Ray of this machine"


async def _done(ref: Any) -> Any:
    return await ref


async def _within(seconds: float, waited_for: Awaitable[T], what: str, why: Any = None) -> T:
    """`ConfigError` after so long: it is the start of a run."""
    try:
        return await asyncio.wait_for(waited_for, seconds)
    except TimeoutError:
        more = f"; {why()}" if why is not None else ""
        raise ConfigError(f"{what}: not there within {seconds:g} s (runtime.start_timeout_s){more}") from None
