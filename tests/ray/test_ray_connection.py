"""What was begun is ended, whoever stops waiting for it; and whom a look inside asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from nearpolicy.errors import ConfigError, EngineError
from nearpolicy.launch.ray.calls import Place
from nearpolicy.launch.ray.cluster import Cluster
from nearpolicy.launch.ray.runtime import AnyMember
from nearpolicy.launch.ray.transports import chosen, require_reached
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


def place(node: str) -> Place:
    return Place(node=node, node_id=node, pid=1, versions={})


@pytest.mark.parametrize(
    ("transport", "address", "most", "nodes", "found"),
    [
        ("auto", None, 2, "aa", "shared_memory"),
        ("auto", "auto", 2, "aa", "shared_memory"),
        ("auto", "auto", 3, "aa", "broadcast"),  # the third may come to another node
        ("auto", None, 3, "aa", "shared_memory"),  # there is no other node
        ("auto", "auto", 2, "ab", "broadcast"),
        ("shared_memory", "auto", 3, "aa", "shared_memory"),
    ],
)
def test_weights_go_where_generators_are_and_may_come_to_be(transport, address, most, nodes, found):
    config = SimpleNamespace(
        sync=SyncConfig(transport=transport),
        runtime=RuntimeConfig(kind="ray", address=address),
        generator=SimpleNamespace(replicas=2, most=most),
    )
    assert chosen(config, [place(node) for node in nodes]) == found


def test_a_generator_that_weights_cannot_reach_is_refused_by_name():
    require_reached("shared_memory", "generator 2", place("a"), [place("a")])
    require_reached("broadcast", "generator 2", place("b"), [place("a")])
    with pytest.raises(ConfigError, match=r"generator 2 is on b.*sync\.transport"):
        require_reached("shared_memory", "generator 2", place("b"), [place("a")])
