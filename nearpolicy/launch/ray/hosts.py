"""What runs inside an actor: plain classes, each with one role of a run.

    Process   the actor: becomes a host, and passes calls on to it
    hosts     their coroutines run on the actor's event loop, everything else on one thread, call by call

An actor's process loads torch when it is told to load a model, after the settings that must stand before.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nearpolicy.config import RunConfig
from nearpolicy.launch.ray.calls import Answer, Diary, Events, Place, answered, failure, here
from nearpolicy.launch.ray.parcels import Keeper, RayParcel, Sent, awaited, received
from nearpolicy.launch.ray.used import Used, told_rows
from nearpolicy.machine import peak_memory_mb, prepare_environment
from nearpolicy.roles import Shipment, Weights

if TYPE_CHECKING:
    from nearpolicy.generator.host import Host
    from nearpolicy.launch.build import EngineParts, FitModel, Words
    from nearpolicy.learner.parallel import Ranks
    from nearpolicy.learner.step import PolicyLearner
    from nearpolicy.records import Batch, Row, StepReport
    from nearpolicy.sync.shipping import Receiver, Sender
    from nearpolicy.verifier.service import VerifierService


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that has been found fit."""

    mode: str
    """The numerics that are to be had there: exact or fast."""
    numerics: Any
    """Its rule (`nearpolicy.models.numerics.Numerics`)."""
    bound: Any
    """How far engine and learner may be apart there (`nearpolicy.launch.diagnosis.Bound`)."""


class Process:
    """An actor before and after it has become something: `become` a host, `do` what it can, `rest` without it."""

    def __init__(self) -> None:
        prepare_environment()
        self._host: Any = None
        self._thread: ThreadPoolExecutor | None = None

    async def here(self) -> Place:
        return here()

    async def peak_memory_mb(self) -> float:
        return peak_memory_mb()

    async def become(self, folder: str, kind: type, *arguments: Any) -> None:
        """``folder``: that the recipe's relative paths begin in, where it exists on this node."""
        await self.rest()
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=kind.__name__)
        self._host = kind(*arguments)

    async def do(self, verb: str, *arguments: Any) -> Any:
        call = getattr(self._host, verb)
        if inspect.iscoroutinefunction(call):
            return await call(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def rest(self) -> None:
        """Give up the host, and what it holds."""
        host, thread, self._host, self._thread = self._host, self._thread, None, None
        if host is not None and hasattr(host, "close"):
            await host.close()
        if thread is not None:  # what it is in the middle of is not for the next host to meet
            await asyncio.to_thread(thread.shutdown)
        del host
        gc.collect()


# One class for each role, so that `ps` and Ray's logs say who is who.


class Learner(Process): ...


class Generator(Process): ...


class Verifier(Process): ...


class Controller(Process): ...


PROCESSES: Mapping[str, type[Process]] = {
    "learner": Learner,
    "generator": Generator,
    "verifier": Verifier,
    "controller": Controller,
}


class _Role:
    """A model of the recipe, loaded and probed."""

    _in_pieces = False
    """Whether others hold the rest of it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._diary = Diary()
        self._said: list[str] = []
        self._words: Words | None = None
        self._model: FitModel | None = None

    def load_model(self) -> Answer:
        return self._and_said(answered(self._load))

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _and_said(self, answer: Answer) -> Answer:
        said, self._said = tuple(self._said), []
        return replace(answer, said=said)

    def _load(self) -> Loaded:
        from nearpolicy.launch import build
        from nearpolicy.launch.diagnosis import bound_of
        from nearpolicy.launch.inline import settle

        settle(1)
        self._words = build.Words.of(self._config)
        model = self._model = build.load_model(self._config, self._words, self._say, in_pieces=self._in_pieces)
        return Loaded(
            mode=model.mode,
            numerics=model.numerics,
            bound=bound_of(model.mode, model.policy, narrow=self._config.generator.weights != "same"),
        )


class GeneratorHost(_Role):
    """An engine on its thread."""

    def __init__(self, config: RunConfig, name: str) -> None:
        super().__init__(config)
        self._name = name
        self._engine: EngineParts | None = None
        self._host: Host | None = None
        self._receivers: dict[str, Receiver] = {}

    async def start(self, mode: str, numerics: Any, keeper: Keeper) -> Answer:
        """With what all roles of the run can keep. ``keeper``: of the tokens."""
        return self._and_said(answered(self._start, mode, numerics, keeper))

    def _start(self, mode: str, numerics: Any, keeper: Keeper) -> Any:
        from nearpolicy.generator.host import Host
        from nearpolicy.launch import build

        self._keeper = keeper
        self._decode = partial(self._words.renderer.decode, stop=tuple(self._config.sampling.stop))
        model = build.with_numerics(self._model, mode, numerics)
        threads = max(1, int(self._config.runtime.cpus_per_generator))

        def replica(tell: Callable[..., None]) -> Any:
            self._engine = build.start_engine(self._config, self._words, model, tell, self._say, own_threads=threads)
            return self._engine.runner

        self._host = Host(self._name, [replica])
        return self._host.capabilities()

    async def submit_many(self, placed: Sent) -> None:
        await self._host.submit_many(await awaited(placed))

    async def abort_many(self, tickets: Sequence[int]) -> None:
        await self._host.abort_many(tickets)

    async def collect(self, spacing_s: float) -> tuple[bytes, RayParcel | None]:
        from nearpolicy.generator.wire import pack_told

        head, tokens = pack_told(await self._host.collect(spacing_s), self._decode)
        return head, await self._keeper.keep(tokens)

    async def pause(self) -> None:
        await self._host.pause()

    async def sleep(self) -> None:
        await self._host.sleep()

    async def resume(self) -> None:
        await self._host.resume()

    async def take(self, weights: Weights) -> Answer:
        """Weights that a learner has shipped."""
        from nearpolicy.launch.ray.transports import receiver_of
        from nearpolicy.sync.shipping import load_arrived

        transport = weights.shipment.transport
        try:
            if transport not in self._receivers:
                self._receivers[transport] = receiver_of(transport, self._name)
            return Answer(value=await load_arrived(self._host.load, weights, self._receivers[transport]))
        except Exception as error:
            return failure(error)

    async def examine(self, look: Callable[..., Any]) -> Answer:
        try:
            return Answer(value=await self._engine.runner.examine(look))
        except Exception as error:
            return failure(error)

    async def close(self) -> None:
        if self._host is not None:
            self._host.close()
        for receiver in self._receivers.values():
            receiver.close()


class LearnerHost(_Role):
    """A rank of the learner."""

    def __init__(self, config: RunConfig, rank: int, size: int) -> None:
        super().__init__(config)
        self._rank = rank
        self._size = size
        self._in_pieces = size > 1
        self._learner: PolicyLearner | None = None
        self._sender: Sender | None = None
        self._ranks: Ranks | None = None
        self._ahead: tuple[Row, ...] = ()
        """What has come of the next batch."""

    def meeting_place(self) -> str:
        """Where ranks may find each other: a free port of this node."""
        import ray

        with socket.socket() as listening:
            listening.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{listening.getsockname()[1]}"

    def start(self, numerics: Any, transport: str, address: str | None, keeper: Keeper) -> Answer:
        """``address``: where the ranks meet, if there are several. ``keeper``: of advantages that steps have made."""
        return self._and_said(answered(self._start, numerics, transport, address, keeper))

    def _start(self, numerics: Any, transport: str, address: str | None, keeper: Keeper) -> None:
        from nearpolicy.launch import build
        from nearpolicy.launch.ray.transports import peers_of, sender_of

        self._keeper = keeper
        self._model = None  # what was probed is not needed again
        if address is not None:
            from nearpolicy.learner.parallel import join

            self._ranks = join(self._rank, self._size, address, self._config.runtime.rank_timeout_s)
        self._sender = sender_of(transport, self._config, peers_of(self._ranks))
        threads = max(1, int(self._config.runtime.cpus_per_learner))
        make = partial(build.make_ranked_learner, self._config, self._words, numerics, ranks=self._ranks)
        self._make = partial(make, own_threads=threads, on_event=self._diary.tell, say=self._say)
        self._learner = self._make()

    def begin_anew(self) -> Answer:
        self._learner, self._ahead = None, ()
        return self._answered(self._made)

    def _made(self) -> None:
        self._learner = self._make()

    def call(self, function: Callable[..., Any], arguments: Sent) -> Answer:
        return self._answered(self._called, function, arguments)

    def _called(self, function: Callable[..., Any], told: Sent) -> Any:
        arguments: Sequence[Any] = received(told)
        with self._learner.ranks.together(getattr(function, "__name__", "a call")):
            return function(self._learner, *arguments)

    def learn_ahead(self, new: Sent) -> Answer:
        """``new``: rows behind those of the calls before."""
        return self._answered(self._learn_ahead, new)

    def _learn_ahead(self, new: Sent) -> None:
        self._ahead = (*self._ahead, *received(new))
        self._learner.learn_ahead(self._ahead)

    def step(self, told: Sent) -> Answer:
        """``told``: the batch, without the rows that `learn_ahead` has had."""
        return self._answered(self._step, told)

    def _step(self, told: Sent) -> tuple[StepReport, list[Used], RayParcel | None]:
        batch: Batch = received(told)
        batch, self._ahead = replace(batch, rows=(*self._ahead, *batch.rows)), ()
        report = self._learner.step(batch)
        if self._rank:  # the first one speaks for all
            return replace(report, rows=()), [], None
        used, arrays = told_rows(report.rows, batch.rows)
        return replace(report, rows=()), used, self._keeper.keep_now(arrays)

    def state(self) -> Answer:
        return self._answered(lambda: None)

    def weights(self, parent: int | None) -> Answer:
        """The weights without their tensors, which are on their way."""
        return self._answered(self._shipped, parent)

    def _shipped(self, parent: int | None) -> Weights:
        from nearpolicy.sync.shipping import ship

        learner, shards = self._learner, None
        weights = learner.weights(parent, keep=False)
        if self._config.sync.adapters == "adapter_only":
            weights = replace(weights, tensors={})
        elif self._ranks is not None:
            shards = learner.shards()
        return ship(weights, self._sender, shards)

    def deliver(self, shipment: Shipment, members: Sequence[str], awaited: Sequence[str]) -> Answer:
        """Hand a version to generators that are receiving it."""
        return self._answered(self._sender.deliver, shipment, members, awaited)

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._ranks is not None:
            from nearpolicy.learner.parallel import leave

            await asyncio.to_thread(leave)

    def _answered(self, call: Callable[..., Any], *arguments: Any) -> Answer:
        answer = answered(call, *arguments)
        learner, state = self._learner, {}
        if learner is not None:
            state = {"version": learner.version, "can_learn_ahead": learner.can_learn_ahead}
        return replace(answer, events=self._diary.take(), state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a verifier has to tell since it was asked last."""

    judged: Sequence[tuple[int, Mapping[str, Any] | None, Exception | None]]
    """Ticket, and verdicts or an error that ends the run."""
    events: Events
    flips: dict[str, float]


class VerifierHost:
    """A verifier and its worker processes; never loads torch."""

    POLL_S = 1.0
    """How long `collect` waits for a verdict."""

    def __init__(self, config: RunConfig, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._config = config
        self._functions = functions
        self._diary = Diary()
        self._service: VerifierService | None = None
        self._done: list[tuple[int, Mapping[str, Any] | None, Exception | None]] = []
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Answer:
        from nearpolicy.verifier.service import VerifierService

        rewards = {task.name: task.rewards for task in self._config.tasks}
        try:
            self._service = VerifierService(
                rewards,
                self._config.verifier,
                at_hand=self._functions,
                on_event=lambda role, kind, **fields: self._diary.tell(kind, **fields),
            )
            await self._service.start()
            return Answer(value=here())
        except Exception as error:
            return failure(error)

    async def isolation(self) -> Any:
        return self._service.isolation

    async def score_many(self, cases: Sent) -> None:
        """Tickets, prompts, rollouts, admissions."""
        for case in await awaited(cases):
            task = asyncio.create_task(self._score(*case))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _score(self, ticket: int, prompt: Any, rollout: Any, admission: int | None) -> None:
        try:
            found = ticket, await self._service.score(prompt, rollout, admission=admission), None
        except Exception as error:
            found = ticket, None, failure(error).error
        self._done.append(found)
        self._news.set()

    async def collect(self) -> Judged:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.POLL_S):
                await self._news.wait()
        self._news.clear()
        done, self._done = self._done, []
        return Judged(judged=done, events=self._diary.take(), flips=self._service.flip_rates())

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
