"""The ranks of a learner as one place: every verb goes to all of them, and the first one's answer counts.

A rank that dies takes the others with it, which would wait for it. The learner then begins on fresh ranks, is brought
back to where it was by whoever has the record (a checkpoint, and the recorded batches after it), and is asked again.
Until it is there, whoever else has a question waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nearpolicy.errors import ConfigError, NearpolicyError, RunFolderError, StandstillError, SyncError
from nearpolicy.launch.ray.calls import Answer, why_lost
from nearpolicy.launch.ray.parcels import sent
from nearpolicy.launch.ray.used import rows_told
from nearpolicy.records import Batch, Row, StepReport
from nearpolicy.roles import Weights
from nearpolicy.waits import waiting

MOST_LOSSES = 3
"""Times that ranks may die over one question before the run ends."""
PAUSE_S = 1.5
"""Times the losses: before ranks are begun once more that have been lost as they began."""
APART_S = 5.0
"""For the answers of the other ranks, once one says that they have come apart."""


class Apart(Exception):
    """Ranks wait for one that does not come, or one gives no answer. Whoever brings a learner back lets it pass."""


class LearnerLost(NearpolicyError):
    """Ranks of the learner have died, and there is no way back in this process; `nearpolicy train --resume` has one."""


Join = Callable[[Sequence[Any]], Any]
"""The answer, of the answers of all ranks."""


def first_of(answers: Sequence[Any]) -> Any:
    return answers[0]


class LearnerRanks:
    """Implements `nearpolicy.launch.places.LearnerPlace`."""

    def __init__(
        self,
        spawn: Callable[[], Awaitable[Sequence[Any]]],
        tell: Callable[..., None],
        say: Callable[[str], None],
        *,
        rank_timeout_s: float,
        pause_s: float = PAUSE_S,
    ) -> None:
        """``spawn``: fresh ranks, the first one first, with the initial weights; those before are killed.
        ``rank_timeout_s``: what ranks wait for one another, and the longest that one takes to answer."""
        self._rank_timeout_s, self._pause_s = rank_timeout_s, pause_s
        self._spawn = spawn
        self._tell = tell
        self._say = say
        self._ranks: Sequence[Any] = ()
        self._state: dict[str, Any] = {}
        self._shipped: tuple[Row, ...] = ()
        """Rows of the coming batch that the ranks have."""
        self._turn = asyncio.Lock()
        """All ranks get their calls in one order, and nobody asks for anything else until lost ones are back."""
        self._has_turn: asyncio.Task[Any] | None = None
        self._lost_at: int | None = None
        """The version that ranks have to be brought back to."""
        self._are_lost = False
        self.bring_back: Callable[[int], Awaitable[None]] | None = None
        """From the initial weights to those of a version, by calls from the task that it is awaited in."""

    async def start(self) -> None:
        self._ranks = await self._spawn()
        self._taken(await self._answers("state", ()))

    @property
    def is_there(self) -> bool:
        return bool(self._state) and not self._are_lost

    @property
    def version(self) -> int:
        if self._lost_at is not None and self._has_turn is not asyncio.current_task():
            return self._lost_at  # for all but those who bring it back
        return self._state["version"]

    @property
    def can_learn_ahead(self) -> bool:
        return self._state["can_learn_ahead"]

    async def learn_ahead(self, rows: Sequence[Row]) -> None:
        await self._ask("learn_ahead", lambda: (sent(self._not_shipped(rows)),))
        self._shipped = tuple(rows)

    async def step(self, batch: Batch) -> StepReport:
        new = partial(replace, batch)
        report, used, parcel = await self._ask("step", lambda: (sent(new(rows=self._not_shipped(batch.rows))),))
        self._shipped = ()
        return replace(report, rows=rows_told(used, parcel, batch.rows))

    def _not_shipped(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        done = len(self._shipped)
        if len(rows) < done or any(a is not b for a, b in zip(self._shipped, rows, strict=False)):
            raise ValueError(f"a step that began with {done} rows goes on with other ones")
        return tuple(rows[done:])

    async def weights(self, record_parent: int | None) -> Weights:
        from nearpolicy.launch.ray.object_store import of_all_ranks

        return await self._ask("weights", lambda: (record_parent,), join=of_all_ranks)

    async def begin_anew(self) -> None:
        await self._ask("begin_anew", self._forgotten)

    def _forgotten(self) -> tuple[()]:
        self._state, self._shipped = {}, ()
        return ()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._ask("call", lambda: (function, sent(arguments)))

    async def deliver(self, weights: Weights, members: Sequence[str], awaited: Sequence[str]) -> Sequence[str]:
        """`SyncError` where a step has had its turn since the version was made: its tensors are the learner's own."""
        version = weights.record.version

        def of_now() -> tuple[Any, ...]:
            if self._state["version"] != version:
                gone_on = f"the learner has gone on to {self._state['version']}"
                raise SyncError(f"version {version} cannot be handed over any more, {gone_on}")
            return weights.shipment, tuple(members), tuple(awaited)

        return await self._ask("deliver", of_now)

    async def memory(self) -> dict[str, float]:
        from nearpolicy.launch import build

        return await self.call(build.learner_memory)

    async def _ask(self, verb: str, arguments: Callable[[], tuple[Any, ...]], join: Join = first_of) -> Any:
        if self._has_turn is asyncio.current_task():  # a part of coming back
            return self._taken(await self._answers(verb, arguments()), join)
        async with self._turn:
            self._has_turn = asyncio.current_task()
            try:
                return await self._until_answered(verb, arguments, join)
            finally:
                self._has_turn = None

    async def _until_answered(self, verb: str, arguments: Callable[[], tuple[Any, ...]], join: Join) -> Any:
        from ray.exceptions import RayError, RayTaskError

        losses = 0
        while True:
            try:
                if self._are_lost:
                    await self._come_back()
                answers = await self._answers(verb, arguments())
            except RayTaskError:  # something is wrong with the call, and nobody has died of it
                raise
            except (RayError, Apart, ConfigError, StandstillError) as error:  # the last two: of fresh ranks
                losses += 1
                self._lost(verb, error, losses)
                if losses > 1:  # Ray may not know yet that their node is gone
                    with waiting("the run", "another try to begin ranks of the learner"):
                        await asyncio.sleep(self._pause_s * losses)
            else:
                return self._taken(answers, join)

    async def _answers(self, verb: str, arguments: Sequence[Any]) -> list[Answer]:
        import ray

        what = getattr(arguments[0], "__name__", verb) if verb == "call" else verb
        shared = arguments
        if len(self._ranks) > 1:  # large ones travel once
            shared = [ray.put(argument) for argument in arguments]
        with waiting("the run", f"{what} on the ranks of the learner"):
            asked = [asyncio.ensure_future(_answer(rank.do.remote(verb, *shared))) for rank in self._ranks]
            limit_s = self._rank_timeout_s * (1 if len(asked) == 1 else 2)  # among themselves they find out earlier
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await self._together(asked)
            except TimeoutError:
                if not limit.expired():  # it is what the rank has to say
                    raise
                raise Apart(f"no answer to {what} within {limit_s:g} s (runtime.rank_timeout_s)") from None
            finally:
                for each in asked:
                    each.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

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

    def _taken(self, answers: Sequence[Answer], join: Join = first_of) -> Any:
        for kind, fields in answers[0].events:
            self._tell(kind, **fields)
        self._state = answers[0].state
        for answer in answers:
            if answer.error is not None:
                return answer.result()
        return join([answer.value for answer in answers])

    def _lost(self, verb: str, error: Exception, losses: int) -> None:
        if not self._are_lost:  # not while it comes back, when it may be anywhere
            self._lost_at = self._state.get("version")  # None: it was beginning anew, which fresh ranks have done
        self._are_lost, self._shipped = True, ()
        if self.bring_back is None or losses > MOST_LOSSES:
            raise LearnerLost(
                f"the learner is lost, during {verb}: {why_lost(error, 300)}. What was recorded is kept: "
                "`nearpolicy train --resume` goes on from there"
            ) from error
        begins = "the initial weights" if self._lost_at is None else f"the record of {self._lost_at} steps"
        self._say(f"a rank of the learner died during {verb}: {why_lost(error)}. It begins again, from {begins}")

    async def _come_back(self) -> None:
        """Fresh ranks, where the lost ones were."""
        await self.start()
        if self._lost_at is not None:
            try:
                await self.bring_back(self._lost_at)
            except RunFolderError as error:  # other bits than those recorded: a resume makes another lineage of them
                raise LearnerLost(f"the learner is lost, and cannot come back here: {error}") from error
        self._are_lost, self._lost_at, self._shipped = False, None, ()


async def _answer(reference: Any) -> Answer:
    return await reference
