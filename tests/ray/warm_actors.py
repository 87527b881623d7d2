"""Actors that are used again by the next run, since loading torch takes each of them seconds."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

from nearpolicy.launch.ray.cluster import Cluster, imported_ray
from nearpolicy.launch.ray.hosts import Process
from nearpolicy.launch.ray.record import start_record_actor

CPUS = 16


def begin_ray() -> Any:
    ray = imported_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=256 << 20,
        configure_logging=False,
        log_to_driver=False,
    )
    return ray


def _new() -> Any:
    import ray

    return ray.remote(Process).options(num_cpus=0).remote()


async def _is_alive(actor: Any) -> bool:
    import ray

    try:
        await actor.here.remote()
    except ray.exceptions.RayError:
        return False
    return True


def _alive_record(records: list[Any]) -> Any:
    import ray

    while records:
        actor = records.pop()
        try:
            ray.get(actor.rest.remote(), timeout=20)
        except (ray.exceptions.RayError, TimeoutError):
            continue
        return actor
    return None


class WarmCluster(Cluster):
    """Actors come from a pool and go back to it; one that was killed does not."""

    pool: ClassVar[list[Any]] = []
    """Of all clusters of this process."""
    records: ClassVar[list[Any]] = []
    """Likewise, those that write records."""
    out: dict[int, Any]
    recording: Any = None

    async def make_room(self, bundles) -> None:
        self.out = {}
        alive = await asyncio.gather(*map(_is_alive, self.pool))  # one may have been killed as it came back
        self.pool[:] = [actor for actor, lives in zip(self.pool, alive, strict=True) if lives]

    async def more_room(self, number, bundle) -> None:
        pass

    def process(self, room) -> Any:
        actor = self.pool.pop() if self.pool else _new()
        self.out[id(actor)] = actor
        self._actors.append(actor)
        return actor

    def record(self) -> Any:
        self.recording = _alive_record(self.records) or start_record_actor()
        return self.recording

    def end_record(self, actor) -> None:
        self.recording = None
        self.records.append(actor)

    def kill(self, actor) -> None:
        self.out.pop(id(actor), None)
        super().kill(actor)

    async def close(self) -> None:
        import ray

        for actor in self.out.values():
            try:
                await asyncio.wait_for(actor.rest.remote(), 20)
                self.pool.append(actor)
            except (ray.exceptions.RayError, TimeoutError):
                super().kill(actor)
        self.out.clear()
        self._actors.clear()
        if self.recording is not None:  # the run was refused before it had a record
            self.end_record(self.recording)
