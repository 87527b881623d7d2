"""Colocated roles: whose turn it is, also where a learner that was lost comes back in the middle of a step."""

from __future__ import annotations

import asyncio

from nearpolicy.launch.colocated import TakesTurns


class Generator:
    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    async def sleep(self) -> None:
        self._seen.append("sleep")

    async def resume(self) -> None:
        self._seen.append("resume")


class Learner:
    """Learns the batch before again, as one that comes back does."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen
        self.place: TakesTurns | None = None

    async def step(self, batch: int) -> int:
        if batch:
            await self.place.step(batch - 1)
        self._seen.append(f"step {batch}")
        return batch


def test_a_generator_sleeps_until_a_learner_that_comes_back_has_made_its_step():
    seen: list[str] = []
    learner = Learner(seen)
    learner.place = TakesTurns(learner, Generator(seen))
    assert asyncio.run(learner.place.step(1)) == 1
    assert asyncio.run(learner.place.step(0)) == 0
    assert seen == ["sleep", "step 0", "step 1", "resume", "sleep", "step 0", "resume"]
