"""The ranks of a learner as one place: every verb goes to all of them, and the first one's answer counts.

A rank that dies takes the others with it, which would wait for it. The learner then begins on fresh ranks, is brought
back to where it was by whoever has the record (a checkpoint, and the recorded batches after it), and is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from nearpolicy.errors import NearpolicyError, described
from nearpolicy.launch.ray.calls import Answer
from nearpolicy.records import Batch, Row, StepReport
from nearpolicy.roles import Weights
from nearpolicy.waits import waiting

MOST_LOSSES = 3
"""Times that ranks may die over one question before the run ends."""


class LearnerLost(NearpolicyError):
    """Ranks of the learner have died, and there is no way back in this process; `nearpolicy train --resume` has one."""


def without_segments(rows: Sequence[Row]) -> tuple[Row, ...]:
    """For the way back to who has them."""
    return tuple(replace(row, segment=None) for row in rows)


def with_segments(rows: Sequence[Row], known: Sequence[Row]) -> tuple[Row, ...]:
    """``rows`` with the segments, the same objects, of the ``known`` rows that they came from."""
    left: dict[tuple[int, int, bool], list[Row]] = {}
    for row in reversed(known):
        left.setdefault((row.group, row.sample, row.replayed), []).append(row)
    return tuple(replace(row, segment=left[row.group, row.sample, row.replayed].pop().segment) for row in rows)


class LearnerRanks:
    """Implements `nearpolicy.launch.places.LearnerPlace`."""

    def __init__(
        self, spawn: Callable[[], Awaitable[Sequence[Any]]], tell: Callable[..., None], say: Callable[[str], None]
    ) -> None:
        """``spawn``: fresh ranks, the first one first, with the initial weights; those before are killed."""
        self._spawn = spawn
        self._tell = tell
        self._say = say
        self._ranks: Sequence[Any] = ()
        self._state: dict[str, Any] = {}
        self._shipped: tuple[Row, ...] = ()
        """Rows of the coming batch that the ranks have."""
        self._turn = asyncio.Lock()
        """All ranks get their calls in one order."""
        self.bring_back: Callable[[int], Awaitable[None]] | None = None
        """From the initial weights to those of a version."""
        self._coming_back = False

    async def start(self) -> None:
        self._ranks = await self._spawn()
        self._state = (await self._ranks[0].do.remote("state")).state

    @property
    def is_there(self) -> bool:
        return bool(self._state)

    @property
    def version(self) -> int:
        return self._state["version"]

    @property
    def can_learn_ahead(self) -> bool:
        return self._state["can_learn_ahead"]

    async def learn_ahead(self, rows: Sequence[Row]) -> None:
        await self._ask("learn_ahead", lambda: (self._not_shipped(rows),))
        self._shipped = tuple(rows)

    async def step(self, batch: Batch) -> StepReport:
        report = await self._ask("step", lambda: (replace(batch, rows=self._not_shipped(batch.rows)),))
        self._shipped = ()
        return replace(report, rows=with_segments(report.rows, batch.rows))

    def _not_shipped(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        done = len(self._shipped)
        if len(rows) < done or any(a is not b for a, b in zip(self._shipped, rows, strict=False)):
            raise ValueError(f"a step that began with {done} rows goes on with other ones")
        return tuple(rows[done:])

    async def weights(self, record_parent: int | None) -> Weights:
        return await self._ask("weights", lambda: (record_parent,))

    async def begin_anew(self) -> None:
        self._state, self._shipped = {}, ()
        await self._ask("begin_anew", tuple)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._ask("call", lambda: (function, *arguments))

    async def deliver(self, weights: Weights, members: Sequence[str], awaited: Sequence[str]) -> Sequence[str]:
        return await self._ask("deliver", lambda: (weights.shipment, tuple(members), tuple(awaited)))

    async def memory(self) -> dict[str, float]:
        return await self._ranks[0].do.remote("memory")

    async def _ask(self, verb: str, arguments: Callable[[], tuple[Any, ...]]) -> Any:
        from ray.exceptions import RayError

        for losses in range(MOST_LOSSES + 1):
            given = arguments()
            what = getattr(given[0], "__name__", verb) if verb == "call" else verb
            try:
                async with self._turn:
                    with waiting("the run", f"{what} on the ranks of the learner"):
                        return self._taken(await self._answers(verb, given))
            except RayError as error:
                await self._come_back(what, error, last=losses == MOST_LOSSES)
        raise AssertionError("the last loss ends the run")

    async def _answers(self, verb: str, arguments: Sequence[Any]) -> list[Answer]:
        import ray

        shared = arguments
        if len(self._ranks) > 1:  # large ones travel once
            shared = [ray.put(argument) for argument in arguments]
        return list(await asyncio.gather(*(rank.do.remote(verb, *shared) for rank in self._ranks)))

    def _taken(self, answers: Sequence[Answer]) -> Any:
        for kind, fields in answers[0].events:
            self._tell(kind, **fields)
        self._state = answers[0].state
        failed = next((answer for answer in answers if answer.error is not None), answers[0])
        return failed.result()

    async def _come_back(self, what: str, error: Exception, *, last: bool) -> None:
        version = self._state.get("version")
        if last or self._coming_back or self.bring_back is None or version is None:
            raise LearnerLost(
                f"the learner is lost, during {what}: {described(error)}. What was recorded is kept: "
                "`nearpolicy train --resume` goes on from there"
            ) from error
        self._say(
            f"a rank of the learner died during {what}: {described(error, 120)}. It begins again at step {version}"
        )
        self._shipped, self._coming_back = (), True
        try:
            await self.start()
            await self.bring_back(version)
        finally:
            self._coming_back = False
