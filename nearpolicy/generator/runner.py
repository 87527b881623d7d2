"""The embedded engine behind the `Generator` protocol: one long-lived thread, commands in, completions out.

    event loop                                   engine thread
    submit / abort / pause / load  -> commands -> between two forward passes
    async for completion           <- call_soon  <- as each sequence ends

The thread never waits while there is work. When it ends, by `close` or by an exception, everybody who still waits gets
an error that says why, and so does every later call: an `EngineError`, or the `UserError` that the thread met (a full
disk, say, when it told an event). A caller may be cancelled at any moment: a command not
begun by then is not carried out, and what a request still computes is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nearpolicy.errors import EngineError, NearpolicyError, UserError
from nearpolicy.generator.engine import Engine
from nearpolicy.models.attention import PAGE
from nearpolicy.records import BASELINE
from nearpolicy.roles import Capabilities, Completion, Load, Request, Weights

T = TypeVar("T")


@dataclass(eq=False)
class _Command:
    """Something to do in the engine's thread between two forward passes."""

    action: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.action())
        except Exception as error:
            self.done.set_exception(error)


@dataclass(eq=False)
class _Subscriber:
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Completion | NearpolicyError]
    undelivered: int
    """Counted by the engine's thread."""
    admission: int | None
    """What the request is for; None outside training."""
    is_baseline: bool = False

    def put(self, item: Completion | NearpolicyError) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)


class EngineRunner:
    """Implements `Generator`."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_sync: str = "finish",
        sync_timeout_s: float = 120.0,
        threads: int = 1,
        threads_alone: int | None = None,
        numerics: str = "exact",
        on_event: Callable[..., None] | None = None,
    ) -> None:
        """``sync_timeout_s``: with ``on_sync="finish"``, how long a publication waits for running sequences.
        ``threads``: inside one operation while others work (`others_work`); ``threads_alone``: while they do not."""
        self._threads = threads
        self._threads_alone = threads_alone or threads
        self.others_work: Callable[[], bool] = lambda: False
        """Whether other roles need their share of the cores at the moment; asked before every forward pass. With exact
        numerics the bits do not depend on the answer."""
        self._engine = engine
        self._on_sync = on_sync
        self._sync_timeout_s = sync_timeout_s
        self._numerics = numerics
        self._emit = on_event or (lambda *_, **__: None)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._subscribers: dict[str, _Subscriber] = {}
        self._paused = self._asleep = False
        self._unproved = False
        """The last load failed: nothing is sampled until another one succeeds."""
        self._resting = True
        self._unfinished = 0
        """Samples asked for that have not come back."""
        self._busy_s = 0.0
        self._loads: list[tuple[Weights, Future[Mapping[str, str]], float]] = []
        self._ended: NearpolicyError | None = None
        self._ending = threading.Lock()
        """Held to ask whether the thread has ended and to queue a command, so that none is left without an answer."""
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> AsyncIterator[Completion]:
        """Completions as they end. Leaving the iterator early aborts what is left."""
        greedy = request.purpose == "baseline"
        admission = request.admission if greedy or request.purpose == "rollout" else None
        subscriber = _Subscriber(asyncio.get_running_loop(), asyncio.Queue(), request.n, admission, greedy)
        missing = request.n
        try:
            await self._call(lambda: self._submit(request, subscriber))
            while missing:
                item = await subscriber.inbox.get()
                if isinstance(item, NearpolicyError):
                    raise _copy(item) from item.__cause__
                missing -= 1
                yield item
        finally:
            if missing:
                self._commands.put(_Command(lambda: self._leave(request.id, subscriber), Future()))

    async def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        await self._call(lambda: self._abort(ids))

    async def pause(self) -> None:
        await self._call(lambda: self._set_paused(True))

    async def sleep(self) -> None:
        """`pause`, and give the memory of keys and values back; what runs is computed again from its tokens, and goes
        on."""
        await self._call(self._sleep)

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    async def load(self, weights: Weights) -> Mapping[str, str]:
        """Compute under these weights from now on. Cancelled before that began, it leaves the old ones in place; if it
        fails, nothing more is sampled until another load succeeds."""
        done: Future[Mapping[str, str]] = Future()
        try:
            await self._call(lambda: self._loads.append((weights, done, time.monotonic() + self._sync_timeout_s)))
            return await asyncio.wrap_future(done)
        finally:
            done.cancel()  # changes nothing once it has begun

    async def examine(self, look: Callable[[Engine], T]) -> T:
        """What ``look`` finds at the engine between two forward passes, in its thread. It must leave all as it is."""
        return await self._call(lambda: look(self._engine))

    def capabilities(self) -> Capabilities:
        exact = self._numerics == "exact"
        return Capabilities(
            numerics=self._numerics,
            seeded=True,
            batch_invariant=exact,
            resumable=True,
            in_flight_update=True,
            prefix_cache=True,
            adapters=True,
            proof="fingerprint",
        )

    @property
    def is_idle(self) -> bool:
        """Whether the engine's core is free. May be asked from any thread; the answer may be old at once."""
        return self._resting

    def workload(self) -> Load:
        """How busy the engine is. May be asked from any thread; the numbers may be of neighbouring passes."""
        scheduler = self._engine.scheduler
        running = len(scheduler.running)
        return Load(
            slots=scheduler.max_running,
            running=running,
            waiting=max(0, self._unfinished - running),
            kv_tokens=scheduler.budget.num_pages * PAGE,
            sampled=self._engine.sampled,
            busy_s=self._busy_s,
            at=time.monotonic(),
        )

    def close(self) -> None:
        """End the thread after the pass it is in."""
        self._commands.put(None)
        self._thread.join()

    async def _call(self, action: Callable[[], Any]) -> Any:
        command = _Command(action, Future())
        with self._ending:
            if self._ended is not None:
                raise _copy(self._ended) from self._ended.__cause__
            self._commands.put(command)
        return await asyncio.wrap_future(command.done)

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        torch.set_flush_denormal(True)
        try:
            while self._obey():
                self._load_if_due()
                if self._engine.scheduler.has_work and not self._stands:
                    self._take_cores()
                    begin = time.perf_counter()
                    ended = self._engine.step()
                    self._busy_s += time.perf_counter() - begin
                    self._deliver(ended)
            reason = EngineError("the generator is closed")
        except UserError as error:
            reason = error
        except BaseException as error:
            reason = EngineError(f"the engine stopped: {error!r}")
            reason.__cause__ = error
        self._end(reason)

    def _obey(self) -> bool:
        """Carry out what was asked; sleep only when there is nothing to compute. False ends the thread."""
        idle_since = None
        while True:
            wait = (self._stands or not self._engine.scheduler.has_work) and not self._loads
            if wait and self._commands.empty():
                idle_since = idle_since or time.monotonic()
            self._resting = wait
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                break
            if command is None:
                return False
            command.run()
        if idle_since is not None:
            cause = "paused" if self._stands else "no request"
            self._emit("idle", seconds=time.monotonic() - idle_since, cause=cause)
        return True

    def _submit(self, request: Request, subscriber: _Subscriber) -> None:
        if request.id in self._subscribers:
            raise ValueError(f"request {request.id!r} is already running")
        self._subscribers[request.id] = subscriber
        self._unfinished += request.n
        self._deliver(self._engine.submit(request))

    def _abort(self, request_ids: set[str]) -> None:
        self._deliver(self._engine.abort(request_ids))

    def _leave(self, request_id: str, subscriber: _Subscriber) -> None:
        if self._subscribers.get(request_id) is subscriber:  # not another request of the same name
            self._abort({request_id})

    def _take_cores(self) -> None:
        threads = self._threads if self.others_work() else self._threads_alone
        torch.set_num_threads(threads)
        self._engine.threads = threads

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        if self._asleep and not paused:
            self._asleep = False
            self._engine.wake()

    def _sleep(self) -> None:
        self._paused = self._asleep = True
        self._engine.sleep()

    @property
    def _stands(self) -> bool:
        return self._paused or self._unproved

    def _deliver(self, completions: list[Completion]) -> None:
        for completion in completions:
            subscriber = self._subscribers[completion.request]
            ended = {"tokens": len(completion.token_ids), "reason": completion.finish.value}
            sample = BASELINE if subscriber.is_baseline else completion.sample
            self._emit("finish", admission=subscriber.admission, sample=sample, **ended)
            subscriber.undelivered -= 1
            self._unfinished -= 1
            if subscriber.undelivered == 0:
                del self._subscribers[completion.request]
            subscriber.put(completion)

    def _load_if_due(self) -> None:
        scheduler = self._engine.scheduler
        while self._loads and self._loads[0][1].cancelled():
            self._loads.pop(0)
        scheduler.accepts_new = not self._loads
        if not self._loads:
            return
        weights, done, deadline = self._loads[0]
        finish_first = self._on_sync == "finish" and time.monotonic() < deadline
        if finish_first and scheduler.has_started_work and not self._stands:
            return
        if not done.set_running_or_notify_cancel():
            return
        begin = time.perf_counter()
        try:
            shown = self._engine.load(weights, keep_running=self._on_sync == "continue")
        except Exception as error:
            self._unproved = True
            done.set_exception(error)
        else:
            self._unproved = False
            done.set_result(shown)
        self._loads.pop(0)
        scheduler.accepts_new = not self._loads
        if not self._unproved:
            self._emit("swap", seconds=time.perf_counter() - begin, version=self._engine.version)

    def _end(self, error: NearpolicyError) -> None:
        """Answer everybody who waits, and from now on every caller."""
        with self._ending:
            self._ended = error
        for subscriber in self._subscribers.values():
            subscriber.put(error)
        waiting = [done for _, done, _ in self._loads]
        while not self._commands.empty():
            command = self._commands.get()
            waiting += [command.done] if command is not None else []
        for done in waiting:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)


def _copy(error: NearpolicyError) -> NearpolicyError:
    """One for each who waits: a raised exception collects the traceback of everybody it passes."""
    return type(error)(*error.args)
