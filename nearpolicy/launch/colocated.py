"""Generator and learner on the same devices: they take turns, and whose turn it is not gives its memory back.

    generator works | sleeps (no memory for keys and values) .............. | works
    learner rests   | a step: gradients, moments (`learner.offload`) | rests  | rests, publishes

The pipeline knows nothing of it: a step simply begins when the generator is asleep. What was running then goes on from
its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nearpolicy.launch.places import LearnerPlace
from nearpolicy.records import Batch, Row, StepReport
from nearpolicy.roles import Weights


class Sleeps(Protocol):
    """A generator."""

    async def sleep(self) -> None: ...

    async def resume(self) -> None: ...


class TakesTurns:
    """Implements `LearnerPlace` around another one, whose steps have the devices to themselves."""

    def __init__(self, learner: LearnerPlace, generator: Sleeps) -> None:
        self.inner = learner
        self._generator = generator
        self._in_a_step = False

    @property
    def is_there(self) -> bool:
        return self.inner.is_there

    @property
    def version(self) -> int:
        return self.inner.version

    can_learn_ahead = False
    """It would work while the generator does."""

    async def learn_ahead(self, rows: Sequence[Row]) -> None:
        raise ValueError("a learner that takes turns with its generator cannot learn ahead of a batch")

    async def step(self, batch: Batch) -> StepReport:
        if self._in_a_step:  # a learner that was lost in it comes back by steps that it made before
            return await self.inner.step(batch)
        self._in_a_step = True
        try:
            await self._generator.sleep()
            return await self.inner.step(batch)
        finally:
            self._in_a_step = False
            await self._generator.resume()

    async def weights(self, record_parent: int | None) -> Weights:
        return await self.inner.weights(record_parent)

    async def begin_anew(self) -> None:
        await self.inner.begin_anew()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.inner.call(function, *arguments)
