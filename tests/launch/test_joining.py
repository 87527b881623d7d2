"""Generators that come while a run goes on, played by objects of this process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from nearpolicy.launch.ray.joining import Joining

BOUND_S = 60


class Scene:
    """Places where nothing begins until `refusals` are used up; `told` is what happens, in its order."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.told: list[str] = []
        self.shown = asyncio.Event()
        self.joining = Joining(
            self, self, begin=self._begin, end=lambda place: self.told.append(f"end {place}"), say=self._say,
            first_pause_s=0.0,
        )  # fmt: skip

    async def _begin(self, place: int):
        if self.refusals:
            raise self.refusals.pop(0)
        self.told.append(f"begin {place}")
        return SimpleNamespace(name=f"generator {place}")

    def _say(self, text: str) -> None:
        self.told.append(f"say {text}")

    # The fleet.

    def join(self, member):
        self.told.append(f"join {member.name}")
        return member

    async def as_still_as_others(self, link) -> None:
        self.told.append(f"still {link.name}")

    # The publisher.

    async def remove(self, name: str) -> None:
        self.told.append(f"remove {name}")

    async def add(self, name: str, link) -> None:
        assert link.name == name
        self.told.append(f"show {name}")
        self.shown.set()


def playing(*refusals: Exception, story) -> list[str]:
    async def play() -> list[str]:
        async with asyncio.timeout(BOUND_S):
            scene = Scene(*refusals)
            await story(scene)
            await scene.joining.close()
            return scene.told

    return asyncio.run(play())


def test_a_lost_one_is_forgotten_and_ended_before_another_joins_which_sleeps_if_others_do():
    async def story(scene: Scene) -> None:
        scene.joining.replace(2, "no answer")
        await scene.shown.wait()

    assert playing(story=story) == [
        "say generator 2 was lost: no answer. Its sequences go on elsewhere; another one is started",
        "remove generator 2",
        "end 2",
        "begin 2",
        "join generator 2",
        "still generator 2",
        "show generator 2",
    ]


def test_one_that_cannot_be_started_is_ended_and_tried_again_until_it_can():
    async def story(scene: Scene) -> None:
        scene.joining.replace(0, "it died")
        await scene.shown.wait()

    told = playing(RuntimeError("no memory"), RuntimeError("another version"), story=story)
    assert [text for text in told if "cannot" in text] == [
        "say generator 0 cannot be started, and is tried again in 0 s: RuntimeError: no memory",
        "say generator 0 cannot be started, and is tried again in 0 s: RuntimeError: another version",
    ]
    assert told.count("end 0") == 3 and told[-1] == "show generator 0"


def test_one_more_comes_when_there_is_room_and_not_before():
    async def story(scene: Scene) -> None:
        room = asyncio.Event()
        scene.joining.add(3, room.wait())
        await asyncio.sleep(0)
        assert scene.told == []
        room.set()
        await scene.shown.wait()

    assert playing(story=story) == ["begin 3", "join generator 3", "still generator 3", "show generator 3"]


def test_nobody_comes_once_it_is_closed():
    async def story(scene: Scene) -> None:
        scene.joining.add(1, asyncio.Event().wait())
        await asyncio.sleep(0)

    assert playing(story=story) == []
