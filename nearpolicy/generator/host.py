"""Generators of this process behind the batched calls of `Member`: what an actor of a cluster holds inside.

    submit_many / abort_many -> each replica's own submit / abort
    collect                  <- completions of all replicas, their loads, and what they told to the time line

A replica that cannot go on ends the host: whoever collects gets its error, and a fleet issues the work again elsewhere.
A single request that cannot be carried out is failed completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from nearpolicy.errors import EngineError, NearpolicyError, described
from nearpolicy.models.weights import require_held
from nearpolicy.records import Finish
from nearpolicy.roles import Capabilities, Completion, Generator, Load, Placed, Request, Told, Weights

LOADS_EVERY_S = 0.25
"""How often the loads are told. Room is counted by the fleet itself; rates and lengths move slowly."""
POLL_S = 1.0
"""How long `collect` waits for something to tell."""
EVENTS_AT_MOST = 10_000
"""Events kept for whoever collects; the oldest go first."""

OnEvent = Callable[..., None]
"""Takes a kind and its fields."""


class Replica(Generator, Protocol):
    """A generator that says how busy it is, as `EngineRunner` does."""

    def workload(self) -> Load: ...

    def close(self) -> None: ...


class Host:
    """Implements `Member`; belongs to one event loop."""

    def __init__(self, name: str, replicas: Sequence[Callable[[OnEvent], Replica]], *, poll_s: float = POLL_S) -> None:
        """``replicas``: each is made with what takes its events."""
        self.name = name
        self.num_replicas = len(replicas)
        self._events = Events()
        self.replicas = [make(partial(self._events.tell, place)) for place, make in enumerate(replicas)]
        self._poll_s = poll_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By ticket."""
        self._where: dict[int, tuple[int, str]] = {}
        """Ticket -> replica, and what the request is called there."""
        self._done: list[tuple[int, Completion]] = []
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._answered_at = self._loads_at = 0.0
        self._error: NearpolicyError | None = None

    async def submit_many(self, placed: Sequence[Placed]) -> None:
        self._require_whole()
        for each in placed:
            self._idle.clear()
            # A name of its own: the same request may still be on its way out under the last one.
            self._where[each.ticket] = each.replica, f"{each.request.id}@{each.ticket}"
            self._tasks[each.ticket] = asyncio.create_task(self._run(each))
        await asyncio.sleep(0)  # all of them are with their replicas before this returns: an abort may come next

    async def abort_many(self, tickets: Sequence[int]) -> None:
        self._require_whole()
        by_replica: dict[int, list[str]] = defaultdict(list)
        for ticket in tickets:
            if ticket in self._where:
                replica, name = self._where[ticket]
                by_replica[replica].append(name)
        await asyncio.gather(*(self.replicas[replica].abort(names) for replica, names in by_replica.items()))

    async def collect(self, spacing_s: float) -> Told:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                await self._news.wait()
        now = asyncio.get_running_loop().time
        if self._tasks and (left := self._answered_at + spacing_s - now()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._idle.wait()
        self._answered_at = now()
        self._news.clear()
        done, self._done = self._done, []
        if not done:
            self._require_whole()  # what ended before the error is told before it
        if self._error is not None:
            self._news.set()
        events = self._events.take()
        loads = {}
        if self._answered_at - self._loads_at >= LOADS_EVERY_S:
            self._loads_at = self._answered_at
            loads = {place: replica.workload() for place, replica in enumerate(self.replicas)}
        return Told(completions=done, loads=loads, events=events)

    async def pause(self) -> None:
        await asyncio.gather(*(replica.pause() for replica in self.replicas))

    async def sleep(self) -> None:
        await asyncio.gather(*(replica.sleep() for replica in self.replicas))

    async def resume(self) -> None:
        await asyncio.gather(*(replica.resume() for replica in self.replicas))

    async def load(self, weights: Weights) -> Mapping[str, str]:
        shown = await asyncio.gather(*(replica.load(weights) for replica in self.replicas))
        for place, digests in enumerate(shown):
            require_held(f"replica {place} of {self.name}", weights.record.version, weights.digests, digests)
        return shown[0]

    def capabilities(self) -> Capabilities:
        return weakest([replica.capabilities() for replica in self.replicas])

    def close(self) -> None:
        self._fail(EngineError(f"{self.name} is closed"))
        for task in self._tasks.values():
            task.cancel()
        for replica in self.replicas:
            replica.close()

    async def _run(self, placed: Placed) -> None:
        request, (_, name) = placed.request, self._where[placed.ticket]
        missing = set(range(request.n))
        try:
            async for completion in self.replicas[placed.replica].submit(replace(request, id=name)):
                missing.discard(completion.sample)
                self._tell(placed.ticket, replace(completion, request=request.id))
        except NearpolicyError as error:
            self._fail(error)
        except Exception as error:
            for sample in sorted(missing):
                self._tell(placed.ticket, failed(request, sample, described(error)))
        finally:
            del self._tasks[placed.ticket], self._where[placed.ticket]
            if not self._tasks:
                self._idle.set()

    def _tell(self, ticket: int, completion: Completion) -> None:
        self._done.append((ticket, completion))
        self._news.set()

    def _fail(self, error: NearpolicyError) -> None:
        self._error = self._error or error
        self._news.set()
        self._idle.set()

    def _require_whole(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error


class Events:
    """What replicas tell, from any thread, until somebody takes it. Decode steps come thousands a second: those of one
    replica that follow one another under one version are told as one, with their number (``steps``)."""

    def __init__(self) -> None:
        self._told: deque[_Told] = deque(maxlen=EVENTS_AT_MOST)
        self._last: dict[int, _Told] = {}
        """By replica: its last event, if that was of decode steps."""
        self._lock = threading.Lock()

    def tell(self, place: int, kind: str, **fields: Any) -> None:
        with self._lock:
            told, last = _Told(time.monotonic(), place, kind, fields), self._last.get(place)
            if kind != "decode_step":
                self._last.pop(place, None)
            elif last is not None and last.fields.get("version") == fields.get("version"):
                last.add(told)
                return
            else:
                fields |= {"steps": 1, "batch_max": fields["batch"]}
                self._last[place] = told
            self._told.append(told)

    def take(self) -> list[tuple[int, str, Mapping[str, Any]]]:
        with self._lock:
            taken = list(self._told)
            self._told.clear()
            self._last.clear()
        now = time.monotonic()
        return [(told.place, told.kind, told.fields | {"ago": now - told.at}) for told in taken]


@dataclass(slots=True)
class _Told:
    at: float
    """By this machine's clock, which is not the controller's."""
    place: int
    kind: str
    fields: dict[str, Any]

    def add(self, later: _Told) -> None:
        """One more decode step."""
        for name in ("batch", "context_sum", "ms", "sampled", "seconds"):
            self.fields[name] += later.fields[name]
        self.fields["steps"] += 1
        self.fields["batch_max"] = max(self.fields["batch_max"], later.fields["batch"])
        self.fields["running"] = later.fields["running"]
        self.at = later.at


def weakest(found: Sequence[Capabilities]) -> Capabilities:
    """What all of them promise."""
    levels = ("fingerprint", "probe", "none")
    return Capabilities(
        numerics="exact" if all(each.numerics == "exact" for each in found) else "fast",
        proof=max((each.proof for each in found), key=levels.index),
        seeded=all(each.seeded for each in found),
        batch_invariant=all(each.batch_invariant for each in found),
        resumable=all(each.resumable for each in found),
        in_flight_update=all(each.in_flight_update for each in found),
        prefix_cache=all(each.prefix_cache for each in found),
        adapters=all(each.adapters for each in found),
        returns_token_ids=all(each.returns_token_ids for each in found),
    )


def failed(request: Request, sample: int, reason: str) -> Completion:
    """A sample of which there is nothing but the reason; what it had begun with is kept."""
    return ended(request, sample, Finish.FAILED, reason)


def ended(request: Request, sample: int, finish: Finish, reason: str = "") -> Completion:
    """A sample that got no further than it had begun with."""
    begun = request.begun.get(sample)
    nothing = np.zeros(0)
    return Completion(
        request=request.id,
        sample=sample,
        token_ids=nothing.astype(np.int32) if begun is None else begun.token_ids,
        logprobs=nothing.astype(np.float32) if begun is None else begun.logprobs,
        versions=nothing.astype(np.int32) if begun is None else begun.versions,
        finish=finish,
        extras={} if begun is None else begun.extras,
        reason=reason,
    )
