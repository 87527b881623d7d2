"""The ranks of a learner as one place: every verb goes to all of them, and the first one's answer counts.

A rank that dies takes the others with it, which would wait for it. The learner then begins on fresh ranks, is brought
back to where it was by whoever has the record (a checkpoint, and the recorded batches after it), and is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from nearpolicy.errors import ConfigError, NearpolicyError, StandstillError, described
from nearpolicy.launch.ray.calls import Answer
from nearpolicy.records import Batch, Row, StepReport
from nearpolicy.roles import Weights
from nearpolicy.waits import waiting

MOST_LOSSES = 3
"""Times that ranks may die over one question before the run ends."""


APART_S = 5.0
"""For the answers of the other ranks, once one says that they have come apart."""


class Apart(NearpolicyError):
    """Ranks wait for one that does not come."""


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
            except (RayError, Apart) as error:
                await self._come_back(what, error, losses)
        raise AssertionError("the last loss ends the run")

    async def _answers(self, verb: str, arguments: Sequence[Any]) -> list[Answer]:
        import ray

        shared = arguments
        if len(self._ranks) > 1:  # large ones travel once
            shared = [ray.put(argument) for argument in arguments]
        asked = [asyncio.ensure_future(_answer(rank.do.remote(verb, *shared))) for rank in self._ranks]
        try:
            return await self._together(asked)
        finally:
            for each in asked:
                each.cancel()

    async def _together(self, asked: Sequence[asyncio.Future[Answer]]) -> list[Answer]:
        """All answers; none is waited for long once a rank says that they have come apart."""
        left, limit = set(asked), None
        while left:
            done, left = await asyncio.wait(left, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for each in done:  # the first loss is told at once
                if isinstance(each.result().error, StandstillError):
                    limit = APART_S
        answers = [each.result() for each in asked if each.done()]
        if limit is not None:
            raise Apart(str(next(a.error for a in answers if isinstance(a.error, StandstillError))))
        return answers

    def _taken(self, answers: Sequence[Answer]) -> Any:
        for kind, fields in answers[0].events:
            self._tell(kind, **fields)
        self._state = answers[0].state
        failed = next((answer for answer in answers if answer.error is not None), answers[0])
        return failed.result()

    async def _come_back(self, what: str, error: Exception, losses: int) -> None:
        """Fresh ranks, where the lost ones were; one that is lost meanwhile counts as another loss."""
        version, why = self._state.get("version"), described(error, 120)
        if self._coming_back or version is None or self.bring_back is None or losses == MOST_LOSSES:
            raise LearnerLost(
                f"the learner is lost, during {what}: {described(error)}. What was recorded is kept: "
                "`nearpolicy train --resume` goes on from there"
            ) from error
        self._say(
            f"a rank of the learner died during {what}: {why}. It begins again, from the record of {version} steps"
        )
        self._shipped, self._coming_back = (), True
        try:
            await self.start()
            await self.bring_back(version)
        except (LearnerLost, ConfigError) as again:
            self._state = {"version": version}
            self._coming_back = False
            await self._come_back(what, again, losses + 1)
        finally:
            self._coming_back = False


async def _answer(reference: Any) -> Answer:
    return await reference
