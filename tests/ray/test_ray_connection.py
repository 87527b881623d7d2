"""What was begun is ended, whoever stops waiting for it; and whom a look inside asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from nearpolicy.errors import ConfigError, EngineError
from nearpolicy.launch.ray.calls import Place, why_lost
from nearpolicy.launch.ray.cluster import Cluster
from nearpolicy.launch.ray.generators import GeneratorMember
from nearpolicy.launch.ray.runtime import AnyMember
from nearpolicy.launch.ray.transports import Whereabouts, chosen, require_reached
from nearpolicy.placement import RuntimeConfig
from nearpolicy.sync.config import SyncConfig

BOUND_S = 60


def test_actors_are_killed_and_the_connection_ends_also_if_nobody_waits_for_them_to_rest(monkeypatch):
    ended = []
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr("ray.kill", lambda actor, no_restart: ended.append(actor.name))

    async def story() -> None:
        cluster = Cluster(RuntimeConfig(kind="ray"), is_own=True)
        rest = SimpleNamespace(remote=lambda: asyncio.Event().wait())
        cluster._actors = [SimpleNamespace(name=name, rest=rest) for name in "ab"]
        closing = asyncio.create_task(cluster.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])

    asyncio.run(story())
    assert ended == ["a", "b", "ray"]


class Member:
    def __init__(self, *answers) -> None:
        self.answers = list(answers)

    async def examine(self, look):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def look_at(*members: Member, patience_s: float = BOUND_S):
    fleet = SimpleNamespace(up_to_date=[SimpleNamespace(member=member) for member in members])
    return asyncio.run(AnyMember(fleet, patience_s).examine(len))


def test_a_look_inside_goes_to_a_generator_that_is_there():
    assert look_at(Member(RayActorError()), Member("found")) == "found"


def test_a_look_that_goes_wrong_is_an_error_of_the_look():
    with pytest.raises(ZeroDivisionError):
        look_at(Member(ZeroDivisionError()))


def test_a_look_at_nobody_ends_by_name():
    with pytest.raises(EngineError, match="no generator could be looked at"):
        look_at(patience_s=0.01)


class Dead:
    """An actor."""

    def __init__(self, error: Exception) -> None:
        self.do = SimpleNamespace(remote=self._answer)
        self._error = error

    async def _answer(self, verb, *arguments):
        raise self._error


@pytest.mark.parametrize("verb", ["submit_many", "abort_many", "collect", "pause", "sleep", "resume", "load"])
def test_whoever_asks_a_dead_generator_hears_of_an_engine_and_errors_of_a_call_stay_what_they_are(verb):
    arguments = {"submit_many": ([],), "abort_many": ([1],), "collect": (0.1,), "load": (None,)}.get(verb, ())

    def ask(error: Exception) -> None:
        asyncio.run(getattr(GeneratorMember("generator 0", Dead(error), None), verb)(*arguments))

    with pytest.raises(EngineError):
        ask(RayActorError())
    with pytest.raises(RayTaskError):
        ask(RayTaskError("do", "traceback", ValueError("wrong")))


def place(node: str, device: str | None = None) -> Place:
    return Place(node=node, node_id=node, pid=1, versions={}, device=device)


@pytest.mark.parametrize(
    ("transport", "address", "most", "nodes", "num_nodes", "found"),
    [
        ("auto", None, 2, "aaa", 1, "shared_memory"),
        ("auto", "auto", 2, "aaa", 1, "shared_memory"),
        ("auto", "auto", 2, "aaa", 2, "broadcast"),  # one that is lost with its node comes back on the other one
        ("auto", "auto", 3, "aaa", 1, "broadcast"),  # the third may come with another node
        ("auto", None, 3, "aaa", 1, "shared_memory"),  # there is no other node
        ("auto", "auto", 2, "aab", 2, "broadcast"),
        ("auto", "auto", 2, "a", 1, "shared_memory"),  # all generators are lost
        ("shared_memory", "auto", 3, "aaa", 2, "shared_memory"),
    ],
)
def test_weights_go_where_generators_are_and_may_come_to_be(transport, address, most, nodes, num_nodes, found):
    config = SimpleNamespace(
        sync=SyncConfig(transport=transport),
        runtime=RuntimeConfig(kind="ray", address=address),
        generator=SimpleNamespace(replicas=2, most=most),
    )
    learner, *generators = (place(node) for node in nodes)
    assert chosen(config, Whereabouts([learner], dict(enumerate(generators)), num_nodes)) == found


def test_a_generator_that_weights_cannot_reach_is_refused_by_name():
    require_reached("shared_memory", 2, place("a"), [place("a")])
    require_reached("broadcast", 2, place("b"), [place("a")])
    with pytest.raises(ConfigError, match=r"generator 2 is on b.*sync\.transport"):
        require_reached("shared_memory", 2, place("b"), [place("a")])


def colocated(transport: str, learner: str, generators: str) -> tuple[SimpleNamespace, Whereabouts]:
    """Places as node and number of a GPU, `-` for none, `x` for a device that is none of CUDA's."""
    devices = {"-": None, "x": "xpu of a", **{number: f"cuda GPU-{number}" for number in "123"}}
    ranks, others = ([place(p[0], devices[p[1]]) for p in of.split()] for of in (learner, generators))
    half = {"gpus_per_learner": 0.5, "gpus_per_generator": 0.5}
    config = SimpleNamespace(
        sync=SyncConfig(transport=transport),
        runtime=RuntimeConfig(kind="ray", placement="colocated", **half),
        generator=SimpleNamespace(replicas=len(generators.split()), most=len(generators.split())),
        learner=SimpleNamespace(ranks=len(learner.split())),
    )
    return config, Whereabouts(ranks, dict(enumerate(others)), 1)


@pytest.mark.parametrize(
    ("transport", "ranks", "generators", "found"),
    [
        ("auto", "a1 a2", "a1 a2", "device_handles"),
        ("auto", "a1 b1", "a1 b1", "device_handles"),
        ("auto", "a1 a2", "a2 a1", "shared_memory"),
        ("auto", "a- a-", "a- a-", "shared_memory"),  # on CPUs it saves nothing
        ("auto", "a1 b1", "b1 a1", "broadcast"),
        ("auto", "ax ax", "ax ax", "shared_memory"),  # no handles are made of its memory
        ("device_handles", "a- a-", "a- a-", "device_handles"),
        ("device_handles", "a- b-", "a- b-", "device_handles"),
        ("broadcast", "a1 a2", "a1 a2", "broadcast"),
    ],
)
def test_colocated_weights_go_by_handles_where_a_rank_and_its_generator_share_a_gpu(
    transport, ranks, generators, found
):
    assert chosen(*colocated(transport, ranks, generators)) == found


@pytest.mark.parametrize(
    ("ranks", "generators", "message"),
    [
        ("a1 a2", "a1 a3", "generator 1 computes on cuda GPU-3 of a and its rank of the learner on cuda GPU-2 of a"),
        ("a1", "a-", "generator 0 computes on the CPU of a and its rank of the learner on cuda GPU-1 of a"),
        ("a-", "b-", "generator 0 computes on the CPU of b and its rank of the learner on the CPU of a"),
    ],
)
def test_handles_between_devices_are_refused_before_anything_is_loaded(ranks, generators, message):
    with pytest.raises(ConfigError, match=message):
        chosen(*colocated("device_handles", ranks, generators))
    with pytest.raises(ConfigError, match=message):
        number = len(ranks.split()) - 1
        _, there = colocated("device_handles", ranks, generators)
        require_reached("device_handles", number, there.generators[number], there.ranks)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Generator\n\tactor_id: 725c\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes: (1) OOM",
            "its worker process has died",
        ),
        ("\tpid: 12\nThe actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`"),
        (
            "The actor 2178c1b4 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: failed to "
            "connect to all addresses. The task may or may not have been executed on the actor.",
            "it cannot be reached",
        ),
        ("The actor is unavailable", "RuntimeError: The actor is unavailable"),
        ("x" * 1000, f"RuntimeError: {'x' * 117}..."),
    ],
)
def test_of_what_ray_says_of_a_dead_actor_the_cause_is_told(text, wanted):
    assert why_lost(RuntimeError(text)) == wanted
