"""A session in an actor of the cluster, and what stands for it in the process that was started.

    driver: SessionInActor  -- run -->   actor: ControllerHost, a thread with the session
                            <-- news --  lines, steps, how far it is, as they appear
                            -- stop -->

The actor's children, generators and ranks and so on, die with it. Whether any is left is asked before the loss is told,
so that whoever begins another session finds the cluster, and the folder, as a dead process leaves them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError, ControllerLost, RunFolderError
from nearpolicy.launch.ray.calls import Answer, Place, answered, deaths_as, here, require_same_versions
from nearpolicy.launch.ray.cluster import Cluster, require_nothing_left
from nearpolicy.launch.session import Session, run_session
from nearpolicy.placement import OF_CONTROLLER, Rooms
from nearpolicy.store.folder import RunFolder
from nearpolicy.waits import waiting

NEWS_WITHIN_S = 0.5
"""How late it is told that a run has begun, of which no line speaks."""
LEAVES_S = 15.0
"""What a session gets to close everything when the driver is leaving: less than the driver itself has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Of a session since it was asked last."""

    told: Sequence[str | tuple[int, Mapping[str, float]]]
    """Lines, and steps with their metrics, in their order."""
    folder: Path | None
    begun: bool
    is_over: bool
    """There will be no more."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A session that was stopped before it had begun; an answer, since the exception would end the actor."""

    message: str


class ControllerHost:
    """What is inside the actor."""

    def __init__(
        self, config: RunConfig, folder: Path | None, resumes: bool, functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._session = Session(
            config=config,
            folder=None if folder is None else RunFolder(folder),
            resumes=resumes,
            functions=dict(functions),
            say=self._tell,
            on_step=lambda step, metrics: self._tell((step, dict(metrics))),
        )
        self._told: list[str | tuple[int, Mapping[str, float]]] = []
        self._is_over = False
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def find_folders(self, started_in: str) -> Answer:
        """Whether this node has what the run needs of the driver's."""
        return answered(self._require_folders, started_in)

    def _require_folders(self, started_in: str) -> Place:
        place, folder = here(), self._session.folder
        shared = "With runtime.controller=actor it must be reachable by the same path from every node, or use a driver"
        if os.getcwd() != started_in:
            raise ConfigError(
                f"{started_in}, where the run was started, is not there on {place.node}, the node of the controller. "
                f"{shared}"
            )
        if folder is not None and self._session.resumes and not folder.store.exists():
            raise RunFolderError(
                f"the run folder {folder.path} is not there on {place.node}, the node of the controller. {shared}; "
                f"`nearpolicy train --resume {folder.path}` goes on with the run where it is"
            )
        return place

    def run(self) -> Answer:
        try:
            return answered(run_session, self._session)
        except (KeyboardInterrupt, asyncio.CancelledError) as ended:
            return Answer(value=Interrupted(str(ended)))
        finally:
            with self._lock:
                self._is_over = True
            self._wake()

    def _tell(self, what: str | tuple[int, Mapping[str, float]]) -> None:
        with self._lock:
            self._told.append(what)
        self._wake()

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._news.set)

    async def news(self) -> News:
        """As soon as there are any, and every `NEWS_WITHIN_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWS_WITHIN_S):
                await self._news.wait()
        self._news.clear()
        session = self._session
        with self._lock:
            told, self._told = self._told, []
            is_over = self._is_over
        folder = None if session.folder is None else session.folder.path
        return News(told=told, folder=folder, begun=session.begun, is_over=is_over)

    async def stop(self) -> None:
        self._session.stop()

    async def close(self) -> None:
        """The thread is waited for behind this."""
        self._session.leave()


class SessionInActor(Session):
    """A session whose `train` happens in an actor. What a person sees of it is the same."""

    _driving: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
    """What `stop` wakes."""

    def stop(self) -> None:
        super().stop()
        if self._driving is not None:
            loop, stopped = self._driving
            loop.call_soon_threadsafe(stopped.set)

    async def train(self) -> dict[str, Any]:
        runtime = self.config.runtime
        async with AsyncExitStack() as closing:
            cluster = await Cluster.connect(runtime, self._needed())
            closing.push_async_callback(cluster.close)
            actor = cluster.controller()
            try:
                place: Place = await self._begun(actor.here.remote(), "to begin")
            except ConfigError:
                cluster.kill(actor)  # nobody there could be asked to rest
                raise
            require_same_versions([place])
            folder = None if self.folder is None else self.folder.path
            host = ControllerHost, self.config, folder, self.resumes, self.functions
            await self._begun(actor.become.remote(os.getcwd(), *host), "to set up")
            await self._begun(actor.do.remote("find_folders", os.getcwd()), "to find its folders")
            try:
                answer = await self._driven(actor)
            except ControllerLost:
                cluster.kill(actor)  # if only its node was lost from sight
                await require_nothing_left(place.actor_id, runtime.start_timeout_s)
                raise
            found = answer.result()
        if isinstance(found, Interrupted):
            raise KeyboardInterrupt(found.message)
        return found

    def _needed(self) -> dict[str, float]:
        """Of all roles together."""
        config = self.config
        rooms = Rooms.of_roles(
            config.runtime,
            ranks=config.learner.ranks,
            replicas=config.generator.replicas,
            most_replicas=config.generator.most,
        )
        return {name: rooms.total.get(name, 0.0) + OF_CONTROLLER.get(name, 0.0) for name in {*rooms.total, "CPU"}}

    async def _begun(self, answer: Awaitable[Any], what: str) -> Any:
        """A step of the start; `ConfigError` if it takes too long."""
        limit = self.config.runtime.start_timeout_s
        try:
            with waiting("the run", f"the actor of the controller {what}"):
                async with asyncio.timeout(limit):
                    found = await _of_actor(answer)
        except TimeoutError:
            raise ConfigError(
                f"the actor of the controller {what}: not within {limit:g} s (runtime.start_timeout_s); it needs one "
                "free CPU"
            ) from None
        return found.result() if isinstance(found, Answer) else found

    async def _driven(self, actor: Any) -> Answer:
        """From the beginning of the session to its end."""
        stopped = asyncio.Event()
        self._driving = asyncio.get_running_loop(), stopped
        if self.stop_requested:  # before there was anybody to tell
            stopped.set()
        running = asyncio.ensure_future(_of_actor(actor.do.remote("run")))
        stopping = asyncio.ensure_future(self._pass_on(stopped, actor))
        try:
            is_over = False
            while not is_over:
                is_over = self._take(await _of_actor(actor.do.remote("news")))
            return await running
        except asyncio.CancelledError:  # the driver is leaving
            await self._left(actor, running)
            raise
        finally:
            self._driving = None
            for each in (running, stopping):
                each.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)

    def _take(self, news: News) -> bool:
        """Whether these are the last ones."""
        if news.folder is not None:
            self.folder = RunFolder(news.folder)
        self.begun = news.begun
        for each in news.told:
            if isinstance(each, str):
                self.say(each)
            elif self.on_step is not None:
                self.on_step(*each)
        return news.is_over

    async def _pass_on(self, stopped: asyncio.Event, actor: Any) -> None:
        await stopped.wait()
        await _of_actor(actor.do.remote("stop"))

    async def _left(self, actor: Any, running: asyncio.Future[Answer]) -> None:
        """Let the session close what it has opened."""
        closing = asyncio.ensure_future(_of_actor(actor.do.remote("close")))
        await asyncio.wait([running, closing], timeout=LEAVES_S)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        if running.done() and running.exception() is None and isinstance(running.result().value, dict):
            self.say("the run had begun in the meantime: it has ended after its step, and is kept")


async def _of_actor(answer: Awaitable[Any]) -> Any:
    """`ControllerLost` where Ray says that the actor is no more."""
    with deaths_as(lambda why: ControllerLost(f"the controller is lost: {why}"), 200):
        return await answer
