"""The connection to Ray, room for the roles, and their actors. Every wait is bounded, and what was begun here is ended.

connect -> require (is there enough at all?) -> make room (a placement group) -> actors -> close
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nearpolicy.errors import ConfigError, described
from nearpolicy.launch.ray.hosts import PROCESSES
from nearpolicy.launch.ray.record import start_record_actor
from nearpolicy.machine import num_cores
from nearpolicy.placement import OF_CONTROLLER, Resources, Room, RuntimeConfig
from nearpolicy.waits import waiting

T = TypeVar("T")

OBJECT_STORE_BYTES = 2 << 30
"""Of a Ray that is started here: weights on their way, and batches."""
REST_S = 10.0
"""What actors get at the end of a run."""
WHAT_RAY_SAID = "what Ray has printed says why, if it knows: a token of another cluster, say (RAY_AUTH_TOKEN)"
PROBE_S = 10.0
"""For a connection to a cluster's address, and for a first word from it."""
LOOKS_EVERY_S = 0.1
"""For what is to end."""
_DRIVER = "driver"
HTTP2_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A frame of settings, with none in it. Both sides of a gRPC connection begin with one."""
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS


@dataclass(eq=False)
class Cluster:
    """A connection, and what was started through it."""

    config: RuntimeConfig
    is_own: bool
    """Ray was started here, and ends with the run."""
    _ended: threading.Event = field(default_factory=threading.Event)
    """Lets the thread go that started it."""
    _bundles: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Number of a bundle -> its placement group, and its place there."""
    _actors: list[Any] = field(default_factory=list)

    @classmethod
    async def connect(cls, config: RuntimeConfig, needed: Resources) -> Cluster:
        """`ConfigError` if there is no Ray, no answer, or less than ``needed``."""
        ray = imported_ray()
        if config.address not in (None, "auto"):
            await _answers(config.address, min(PROBE_S, config.start_timeout_s))
        is_own, ended = not ray.is_initialized(), threading.Event()
        if is_own:
            beginning = _init(ray, config, needed, ended)
            await _within(config.start_timeout_s, beginning, _where(config), lambda: WHAT_RAY_SAID)
        elif config.address not in (None, "auto"):
            _require_connected_to(config.address)
        cluster = cls(config, is_own, ended)
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

    def num_nodes(self) -> int:
        """That are there now."""
        import ray

        return sum(node["Alive"] for node in ray.nodes())

    async def make_room(self, bundles: Sequence[Resources]) -> None:
        """All bundles or none."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK", name=_own_name("room"))
        self._bundles = {number: (group, number) for number in range(len(bundles))}
        what = f"room for {len(bundles)} actors"
        with waiting("the run", what):
            await _within(self.config.start_timeout_s, _done(group.ready()), what, self._why_no_room)

    async def more_room(self, number: int, bundle: Resources) -> None:
        """One more bundle, whenever the cluster has room for it."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(bundle)], name=_own_name("room"))
        self._bundles[number] = group, 0
        await _done(group.ready())

    def _why_no_room(self) -> str:
        import ray

        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        left = " and ".join(f"{amount:g} {name}" for name, amount in sorted(free.items())) or "nothing"
        return f"free at the moment: {left}. Other runs hold the rest, or no node has one bundle's share by itself"

    def process(self, room: Room, role: str) -> Any:
        """An actor that takes its share of a bundle. Ray does not start it again: who comes back must first show its
        weights."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, place = self._bundles[room.bundle]
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
        return self._made(role, num_cpus=room.cpus, num_gpus=room.gpus, scheduling_strategy=where)

    def controller(self) -> Any:
        """An actor on any node that has room for it."""
        return self._made("controller", num_cpus=OF_CONTROLLER["CPU"])

    def _made(self, role: str, **options: Any) -> Any:
        import ray

        made = ray.remote(PROCESSES[role]).options(name=_own_name(role), max_restarts=0, **options).remote()
        self._actors.append(made)
        return made

    def record(self) -> Any:
        """The actor that writes the run's record, on this node; it needs no room."""
        made = start_record_actor(_own_name("record"))
        self._actors.append(made)
        return made

    def end_record(self, actor: Any) -> None:
        """Once it has let go of the folder."""
        self.kill(actor)

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
        self._ended.set()


def _own_name(role: str) -> str:
    """Of what this process begins: it tells whose it is, once the process is dead."""
    import ray

    return f"{ray.get_runtime_context().get_actor_id() or _DRIVER}: {role} {uuid.uuid4().hex[:8]}"


async def require_nothing_left(actor_id: str, limit_s: float) -> None:
    """End what the actor, which is dead, had begun; `ConfigError` if something is still there after so long."""
    import ray
    from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

    def rooms() -> list[str]:
        found = placement_group_table().values()
        return [group["name"] for group in found if is_its(group["name"]) and group["state"] != "REMOVED"]

    def is_its(name: str) -> bool:
        return name.startswith(f"{actor_id}: ")

    def left() -> list[str]:
        return [*filter(is_its, ray.util.list_named_actors()), *rooms()]

    for name in filter(is_its, ray.util.list_named_actors()):
        with contextlib.suppress(ValueError):  # gone in the meantime
            ray.kill(ray.get_actor(name), no_restart=True)
    for name in rooms():
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(name))
    try:
        with waiting("the run", "actors of the lost controller to end"):
            async with asyncio.timeout(limit_s):
                while left():
                    await asyncio.sleep(LOOKS_EVERY_S)
    except TimeoutError:
        names = ", ".join(name.partition(": ")[2] for name in left())
        raise ConfigError(
            f"{names} of the lost controller: still there after {limit_s:g} s (runtime.start_timeout_s). End the job, "
            "then `nearpolicy train --resume`"
        ) from None


def imported_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "runtime.kind=ray needs the package ray, which is not installed here: pip install 'nearpolicy[ray]', or "
            "set runtime.kind: inline"
        ) from None
    return ray


async def _init(ray: Any, config: RuntimeConfig, needed: Resources, ended: threading.Event) -> None:
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if config.address is None:
        cores = max(num_cores(), int(-(-needed.get("CPU", 0) // 1)))  # one machine may run more roles than it has cores
        try:
            await _initialised(
                ray,
                ended,
                address="local",
                num_cpus=cores,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
        except Exception as error:  # Ray raises that, and nothing narrower, for processes of its own that do not start
            raise ConfigError(
                f"no Ray starts on this machine ({described(error)}). Try again when it is less busy; the files in "
                "/tmp/ray/session_latest/logs say more"
            ) from error
        return
    try:
        await _initialised(ray, ended, address=config.address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"runtime.address={config.address}: no Ray cluster to join ({described(error)}). Start one (`ray start "
            "--head`), correct the address, or leave it out for a Ray on this machine alone"
        ) from error


async def _initialised(ray: Any, ended: threading.Event, **options: Any) -> None:
    """`ray.init`, which tries for minutes and cannot be called off: on a thread that no exit waits for. A Ray that
    comes after all, when nobody waits any more, is ended.

    The kernel kills what a thread has started when that thread ends, so this one stays until ``ended``.
    """
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    given_up = threading.Event()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def start() -> None:
        error = None
        try:
            ray.init(**options)
        except BaseException as found:
            error = found
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, error)
        if error is None:
            ended.wait()
            if given_up.is_set():
                ray.shutdown()

    threading.Thread(target=start, name="ray.init", daemon=True).start()
    try:
        await done
    except BaseException:
        given_up.set()
        ended.set()
        raise


async def _answers(address: str, limit_s: float) -> None:
    """`ConfigError` unless what listens there speaks as a head node does: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"runtime.address={address} is not of the form HOST:PORT (6379 unless chosen otherwise)")
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError, socket.gaierror) as error:
        raise ConfigError(
            f"runtime.address={address}: nothing answers there ({described(error)}). Is the head node up, and its port "
            "open from here? `ray status` on it says so"
        ) from error
    try:
        async with asyncio.timeout(limit_s):
            writer.write(HTTP2_HELLO)
            answer = await reader.readexactly(len(HTTP2_SETTINGS))
    except (OSError, EOFError, TimeoutError):
        answer = b""
    finally:
        writer.close()
    if answer[3:4] != HTTP2_SETTINGS[3:4]:
        raise ConfigError(
            f"runtime.address={address}: something listens there, but it is no head node of Ray (it does not speak "
            "gRPC). `ray status` on the head node says its address; the port of the dashboard (8265) is another one"
        )


def _require_connected_to(address: str) -> None:
    """`ConfigError` if this process is connected to another cluster: it can have one at a time."""
    import ray

    ours = ray.get_runtime_context().gcs_address
    (host, _, port), (our_host, _, our_port) = address.rpartition(":"), ours.rpartition(":")
    if port != our_port or _hosts(host).isdisjoint(_hosts(our_host)):
        raise ConfigError(
            f"runtime.address={address}, but this process is connected to the Ray at {ours} already; call "
            "ray.shutdown() first, or leave runtime.address out to use that one"
        )


def _hosts(name: str) -> set[str]:
    """Addresses of a host; those of this machine stand for one another."""
    import ray

    found, own = set(), {"127.0.0.1", "::1", ray.util.get_node_ip_address()}
    for host, addresses in ((name, found), (socket.gethostname(), own)):
        with contextlib.suppress(OSError):
            addresses |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    return found if found.isdisjoint(own) else found | own


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
