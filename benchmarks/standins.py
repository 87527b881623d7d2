"""Stand-ins for what needs hardware: generators and a learner that take as long as real ones and compute nothing.

A generator's law: lengths are log-normal, drawn from (admission, sample) alone; one token for each of b running
sequences takes ``(fixed_s + each_s * b) / speed`` seconds. Tokens, log-probabilities and versions are arrays of the
right size. Replicas of one host share a loop; what the stand-ins themselves cost is counted apart (`own_s`), so that
it can be taken from what a process has used.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearpolicy.errors import EngineError
from nearpolicy.generator.host import LOADS_EVERY_S
from nearpolicy.generator.wire import pack_told, unpack_told
from nearpolicy.launch.ray.parcels import Keeper, RayParcel, Sent, awaited, sent
from nearpolicy.records import Batch, Finish, Prompt, Rollout, Row, StepReport, Verdict, VersionRecord
from nearpolicy.roles import Capabilities, Completion, Load, Placed, Told, Weights

DIGESTS = {"weight": "stand-in"}
TEXT = "The answer is 4."


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """How long sequences are, and how fast a replica is."""

    mean: float = 16.0
    sigma: float = 0.6
    """Of the logarithm of the length."""
    longest: int = 64
    fixed_s: float = 0.004
    each_s: float = 0.00004
    slots: int = 64
    tick_s: float = 0.05
    """How exactly time is kept."""
    seed: int = 0

    def lengths(self) -> np.ndarray:
        """[65536] drawn once: a sample's is found by its name."""
        drawn = np.random.default_rng(self.seed).lognormal(-(self.sigma**2) / 2, self.sigma, 1 << 16) * self.mean
        return np.clip(np.round(drawn), 1, self.longest).astype(np.int64)


class _Replica:
    """Sequences that run move on together: each ends when the common count of steps reaches its mark."""

    def __init__(self, law: Law, speed: float) -> None:
        self._law, self._speed = law, speed
        self.running: list[tuple[float, int, int, int]] = []
        """(mark, ticket, sample, length), the next end first."""
        self.waiting: deque[tuple[int, int, int]] = deque()
        self.steps = 0.0
        self.at = time.monotonic()
        self.sampled = 0.0
        self.busy_s = 0.0

    def advance(self, now: float) -> Iterator[tuple[int, int, int]]:
        """What ends until now."""
        while self.running:
            step_s = (self._law.fixed_s + self._law.each_s * len(self.running)) / self._speed
            mark = self.running[0][0]
            ends_at = self.at + max(0.0, mark - self.steps) * step_s
            until = min(ends_at, now)
            moved = (until - self.at) / step_s
            self.steps += moved
            self.sampled += moved * len(self.running)
            self.busy_s += until - self.at
            self.at = until
            if ends_at > now:
                return
            self.steps = mark
            _, ticket, sample, length = heapq.heappop(self.running)
            yield ticket, sample, length
            self.fill()
        self.at = now

    def fill(self) -> None:
        while self.waiting and len(self.running) < self._law.slots:
            ticket, sample, length = self.waiting.popleft()
            heapq.heappush(self.running, (self.steps + length, ticket, sample, length))

    def drop(self, tickets: set[int]) -> Iterator[tuple[int, int, int]]:
        """What is unfinished of these, with the length that it has now."""
        for mark, ticket, sample, length in [entry for entry in self.running if entry[1] in tickets]:
            yield ticket, sample, max(0, min(length, int(length - (mark - self.steps))))
        for ticket, sample, _ in [entry for entry in self.waiting if entry[0] in tickets]:
            yield ticket, sample, 0
        self.running = [entry for entry in self.running if entry[1] not in tickets]
        heapq.heapify(self.running)
        self.waiting = deque(entry for entry in self.waiting if entry[0] not in tickets)
        self.fill()

    def load(self, slots: int) -> Load:
        return Load(
            slots=slots,
            running=len(self.running),
            waiting=len(self.waiting),
            sampled=int(self.sampled),
            busy_s=self.busy_s,
            at=self.at,
        )


class StandInHost:
    """Implements `nearpolicy.roles.Member`. As a context it counts what it takes itself."""

    def __init__(self, name: str, num_replicas: int, law: Law, *, speeds: Sequence[float] = (1.0,)) -> None:
        """``speeds``: of the replicas, in turn."""
        self.name, self.num_replicas = name, num_replicas
        self.own_s = self._begin = 0.0
        """Processor time of the thread spent in here."""
        self._law, self._lengths = law, law.lengths()
        self._replicas = [_Replica(law, speeds[place % len(speeds)]) for place in range(num_replicas)]
        self._placed: dict[int, list[Any]] = {}
        """By ticket: the request, its replica, how many of its samples are unfinished."""
        self._version = 0
        self._tokens = np.arange(law.longest, dtype=np.int32)
        self._logprobs = np.full(law.longest, -1.0, np.float32)
        self._versions = np.zeros(law.longest, np.int32)
        for array in (self._tokens, self._logprobs, self._versions):
            array.setflags(write=False)
        self._done: list[tuple[int, Completion]] = []
        self._events: list[tuple[int, str, Mapping[str, Any]]] = []
        self._news = asyncio.Event()
        self._answered_at = self._loads_at = 0.0
        self._ticking: asyncio.Task[None] | None = None
        self._paused = self._dead = False

    async def submit_many(self, placed: Sequence[Placed]) -> None:
        self._require_alive()
        with self:
            for each in placed:
                request, replica = each.request, self._replicas[each.replica]
                if not replica.running:
                    replica.at = time.monotonic()
                self._placed[each.ticket] = [request, each.replica, request.n]
                for sample in range(request.n):
                    place = (request.admission * 31 + sample * 7919) & 0xFFFF
                    length = min(int(self._lengths[place]), request.sampling.max_tokens)
                    replica.waiting.append((each.ticket, sample, length))
                replica.fill()
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def abort_many(self, tickets: Sequence[int]) -> None:
        self._require_alive()
        with self:
            wanted = set(tickets)
            for replica in self._replicas:
                for ticket, sample, length in list(replica.drop(wanted)):
                    self._end(ticket, sample, length, Finish.ABORTED)

    async def collect(self, spacing_s: float) -> Told:
        until = time.monotonic() + 1.0
        while not self._done and (left := until - time.monotonic()) > 0:
            self._require_alive()
            self._news.clear()
            await _wait(self._news, left)
        if self._placed and (left := self._answered_at + spacing_s - time.monotonic()) > 0:
            await asyncio.sleep(left)
        self._require_alive()
        with self:
            self._answered_at = time.monotonic()
            done, self._done = self._done, []
            events, self._events = self._events, []
            loads = {}
            if self._answered_at - self._loads_at >= LOADS_EVERY_S:
                self._loads_at = self._answered_at
                loads = {place: replica.load(self._law.slots) for place, replica in enumerate(self._replicas)}
            return Told(completions=done, events=events, loads=loads)

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False

    async def load(self, weights: Weights) -> Mapping[str, str]:
        self._require_alive()
        self._version = weights.record.version
        self._versions = np.full(self._law.longest, self._version, np.int32)
        self._versions.setflags(write=False)
        return DIGESTS

    def capabilities(self) -> Capabilities:
        return Capabilities(
            numerics="fast",
            seeded=True,
            batch_invariant=True,
            resumable=False,
            in_flight_update=True,
            prefix_cache=False,
            adapters=False,
            proof="fingerprint",
        )

    def die(self) -> None:
        """Every call fails from now on."""
        self._dead = True
        self._news.set()

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._law.tick_s)
            if self._paused or self._dead:
                continue
            with self:
                now = time.monotonic()
                for replica in self._replicas:
                    if replica.running:
                        for ticket, sample, length in replica.advance(now):
                            self._end(ticket, sample, length, Finish.STOP)

    def _end(self, ticket: int, sample: int, length: int, finish: Finish) -> None:
        entry = self._placed[ticket]
        request, replica = entry[0], entry[1]
        completion = Completion(
            request=request.id,
            sample=sample,
            token_ids=self._tokens[:length],
            logprobs=self._logprobs[:length],
            versions=self._versions[:length],
            finish=finish,
        )
        self._done.append((ticket, completion))
        numbers = {"admission": request.admission, "sample": sample, "tokens": length, "reason": finish.value}
        self._events.append((replica, "finish", numbers))
        entry[2] -= 1
        if not entry[2]:
            del self._placed[ticket]
        self._news.set()

    def _require_alive(self) -> None:
        if self._dead:
            raise EngineError(f"{self.name} is dead")

    def __enter__(self) -> None:
        self._begin = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.own_s += time.thread_time() - self._begin


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass


class RayHost:
    """Implements `nearpolicy.roles.Member`: a `StandInHost` in an actor of its own; messages go packed."""

    def __init__(self, name: str, num_replicas: int, law: Law, keeper: Keeper) -> None:
        import ray

        self.name, self.num_replicas = name, num_replicas
        self._actor = ray.remote(num_cpus=0, max_concurrency=16)(_HostActor).remote(name, num_replicas, law, keeper)
        self._capabilities = ray.get(self._actor.capabilities.remote(), timeout=120)

    async def submit_many(self, placed: Sequence[Placed]) -> None:
        await self._actor.submit_many.remote(sent(list(placed)))

    async def abort_many(self, tickets: Sequence[int]) -> None:
        await self._actor.abort_many.remote(list(tickets))

    async def collect(self, spacing_s: float) -> Told:
        return unpack_told(*await self._actor.collect.remote(spacing_s))

    async def pause(self) -> None:
        await self._actor.pause.remote()

    async def resume(self) -> None:
        await self._actor.resume.remote()

    async def load(self, weights: Weights) -> Mapping[str, str]:
        return await self._actor.load.remote(weights)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def close(self) -> None:
        import ray

        ray.kill(self._actor)


class _HostActor:
    def __init__(self, name: str, num_replicas: int, law: Law, keeper: Keeper) -> None:
        self._host = StandInHost(name, num_replicas, law)
        self._keeper = keeper

    async def submit_many(self, placed: Sent) -> None:
        await self._host.submit_many(await awaited(placed))

    async def abort_many(self, tickets: list[int]) -> None:
        await self._host.abort_many(tickets)

    async def collect(self, spacing_s: float) -> tuple[bytes, RayParcel | None]:
        head, tokens = pack_told(await self._host.collect(spacing_s), lambda ids: TEXT)
        return head, await self._keeper.keep(tokens)

    async def pause(self) -> None:
        await self._host.pause()

    async def resume(self) -> None:
        await self._host.resume()

    async def load(self, weights: Weights) -> Mapping[str, str]:
        return await self._host.load(weights)

    async def capabilities(self) -> Capabilities:
        return self._host.capabilities()


class StandInLearner:
    """Implements `nearpolicy.roles.Learner`: a step takes ``step_s``, and changes a number."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.version = 0
        self._step_s = step_s

    async def learn_ahead(self, rows: Sequence[Row]) -> None: ...

    async def step(self, batch: Batch) -> StepReport:
        if self._step_s:
            await asyncio.sleep(self._step_s)
        self.version += 1
        return StepReport(version=self.version, updates=self.version, metrics={"time/learn_s": self._step_s})

    async def weights(self, record_parent: int | None) -> Weights:
        record = VersionRecord(
            lineage=0,
            version=self.version,
            updates=self.version,
            fingerprint=f"stand-in {self.version}",
            parent=record_parent,
        )
        return Weights(record=record, tensors={}, digests=DIGESTS)

    async def save(self, path: str) -> None: ...


class StandInVerifier:
    """Implements `nearpolicy.roles.Verifier`: an answer at once, and the event of one."""

    def __init__(self, on_event: Any) -> None:
        self._emit = on_event

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        found = {"correct": Verdict.scored(float((admission + rollout.sample) % 2))}
        numbers = {"queue_s": 0.0, "scored": 1, "abstained": 0, "failed": 0}
        self._emit("verifier", "verify", admission=admission, sample=rollout.sample, seconds=0.0, **numbers)
        return found


class StandInPrompts:
    """Implements `nearpolicy.roles.PromptSource`: as many as are asked for."""

    def __init__(self) -> None:
        self._asked = itertools.count()

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), task="stand-in", text="What is 2 + 2?", columns={"answer": "4"})
