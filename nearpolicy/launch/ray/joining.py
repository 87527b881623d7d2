"""Generators that come while the run goes on: in the place of one that was lost, or where there is room for one more.

    begin an actor -> has it what the run needs? -> it joins the fleet -> it is shown the present weights -> it samples

It is tried until there is one, with pauses that grow; nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from nearpolicy.errors import described
from nearpolicy.waits import waiting

if TYPE_CHECKING:
    from nearpolicy.generator.fleet import Fleet
    from nearpolicy.roles import Member
    from nearpolicy.sync.publisher import Publisher

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two tries."""


def name_of(place: int) -> str:
    return f"generator {place}"


class Joining:
    """Of one run; its tasks end with `close`."""

    def __init__(
        self,
        fleet: Fleet,
        publisher: Publisher,
        *,
        begin: Callable[[int], Awaitable[Member]],
        end: Callable[[int], None],
        say: Callable[[str], None],
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """``begin``: a generator for a place, which is fit to join, or an exception that says why there is none.
        ``end``: whatever is in a place."""
        self._fleet = fleet
        self._publisher = publisher
        self._begin = begin
        self._end = end
        self._say = say
        self._first_pause_s = first_pause_s
        self._tasks: set[asyncio.Task[None]] = set()

    def replace(self, place: int, reason: str) -> None:
        """Another one in the place of a generator that was lost."""
        self._keep(self._replaced(place, reason))

    def add(self, place: int, room: Coroutine[Any, Any, None]) -> None:
        """One more, once there is ``room`` for it."""
        self._keep(self._added(place, room))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._kept)

    def _kept(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"a generator less: no other one could be started, {described(error)}")

    async def _replaced(self, place: int, reason: str) -> None:
        name = name_of(place)
        self._say(f"{name} was lost: {reason}. Its sequences go on elsewhere; another one is started")
        await self._publisher.remove(name)
        self._end(place)
        await self._join(place)

    async def _added(self, place: int, room: Coroutine[Any, Any, None]) -> None:
        with waiting(name_of(place), "room in the cluster (generator.most_replicas)"):
            await room
        await self._join(place)

    async def _join(self, place: int) -> None:
        """It samples once it has shown the present weights: now, if they are still to be had, or with the next
        publication."""
        name, pause_s = name_of(place), self._first_pause_s
        while True:
            try:
                link = self._fleet.join(await self._begin(place))
                break
            except Exception as error:
                self._end(place)
                self._say(f"{name} cannot be started, and is tried again in {pause_s:g} s: {described(error, 200)}")
            with waiting(name, "the next try to start it"):
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await self._fleet.as_still_as_others(link)
        await self._publisher.add(name, link)
