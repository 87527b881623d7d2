"""Verifiers in actors of their own, as one verifier: rollouts go out in bunches, verdicts come back in bunches.

A rollout goes to the actor with the fewest under way. What an actor was judging when it died is judged again, a bounded
number of times; then it is a failed verdict, as any that cannot be had. How many actors there are follows the work, in
two limits: arrivals per second times seconds of judging each is how many rollouts are being judged at a time (Little's
law), and an actor judges as many as it has workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nearpolicy.errors import VerifierError, described
from nearpolicy.launch.ray.calls import why_lost
from nearpolicy.launch.ray.parcels import losses_told, sent
from nearpolicy.records import Prompt, Rollout, Verdict
from nearpolicy.verifier.sandbox.ladder import Opened
from nearpolicy.waits import waiting

MOST_LOSSES = 2
"""Times that a rollout is judged anew because its actor died."""
MOST_STARTS = 3
"""Times that an actor is started at once in the place of one that died; if none is left by then, the run ends."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between further tries, while other actors judge."""
SIZED_EVERY_S, BUSY, PATIENCE = 5.0, 0.7, 6
"""How often the number of actors is looked at; the share of their workers that should be busy; how many looks in a row
must find fewer enough before one is given up."""


@dataclass(eq=False)
class _Case:
    prompt: Prompt
    rollout: Rollout
    admission: int | None
    verdicts: asyncio.Future[Mapping[str, Verdict]]
    losses: int = 0


@dataclass(eq=False)
class _Pool:
    """One actor, and what it judges."""

    actor: Any
    cases: dict[int, _Case] = field(default_factory=dict)
    """By ticket."""
    outbox: list[int] = field(default_factory=list)
    flips: dict[str, float] = field(default_factory=dict)
    judged: int = 0
    collector: asyncio.Task[None] | None = None


class Demand:
    """How many actors the work of late asks for."""

    def __init__(self, least: int, most: int, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.least, self.most = least, most
        self._workers = workers
        self._clock = clock
        self._since = clock()
        self._arrived = 0
        self._judged = 0
        self._seconds = 0.0
        self._fewer = 0

    def arrived(self) -> None:
        self._arrived += 1

    def judged(self, seconds: float) -> None:
        """One rollout, without the time it waited for a worker."""
        self._judged += 1
        self._seconds += seconds

    def wanted(self, now: int) -> int:
        """Of how many, while there are ``now``; starts the next stretch of time. More at once, fewer with patience."""
        elapsed, self._since = self._clock() - self._since, self._clock()
        service = self._seconds / self._judged if self._judged else 0.0
        together = self._arrived / elapsed * service if elapsed > 0 else 0.0
        self._arrived = self._judged = 0
        self._seconds = 0.0
        enough = min(self.most, max(self.least, math.ceil(together / (self._workers * BUSY))))
        self._fewer = self._fewer + 1 if enough < now else 0
        if enough >= now:
            return enough
        if self._fewer < PATIENCE:
            return now
        self._fewer = 0
        return now - 1


class VerifierPools:
    """Implements `nearpolicy.launch.runtime.RunVerifier`."""

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Any]],
        demand: Demand,
        sources: Callable[[str], Sequence[str]],
        tell: Callable[..., None],
        say: Callable[[str], None],
        silence_s: float,
        reads_tokens: Callable[[str], bool] = lambda task: True,
    ) -> None:
        """``spawn``: a started actor for a place, whose caller ends it. ``sources``: of a task, what verdicts are asked
        for. ``silence_s``: an actor that answers nothing for so long is lost. ``reads_tokens``: whether the task is
        judged by anything but the text."""
        self._reads_tokens = reads_tokens
        self._spawn = spawn
        self._demand = demand
        self._sources = sources
        self._tell = tell
        self._say = say
        self._silence_s = silence_s
        self._pools: dict[int, _Pool] = {}
        """By place."""
        self._leaving: dict[int, _Pool] = {}
        """Those that get nothing more, until they have judged what they have."""
        self._homeless: dict[int, _Case] = {}
        """While no actor is there."""
        self._tickets = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[int] = set()
        """Places of actors that are not there yet."""
        self._hopeless: set[int] = set()
        """Those of them where none could be started several times in a row."""
        self._unsent: asyncio.Handle | None = None
        self._error: Exception | None = None
        self._isolation: Opened | None = None

    @property
    def isolation(self) -> Opened | None:
        return self._isolation

    def flip_rates(self) -> dict[str, float]:
        """Over all actors, by the number of rollouts that each has judged."""
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        for pool in self._pools.values():
            for name, rate in pool.flips.items():
                sums[name] = sums.get(name, 0.0) + rate * pool.judged
                weights[name] = weights.get(name, 0.0) + pool.judged
        return {name: total / weights[name] for name, total in sums.items() if weights[name]}

    async def start(self) -> None:
        places = range(self._demand.least)
        actors = await asyncio.gather(*map(self._spawn, places))
        self._isolation = await actors[0].do.remote("isolation")
        for place, actor in zip(places, actors, strict=True):
            self._open(place, actor)
        if self._demand.most > self._demand.least:
            self._keep(self._follow_demand(), "number of verifiers")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pools.clear()

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        if self._error is not None:
            raise self._error
        case = _Case(prompt, rollout, admission, asyncio.get_running_loop().create_future())
        ticket = next(self._tickets)
        self._demand.arrived()
        self._send(ticket, case)
        try:
            return await case.verdicts
        finally:
            self._homeless.pop(ticket, None)
            for pool in [*self._pools.values(), *self._leaving.values()]:
                pool.cases.pop(ticket, None)

    def _keep(self, work: Any, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._kept)
        return task

    def _kept(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _open(self, place: int, actor: Any) -> None:
        pool = self._pools[place] = _Pool(actor)
        pool.collector = self._keep(self._collect(place, pool), f"verdicts of verifier {place}")
        homeless, self._homeless = self._homeless, {}
        for ticket, case in homeless.items():
            self._send(ticket, case)

    def _send(self, ticket: int, case: _Case) -> None:
        if not self._pools:
            self._homeless[ticket] = case
            return
        pool = min(self._pools.values(), key=lambda pool: len(pool.cases))
        pool.cases[ticket] = case
        pool.outbox.append(ticket)
        if self._unsent is None:  # what comes in this turn of the loop goes out together
            self._unsent = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._unsent = None
        for pool in [*self._pools.values(), *self._leaving.values()]:
            tickets, pool.outbox = pool.outbox, []
            cases = [(ticket, pool.cases[ticket]) for ticket in tickets if ticket in pool.cases]
            if cases:
                told = [(ticket, case.prompt, self._to_judge(case), case.admission) for ticket, case in cases]
                self._keep(self._hand_over(pool, told), "rollouts to a verifier")

    def _to_judge(self, case: _Case) -> Rollout:
        return case.rollout if self._reads_tokens(case.prompt.task) else replace(case.rollout, segments=())

    async def _hand_over(self, pool: _Pool, cases: Sequence[Any]) -> None:
        from ray.exceptions import RayError, RayTaskError

        try:
            with losses_told():
                await pool.actor.do.remote("score_many", sent(cases))
        except RayTaskError:
            raise
        except RayError:
            pass  # it has died, which whoever collects from it hears too

    async def _collect(self, place: int, pool: _Pool) -> None:
        from ray.exceptions import RayError

        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    told = await pool.actor.do.remote("collect")
            except (RayError, TimeoutError) as error:
                self._lost(place, pool, error)
                return
            pool.flips = told.flips
            for kind, fields in told.events:
                if kind == "verify":
                    self._demand.judged(fields["seconds"] - fields["queue_s"])
                self._tell("verifier", kind, instance=place, **fields)
            for ticket, verdicts, error in told.judged:
                self._judged(pool, ticket, verdicts, error)

    def _judged(
        self, pool: _Pool, ticket: int, verdicts: Mapping[str, Verdict] | None, error: Exception | None
    ) -> None:
        case = pool.cases.pop(ticket, None)
        pool.judged += 1
        if case is None or case.verdicts.done():
            return
        if error is None:
            case.verdicts.set_result(verdicts)
        else:  # it ends the run, whoever hears of it
            self._error = error
            case.verdicts.set_exception(error)

    def _lost(self, place: int, pool: _Pool, error: Exception) -> None:
        """What it had is judged again, by another one or by the one that takes its place."""
        why = f"no answer within {self._silence_s:g} s" if isinstance(error, TimeoutError) else why_lost(error)
        self._say(f"verifier {place} died: {why}; what it was judging is judged again")
        if self._pools.get(place) is pool:  # else it was to go
            del self._pools[place]
            self._keep(self._begin(place), f"verifier {place} again")
        cases, pool.cases = pool.cases, {}
        for ticket, case in cases.items():
            case.losses += 1
            if case.verdicts.done():
                continue
            if case.losses > MOST_LOSSES:
                reason = f"its verifier died {case.losses} times"
                case.verdicts.set_result({s: Verdict.failed(reason) for s in self._sources(case.prompt.task)})
            else:
                self._send(ticket, case)

    async def _begin(self, place: int) -> None:
        """An actor for this place, tried until there is one."""
        self._starting.add(place)
        tries, pause_s = 0, FIRST_PAUSE_S
        try:
            while True:
                try:
                    with waiting("verdicts", f"verifier {place} to start"):
                        actor = await self._spawn(place)
                    self._open(place, actor)
                    return
                except Exception as error:
                    tries += 1
                    self._say(f"verifier {place} cannot be started: {described(error, 200)}")
                    if tries >= MOST_STARTS:
                        self._hopeless.add(place)
                        if not self._pools and self._starting <= self._hopeless:
                            raise VerifierError(
                                f"no verifier is left, and none can be started: {described(error)}"
                            ) from error
                if place in self._hopeless:
                    with waiting(f"verifier {place}", "the next try to start it"):
                        await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._starting.discard(place)
            self._hopeless.discard(place)

    def _end(self, error: BaseException) -> None:
        """Nobody waits for verdicts any more that may not come."""
        self._error = error
        pools = [*self._pools.values(), *self._leaving.values()]
        for case in [*self._homeless.values(), *(case for pool in pools for case in pool.cases.values())]:
            if not case.verdicts.done():
                case.verdicts.set_exception(error)

    async def _follow_demand(self) -> None:
        while True:
            await asyncio.sleep(SIZED_EVERY_S)
            now = len(self._pools) + len(self._starting)
            wanted = self._demand.wanted(now)
            taken = self._pools.keys() | self._starting | self._leaving.keys()
            free = [place for place in range(self._demand.most) if place not in taken]
            for place in free[: max(0, wanted - now)]:
                self._keep(self._begin(place), f"verifier {place}")
            if wanted < now and len(self._pools) > 1:
                self._keep(self._give_up(max(self._pools)), "a verifier less")

    async def _give_up(self, place: int) -> None:
        """It gets nothing more, and goes when it has judged what it has."""
        pool = self._leaving[place] = self._pools.pop(place)
        try:
            while left := [case.verdicts for case in pool.cases.values() if not case.verdicts.done()]:
                await asyncio.wait(left)
            pool.collector.cancel()
            with contextlib.suppress(Exception):  # one that has died is at rest
                async with asyncio.timeout(self._silence_s):
                    await pool.actor.rest.remote()
        finally:
            del self._leaving[place]
