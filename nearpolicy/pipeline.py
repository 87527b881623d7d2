"""The loop: generate, verify, enqueue; learn, sync. It knows roles and records, and nothing of what is behind them.

    producers (one per slot)            learner (in front)
    reserve -> run -> fill      ...     take -> assemble -> step -> complete -> publish -> retire

Synchronous, one-step-off and fully asynchronous training are one number apart: the slots a queue gives out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nearpolicy.records import Batch, Group, Row, StepReport
from nearpolicy.roles import Environment, Learner, RolloutQueue, RunStore, Telemetry, WeightSync
from nearpolicy.telemetry.batch import batch_metrics, group_losses, step_times, token_fates

Assemble = Callable[[Sequence[Group], int], tuple[Row, ...]]
"""Groups of a step, and the step -> rows with reward-only advantages."""
Again = Callable[[int], tuple[Sequence[Group], tuple[Row, ...]]]
"""A step -> groups of earlier steps, and their rows to train once more in it."""
AfterStep = Callable[[StepReport], Awaitable["Next"]]
"""Evaluation and checkpoints at their time, and what follows."""
STOP_S = 30.0
"""What running groups get at the end of a run to come back with what they have; their tokens are lost after it."""


class Next(NamedTuple):
    """What comes after a step."""

    step: int
    """An earlier one after a rollback, which has published the weights before it."""
    ends: bool = False
    """The run, here."""


@dataclass(slots=True)
class Ahead:
    """How far a step has come before its batch was complete."""

    groups: int = 0
    rows: tuple[Row, ...] = ()
    waited: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One training run over given roles."""

    queue: RolloutQueue
    environment: Environment
    learner: Learner
    weights: WeightSync
    store: RunStore
    telemetry: Telemetry
    assemble: Assemble
    after_step: AfterStep
    num_steps: int
    prompts_per_step: int
    num_slots: int
    weight_sync_steps: int = 1
    first_step: int = 0
    again: Again = lambda step: ((), ())
    streaming: bool = False
    """The learner takes up the groups of a step as they come, not only when all are there."""

    async def run(self) -> None:
        """Generate and verify in the background, learn and sync in front; ends with the last step.

        A crash in any task ends the run with its traceback: the task group cancels the others, and what was running
        or ready stays as it is, in flight. A run that comes to its end, also early, gives every token a fate.
        """
        before = self._given_up()
        async with asyncio.TaskGroup() as tasks:
            producers = [tasks.create_task(self._produce()) for _ in range(self.num_slots)]
            await asyncio.wait(
                [tasks.create_task(self._learn(before))]
            )  # as a task, so that the first error stands first
            self.queue.close()
            await self.environment.stop()  # what is running hands over what it has sampled
            await asyncio.wait(producers, timeout=STOP_S)
            for producer in producers:
                producer.cancel()

    async def _produce(self) -> None:
        while (slot := await self.queue.reserve()) is not None:  # waits while generation is far enough ahead
            group = await self.environment.run(slot.admission)  # samples and verifies; failures come back as data
            self.queue.fill(slot, group)

    def _given_up(self) -> tuple[int, int, int]:
        return self.queue.num_failed, self.queue.num_filtered, self.queue.num_expired

    async def _learn(self, before: tuple[int, int, int]) -> None:
        """``before``: groups given up so far, so that each step tells of its own."""
        unpublished: int | None = None
        step = self.first_step
        while step < self.num_steps:
            begin = time.monotonic()
            ahead = await self._learn_ahead(step) if self.streaming else Ahead()
            groups = await self._waiting(ahead, self.queue.take(self.prompts_per_step))
            if not groups:
                break  # the data ended
            waited, rows = ahead.waited, (*ahead.rows, *self.assemble(groups[ahead.groups :], step))
            replayed, old = self.again(step)
            batch = Batch(
                step=step,
                places=self.prompts_per_step,
                groups=tuple(groups),
                rows=(*rows, *old),
                replayed=tuple(replayed),
            )
            report = await self.learner.step(batch)
            self.queue.complete(step)
            self.store.consumed(batch, report, token_fates(batch, report))
            unpublished = report.version
            if report.version % self.weight_sync_steps == 0 or step + 1 == self.num_steps:
                await self._publish(report.version)
                unpublished = None
            times = step_times(batch, waited, time.monotonic() - begin)
            now = self._given_up()
            lost = group_losses(batch, *(b - a for a, b in zip(before, now, strict=True)))
            before = now
            self.telemetry.log_step(step, {**batch_metrics(batch), **lost, **report.metrics, **times})
            step, ends = await self.after_step(report)
            if step < report.version:
                unpublished = None
            if ends:
                break
        if unpublished is not None:  # the run ended between two publications
            await self._publish(unpublished)

    async def _learn_ahead(self, step: int) -> Ahead:
        """Begin the step with each group as soon as it and those before it are there, until the batch is complete."""
        ahead = Ahead()
        while True:
            sure = await self._waiting(ahead, self.queue.peek(self.prompts_per_step, ahead.groups))
            if not ahead.groups < len(sure) < self.prompts_per_step:
                return ahead
            ahead.rows += self.assemble(sure[ahead.groups :], step)
            ahead.groups = len(sure)
            await self.learner.learn_ahead(ahead.rows)

    async def _waiting(self, ahead: Ahead, groups: Awaitable[Sequence[Group]]) -> Sequence[Group]:
        begin = time.monotonic()
        found = await groups
        seconds = time.monotonic() - begin
        ahead.waited += seconds
        self.telemetry.event("learner", "idle", seconds=seconds, cause="no batch")
        return found

    async def _publish(self, version: int) -> None:
        begin = time.monotonic()
        record = await self.weights.publish()  # every generator holds and has shown it
        self.queue.retire(version)  # only now are the slots of the steps in these weights free
        self.store.published(record, time.monotonic() - begin)
