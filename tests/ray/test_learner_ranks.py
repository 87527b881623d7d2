"""Ranks that die at any moment, played by objects of this process: who asks, who waits, and where they come back to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from nearpolicy.errors import ConfigError, RunFolderError, StandstillError, SyncError
from nearpolicy.launch.ray.calls import Answer
from nearpolicy.launch.ray.learner import MOST_LOSSES, LearnerLost, LearnerRanks
from nearpolicy.launch.ray.parcels import received

BOUND_S = 60


class Rank:
    """Counts what it is asked to; dies at the calls that `deaths` names, by their number over all ranks."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.version = 0
        self.is_dead = False
        self.do = SimpleNamespace(remote=self._do)

    def _do(self, verb: str, *arguments):
        return asyncio.ensure_future(self._answer(verb, arguments))

    async def _answer(self, verb: str, arguments) -> Answer:
        await asyncio.sleep(0)
        self.scene.calls.append(verb if verb != "call" else arguments[0].__name__)
        number = len(self.scene.calls) - 1
        if error := self.scene.broken.get(number):
            raise error
        if number in self.scene.hangs:
            await asyncio.Event().wait()
        if self.is_dead or number in self.scene.deaths:
            self.is_dead = True
            raise RayActorError
        value = arguments[0](self, *received(arguments[1])) if verb == "call" else None
        self.version = 0 if verb == "begin_anew" else self.version
        return Answer(value=value, state={"version": self.version, "can_learn_ahead": False})


def advance(rank: Rank) -> int:
    rank.version += 1
    return rank.version


def look(rank: Rank) -> int:
    return rank.version


class Scene:
    def __init__(self, *deaths: int, rank_timeout_s: float = 60.0) -> None:
        self.deaths = set(deaths)
        self.hangs: set[int] = set()
        self.calls: list[str] = []
        self.broken: dict[int, Exception] = {}
        self.refused: list[Exception] = []
        self.said: list[str] = []
        self.brought_back: list[int] = []
        patience = {"rank_timeout_s": rank_timeout_s, "pause_s": 0.0}
        self.learner = LearnerRanks(self._spawn, lambda *_, **__: None, self.said.append, **patience)
        self.learner.bring_back = self._bring_back

    async def _spawn(self):
        if self.calls and self.refused:
            raise self.refused.pop()
        return [Rank(self)]

    async def _bring_back(self, version: int) -> None:
        self.brought_back.append(version)
        for _ in range(version):
            await self.learner.call(advance)


def playing(scene: Scene, story) -> None:
    async def within_the_bound() -> None:
        async with asyncio.timeout(BOUND_S):
            await scene.learner.start()
            await story()

    asyncio.run(within_the_bound())


def test_who_asks_while_ranks_come_back_waits_and_finds_them_where_they_were():
    scene = Scene(3)

    async def story() -> None:
        learner = scene.learner
        assert [await learner.call(advance) for _ in range(2)] == [1, 2]
        first = asyncio.create_task(learner.call(look))  # dies of it
        second = asyncio.create_task(learner.call(advance))
        seen = set()
        while not second.done():
            seen.add(learner.version)
            await asyncio.sleep(0)
        assert (await first, await second) == (2, 3)
        assert seen <= {2, 3}

    playing(scene, story)
    assert scene.brought_back == [2] and len(scene.said) == 1


def test_a_version_is_not_handed_over_once_a_step_that_came_first_has_changed_the_weights():
    scene, shipped = Scene(), SimpleNamespace(record=SimpleNamespace(version=1), shipment=None)

    async def story() -> None:
        learner = scene.learner
        assert await learner.call(advance) == 1
        await learner.deliver(shipped, ["generator 0"], ["generator 0"])
        step = asyncio.create_task(learner.call(advance))
        await asyncio.sleep(0)
        with pytest.raises(SyncError, match="version 1 cannot be handed over any more, the learner has gone on to 2"):
            await learner.deliver(shipped, ["generator 0"], ["generator 0"])
        assert await step == 2

    playing(scene, story)
    assert scene.calls == ["state", "advance", "deliver", "advance"] and scene.said == []


def test_a_rank_that_gives_no_answer_is_replaced_after_a_bound():
    scene = Scene(rank_timeout_s=0.2)
    scene.hangs = {2}

    async def story() -> None:
        assert await scene.learner.call(advance) == 1
        assert await scene.learner.call(advance) == 2  # by another rank, which was brought back to 1

    playing(scene, story)
    assert scene.brought_back == [1]
    assert "no answer to advance within 0.2 s (runtime.rank_timeout_s)" in scene.said[0]


def test_who_gives_up_in_the_middle_leaves_coming_back_to_the_next_one():
    scene = Scene(2)

    async def story() -> None:
        learner = scene.learner
        await learner.call(advance)
        asked = asyncio.create_task(learner.call(look))
        while not scene.brought_back:
            await asyncio.sleep(0)
        assert not learner.is_there
        asked.cancel()
        await asyncio.wait([asked])
        assert await learner.call(look) == 1
        assert learner.is_there

    playing(scene, story)
    assert scene.brought_back == [1, 1]


@pytest.mark.parametrize("error", [ConfigError("no room"), StandstillError("not met"), RayActorError()])
def test_ranks_that_cannot_be_had_at_once_are_asked_for_again(error):
    scene = Scene(2)

    async def story() -> None:
        await scene.learner.call(advance)
        scene.refused = [error]
        assert await scene.learner.call(look) == 1

    playing(scene, story)
    assert len(scene.said) == 2


def test_ranks_lost_while_they_begin_anew_begin_anew():
    scene = Scene(2)

    async def story() -> None:
        await scene.learner.call(advance)
        await scene.learner.begin_anew()
        assert scene.learner.version == 0 and scene.learner.is_there

    playing(scene, story)
    assert scene.brought_back == []


def test_ranks_that_die_of_every_try_end_the_run():
    scene = Scene(*range(1, 100))

    async def story() -> None:
        with pytest.raises(LearnerLost, match="--resume"):
            await scene.learner.call(advance)
        assert not scene.learner.is_there

    playing(scene, story)
    assert len(scene.said) == MOST_LOSSES


def test_ranks_that_come_back_with_other_bits_are_lost_to_this_session():
    """A resume has a way: it makes another lineage of them."""
    scene = Scene(2)

    async def other_bits(version: int) -> None:
        raise RunFolderError(f"version {version} learned again is not the recorded one to the bit")

    async def story() -> None:
        await scene.learner.call(advance)
        scene.learner.bring_back = other_bits
        with pytest.raises(LearnerLost, match="not the recorded one to the bit"):
            await scene.learner.call(look)

    playing(scene, story)


def test_an_error_of_a_call_is_not_a_death():
    scene = Scene()
    scene.broken[1] = RayTaskError("do", "traceback", ValueError("cannot travel"))

    async def story() -> None:
        with pytest.raises(RayTaskError, match="traceback"):
            await scene.learner.call(advance)

    playing(scene, story)
    assert scene.said == []
