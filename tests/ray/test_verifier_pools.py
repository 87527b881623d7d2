"""Verifiers that die, hang and go, played by objects of this process: every rollout is judged, or somebody says why."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from nearpolicy.errors import VerifierError
from nearpolicy.launch.ray.hosts import Judged
from nearpolicy.launch.ray.parcels import received
from nearpolicy.launch.ray.verifiers import MOST_STARTS, Demand, VerifierPools

BOUND_S = 60


class Actor:
    """Judges when it is let; `dies` and `hangs` as told."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.cases: list[tuple] = []
        self.goes_on = asyncio.Event()
        self.is_dead = self.rests = False
        self.hangs = False
        self.tells: list = []
        self.do = SimpleNamespace(remote=self._do)
        self.rest = SimpleNamespace(remote=self._rest)

    def die(self) -> None:
        self.is_dead = True
        self.goes_on.set()

    async def _rest(self) -> None:
        self.rests = True

    async def _do(self, verb: str, *arguments):
        if verb == "isolation":
            return None
        if verb == "score_many":
            self.cases += received(arguments[0])
            return None
        await (asyncio.Event().wait() if self.hangs else self.goes_on.wait())
        if self.is_dead:
            raise RayActorError
        if not self.cases and not self.tells:
            self.goes_on.clear()
        judged, self.cases = [(ticket, {"by": self.place}, None) for ticket, *_ in self.cases], []
        return Judged(judged=judged, events=self.tells, flips={})


class Scene:
    def __init__(self, least: int, most: int, silence_s: float = 30.0) -> None:
        self.actors: dict[int, list[Actor]] = {}
        self.said: list[str] = []
        self.refusals: list[Exception] = []
        """Of the next starts."""
        demand = Demand(least, most, workers=1)
        self.pools = VerifierPools(
            self._spawn, demand, lambda task: ["r"], lambda *_, **__: None, self.said.append, silence_s=silence_s
        )

    async def _spawn(self, place: int) -> Actor:
        if self.actors and self.refusals:
            raise self.refusals.pop()
        actor = Actor(place)
        self.actors.setdefault(place, []).append(actor)
        return actor

    def score(self) -> asyncio.Task:
        return asyncio.create_task(self.pools.score(SimpleNamespace(task="t"), None))


def playing(scene: Scene, story) -> None:
    async def within_the_bound() -> None:
        async with asyncio.timeout(BOUND_S):
            await scene.pools.start()
            try:
                await story()
            finally:
                await scene.pools.close()

    asyncio.run(within_the_bound())


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_what_a_verifier_had_that_was_to_go_and_dies_is_judged_by_another_one():
    scene = Scene(2, 3)

    async def story() -> None:
        first, second = scene.actors[0][0], scene.actors[1][0]
        asked = [scene.score() for _ in range(2)]
        await until(lambda: first.cases and second.cases)
        going = asyncio.create_task(scene.pools._give_up(1))
        await asyncio.sleep(0)
        second.die()
        await until(lambda: len(first.cases) == 2)
        first.goes_on.set()
        assert [(await each)["by"] for each in asked] == [0, 0]
        await going
        assert list(scene.actors) == [0, 1] and len(scene.actors[1]) == 1  # nobody in the place of one that was to go

    playing(scene, story)


def test_a_prompt_that_cannot_travel_is_an_error_for_whoever_waits():
    scene = Scene(1, 1)

    async def story() -> None:
        with pytest.raises(TypeError, match="cannot pickle"):
            await scene.pools.score(SimpleNamespace(task="t", attachment=threading.Lock()), None)

    playing(scene, story)


def test_a_place_is_free_when_its_verifier_has_gone(monkeypatch):
    monkeypatch.setattr("nearpolicy.launch.ray.verifiers.SIZED_EVERY_S", 0.0)
    scene = Scene(1, 2)

    async def story() -> None:
        pools = scene.pools
        monkeypatch.setattr(pools._demand, "wanted", lambda now: 2)
        await until(lambda: len(pools._pools) == 2)
        second = scene.actors[1][0]
        asked = [scene.score() for _ in range(2)]
        await until(lambda: second.cases)
        going = asyncio.create_task(pools._give_up(1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(scene.actors[1]) == 1
        second.goes_on.set()
        scene.actors[0][0].goes_on.set()
        await asyncio.gather(*asked, going)
        assert second.rests
        await until(lambda: len(scene.actors[1]) == 2)

    playing(scene, story)


def test_a_place_where_none_can_be_started_is_tried_again_as_long_as_others_judge(monkeypatch):
    monkeypatch.setattr("nearpolicy.launch.ray.verifiers.FIRST_PAUSE_S", 0.0)
    scene = Scene(2, 2)

    async def story() -> None:
        scene.refusals = [RuntimeError("no memory")] * (MOST_STARTS + 2)
        scene.actors[0][0].die()
        await until(lambda: len(scene.actors[0]) == 2)
        assert sum("no memory" in text for text in scene.said) == MOST_STARTS + 2

    playing(scene, story)


def test_the_run_ends_once_no_verifier_is_left_and_none_can_be_started():
    scene = Scene(2, 2)

    async def story() -> None:
        scene.refusals = [RuntimeError("no memory")] * 100
        asked = scene.score()
        for place in (0, 1):
            scene.actors[place][0].die()
        with pytest.raises(VerifierError, match=r"no verifier is left.*no memory"):
            await asked

    playing(scene, story)


def test_a_verifier_that_answers_nothing_is_lost_after_a_bound():
    scene = Scene(1, 1, silence_s=0.5)

    async def story() -> None:
        scene.actors[0][0].hangs = True
        asked = scene.score()
        await until(lambda: len(scene.actors[0]) == 2 and scene.actors[0][1].cases)
        scene.actors[0][1].goes_on.set()
        assert await asked == {"by": 0}

    playing(scene, story)
    assert any("no answer within 0.5 s" in text for text in scene.said)


def test_an_answer_that_makes_no_sense_ends_the_wait_for_verdicts():
    scene = Scene(1, 1)

    async def story() -> None:
        actor = scene.actors[0][0]
        asked = scene.score()
        await until(lambda: actor.cases)
        actor.tells = [("verify", {})]  # without its seconds
        actor.goes_on.set()
        with pytest.raises(KeyError, match="seconds"):
            await asked
        with pytest.raises(KeyError, match="seconds"):
            await scene.score()

    playing(scene, story)
