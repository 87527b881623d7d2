"""Verifiers in actors of their own, as one verifier: rollouts go out in bunches, verdicts come back in bunches.

A rollout goes to the actor with the fewest under way. What an actor was judging when it died is judged again by another
one, a bounded number of times; then it is a failed verdict, as any verdict that cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearpolicy.errors import described
from nearpolicy.records import Prompt, Rollout, Verdict
from nearpolicy.verifier.sandbox.ladder import Opened

MOST_LOSSES = 2
"""Times that a rollout is judged anew because its actor died."""


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
    outbox: list[int] = field(default_factory=list)
    flips: dict[str, float] = field(default_factory=dict)
    judged: int = 0


class VerifierPools:
    """Implements `nearpolicy.launch.runtime.RunVerifier`."""

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Any]],
        count: int,
        sources: Callable[[str], Sequence[str]],
        tell: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        """``spawn``: a started actor for a place. ``sources``: of a task, what verdicts are asked for."""
        self._spawn = spawn
        self._count = count
        self._sources = sources
        self._tell = tell
        self._say = say
        self._pools: dict[int, _Pool] = {}
        self._tickets = itertools.count()
        self._collectors: list[asyncio.Task[None]] = []
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
        actors = await asyncio.gather(*map(self._spawn, range(self._count)))
        self._isolation = await actors[0].do.remote("isolation")
        for place, actor in enumerate(actors):
            self._open(place, actor)

    def _open(self, place: int, actor: Any) -> None:
        self._pools[place] = _Pool(actor)
        self._collectors.append(asyncio.create_task(self._collect(place), name=f"verdicts of pool {place}"))

    async def close(self) -> None:
        for task in self._collectors:
            task.cancel()
        await asyncio.gather(*self._collectors, return_exceptions=True)
        for pool in self._pools.values():
            with contextlib.suppress(Exception):
                await pool.actor.do.remote("close")
        self._pools.clear()

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        if self._error is not None:
            raise self._error
        case = _Case(prompt, rollout, admission, asyncio.get_running_loop().create_future())
        ticket = next(self._tickets)
        self._send(ticket, case)
        try:
            return await case.verdicts
        finally:
            for pool in self._pools.values():
                pool.cases.pop(ticket, None)

    def _send(self, ticket: int, case: _Case) -> None:
        if not self._pools:
            case.verdicts.set_result(self._failed(case, "no verifier is left"))
            return
        pool = min(self._pools.values(), key=lambda pool: len(pool.cases))
        pool.cases[ticket] = case
        pool.outbox.append(ticket)
        if self._unsent is None:  # what comes in this turn of the loop goes out together
            self._unsent = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._unsent = None
        for pool in self._pools.values():
            tickets, pool.outbox = pool.outbox, []
            cases = [(ticket, pool.cases[ticket]) for ticket in tickets if ticket in pool.cases]
            if cases:
                sent = [(ticket, case.prompt, case.rollout, case.admission) for ticket, case in cases]
                pool.actor.do.remote("score_many", sent)

    async def _collect(self, place: int) -> None:
        from ray.exceptions import RayError

        pool = self._pools[place]
        while True:
            try:
                told = await pool.actor.do.remote("collect")
            except RayError as error:
                await self._lost(place, error)
                return
            pool.flips = told.flips
            for kind, fields in told.events:
                self._tell("verifier", kind, instance=place, **fields)
            for ticket, verdicts, error in told.judged:
                case = pool.cases.pop(ticket, None)
                pool.judged += 1
                if case is None or case.verdicts.done():
                    continue
                if error is None:
                    case.verdicts.set_result(verdicts)
                else:  # it ends the run, whoever hears of it
                    self._error = error
                    case.verdicts.set_exception(error)

    async def _lost(self, place: int, error: Exception) -> None:
        """Judge anew what it had, here or in the actor that takes its place."""
        pool = self._pools.pop(place)
        self._say(f"verifier {place} died: {described(error, 120)}; what it was judging is judged again")
        waiting = dict(pool.cases)
        replacement = asyncio.create_task(self._replace(place))
        if not self._pools:
            await replacement
        for ticket, case in waiting.items():
            case.losses += 1
            if case.verdicts.done():
                continue
            if case.losses > MOST_LOSSES:
                case.verdicts.set_result(self._failed(case, f"its verifier died {case.losses} times"))
            else:
                self._send(ticket, case)
        await replacement

    async def _replace(self, place: int) -> None:
        try:
            actor = await self._spawn(place)
        except Exception as error:
            self._say(f"verifier {place} cannot be started again: {described(error, 120)}")
            return
        self._open(place, actor)

    def _failed(self, case: _Case, reason: str) -> dict[str, Verdict]:
        return {source: Verdict.failed(reason) for source in self._sources(case.prompt.task)}
