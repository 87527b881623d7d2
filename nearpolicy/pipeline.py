"""The loop: generate, verify, enqueue; learn, sync. It knows roles and records, and nothing of what is behind them.

    producers (one per slot)            learner (in front)
    reserve -> run -> fill      ...     take -> assemble -> step -> complete -> publish -> retire

Synchronous, one-step-off and fully asynchronous training are one number apart: the slots a queue gives out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearpolicy.records import Batch, Fate, Group, Row, StepReport, VersionRecord
from nearpolicy.roles import Environment, Learner, RolloutQueue, RunStore, Slot, Telemetry, WeightSync

Assemble = Callable[[Sequence[Group]], tuple[Row, ...]]
"""Groups of a step -> rows with reward-only advantages."""
AfterStep = Callable[[StepReport], Awaitable[bool]]
"""Evaluation and checkpoints at their time; True ends the run after this step."""


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

    async def run(self) -> None:
        """Generate and verify in the background, learn and sync in front; ends with the last step.

        A crash in any task ends the run with its traceback: the task group cancels the others.
        """
        async with asyncio.TaskGroup() as tasks:
            producers = [tasks.create_task(self._produce()) for _ in range(self.num_slots)]
            await self._learn()
            for producer in producers:
                producer.cancel()

    async def _produce(self) -> None:
        while (slot := await self.queue.reserve()) is not None:  # waits while generation is far enough ahead
            self.queue.fill(slot, await self._run(slot))

    async def _run(self, slot: Slot) -> Group:
        return await self.environment.run(slot.admission)  # samples and verifies; failures come back as data

    async def _learn(self) -> None:
        for step in range(self.first_step, self.num_steps):
            begin = time.monotonic()
            groups = await self.queue.take(self.prompts_per_step)
            waited = time.monotonic() - begin
            if not groups:
                return  # the data ended
            batch = Batch(step=step, places=self.prompts_per_step, groups=tuple(groups), rows=self.assemble(groups))
            report = await self.learner.step(batch)
            self.queue.complete(step)
            self.store.consumed(batch, report, token_fates(batch))
            if report.version % self.weight_sync_steps == 0 or step + 1 == self.num_steps:
                await self._publish(report.version)
            times = {"time/wait_s": waited, "time/step_s": time.monotonic() - begin}
            self.telemetry.log_step(step, {**batch_metrics(batch), **report.metrics, **times})
            if await self.after_step(report):
                return

    async def _publish(self, version: int) -> VersionRecord:
        begin = time.monotonic()
        record = await self.weights.publish()  # every generator holds and has shown it
        self.queue.retire(version)  # only now are the slots of the steps in these weights free
        self.store.published(record, time.monotonic() - begin)
        return record


def token_fates(batch: Batch) -> dict[tuple[int, int], dict[Fate, int]]:
    """(admission index, sample) -> fate -> sampled tokens, for every rollout of the batch; the sums are exact (I2)."""
    fates: dict[tuple[int, int], dict[Fate, int]] = {}
    for row in batch.rows:
        counts = fates.setdefault((row.group, row.sample), {})
        trained = int(row.trained.sum())
        useful = int((row.trained & (row.advantages != 0)).sum())
        for fate, count in (
            (Fate.TRAINED, useful),
            (Fate.ZERO_ADVANTAGE, trained - useful),
            (Fate.MASKED, row.segment.num_sampled - trained),
        ):
            if count:
                counts[fate] = counts.get(fate, 0) + count
    return fates


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch, known before the learner sees it."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = [reward for group in batch.groups for reward in group.rewards if reward is not None]
    lengths = [rollout.num_sampled for rollout in rollouts]
    staleness = [batch.step - group.oldest_version for group in batch.groups]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/zero_variance_share": _mean([not group.has_signal for group in batch.groups]),
        "reward/unscored": float(sum(reward is None for group in batch.groups for reward in group.rewards)),
        "completion/length_mean": _mean(lengths),
        "completion/truncated_share": _mean([r.finish.value == "length" for r in rollouts]),
        "staleness/mean": _mean(staleness),
        "staleness/max": float(max(staleness, default=0)),
        "batch/groups": float(len(batch.groups)),
        "batch/tokens": float(sum(lengths)),
    }
    for name, values in _by_source(batch).items():
        metrics[f"reward/{name}/mean"] = _mean(values)
    for task in sorted({group.admission.prompt.task for group in batch.groups}):
        own = [r for g in batch.groups if g.admission.prompt.task == task for r in g.rewards if r is not None]
        metrics[f"task/{task}/reward"] = _mean(own)
    return metrics


def _by_source(batch: Batch) -> Mapping[str, list[float]]:
    """Values by reward source, and their named parts as ``source/part``."""
    values: dict[str, list[float]] = {}
    for group in batch.groups:
        for verdicts in group.verdicts:
            for source, verdict in verdicts.items():
                if verdict.value is not None:
                    values.setdefault(source, []).append(verdict.value)
                for part, value in verdict.parts.items():
                    values.setdefault(f"{source}/{part}", []).append(value)
    return values


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
