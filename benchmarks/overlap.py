"""What overlapping generation, verification and learning gains, and whether the pipeline gives all of it.

    python -m benchmarks.overlap [--quick] [--unit 0.2] [--steps 16]     emulated stages
    python -m benchmarks.overlap --demo [--quick] [--steps 6]            the demo's model and shapes

Emulated: the real pipeline, queue and ledger around stages that sleep. An environment generates and then verifies, each
at most ``prompts_per_step`` groups at once and one unit of time per group; the learner takes 0.1, 0.5 or 1 unit per
step; weights are published in no time. The time of a step in steady state is compared with

    limit = max(longest stage, sum of stages / (max_staleness + 1))

No pipeline of this kind can do better: a stage serves one batch at a time, and a slot is given back only after the
publication of the step that used its group, so that a batch's worth of slots goes round in the sum of the stages, and
max_staleness + 1 of them are under way. Every run must consume the same groups in the same order. The ratio of the last
line is the step time of max_staleness 0 over max_staleness 1 with a learner of 0.1 units; the command fails if that is
below 1.7, or a step takes 10 % more than its limit.

Demo: fixed work. The learning rate is so small that every version samples like version 0, so all sides generate and
learn the same tokens, which is checked before anything is compared. Each side has its best thread counts: all cores
for the role whose turn it is, against one thread per role. Against max_staleness 0 whose learner waits for the whole
batch (``learner.streaming=false``) it compares max_staleness 0 as it comes, and max_staleness 1.

Pairs alternate. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pairs import ratios
from nearpolicy.pipeline import Pipeline
from nearpolicy.records import (
    Admission,
    Batch,
    Finish,
    Group,
    Prompt,
    Rollout,
    Row,
    Segment,
    StepReport,
    VersionRecord,
)
from nearpolicy.rollout_queue.ledger import Ledger
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue
from nearpolicy.store.reader import RunReader

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
PER_STEP = 4
BOUNDS = (0, 1, 2, 4)
LEARN = (0.1, 0.5, 1.0)
ALLOWED = 1.1


class Stages:
    """Environment, learner and weights as stages that take time and do nothing; store and telemetry beside them."""

    def __init__(self, learn: float, unit: float) -> None:
        self._learn, self._unit = learn * unit, unit
        self._generating, self._verifying = asyncio.Semaphore(PER_STEP), asyncio.Semaphore(PER_STEP)
        self.version = 0
        self.batches: list[list[int]] = []
        self.began: list[float] = []
        """When each step took its groups up."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), task="t", text="?")

    async def run(self, admission: Admission) -> Group:
        async with self._generating:
            await asyncio.sleep(self._unit)
            version = self.version
        async with self._verifying:
            await asyncio.sleep(self._unit)
        segment = Segment(
            context_ids=[1],
            token_ids=[admission.index],
            mask=[True],
            behavior_logprobs=[0.0],
            versions=[max(version, admission.version)],
            finish=Finish.STOP,
        )
        rollout = Rollout(sample=0, segments=(segment,), text="", numerics="exact")
        return Group(admission=admission, rollouts=(rollout,), verdicts=({},), rewards=(1.0,))

    async def step(self, batch: Batch) -> StepReport:
        self.began.append(time.perf_counter())
        self.batches.append([group.index for group in batch.groups])
        await asyncio.sleep(self._learn)
        return StepReport(version=batch.step + 1, updates=batch.step + 1, metrics={})

    async def publish(self) -> VersionRecord:
        self.version = len(self.batches)
        return VersionRecord(lineage=0, version=self.version, updates=self.version, fingerprint="", parent=None)

    async def stop(self) -> None: ...
    def event(self, *_: Any, **__: Any) -> None: ...
    def give_up(self, *_: Any) -> None: ...
    def admitted(self, *_: Any) -> None: ...
    def filled(self, *_: Any) -> None: ...
    def discarded(self, *_: Any) -> None: ...
    def consumed(self, *_: Any) -> None: ...
    def published(self, *_: Any) -> None: ...
    def log_step(self, *_: Any) -> None: ...


def emulated(bound: int, learn: float, unit: float, steps: int) -> tuple[float, list[list[int]]]:
    """Units of time per step in steady state, and what every step consumed."""

    async def scenario() -> Stages:
        stages = Stages(learn, unit)
        ledger = Ledger(prompts_per_step=PER_STEP, max_staleness=bound, order="admission")
        pipeline = Pipeline(
            queue=StalenessBoundedQueue(ledger, stages, stages, seed=0, num_groups=steps * PER_STEP),
            environment=stages,
            learner=stages,
            weights=stages,
            store=stages,
            telemetry=stages,
            assemble=lambda groups: tuple(_row(group) for group in groups),
            after_step=_go_on,
            num_steps=steps,
            prompts_per_step=PER_STEP,
            num_slots=ledger.num_slots,
        )
        await pipeline.run()
        return stages

    stages = asyncio.run(scenario())
    skipped = (bound + 1) * (1 + steps // 4 // (bound + 1))  # the pipe fills, in whole rounds of the slots
    rounds = (steps - 1 - skipped) // (bound + 1)
    last = skipped + rounds * (bound + 1)
    return (stages.began[last] - stages.began[skipped]) / (last - skipped) / unit, stages.batches


def _row(group: Group) -> Row:
    segment = group.rollouts[0].segments[0]
    return Row(group=group.index, sample=0, segment=segment, trained=segment.mask, advantages=np.ones(1))


async def _go_on(report: StepReport) -> bool:
    return False


def limit(bound: int, learn: float) -> float:
    return max(1.0, learn, (2 + learn) / (bound + 1))


def compare_emulated(pairs: int, unit: float, steps: int) -> dict[str, Any]:
    found: dict[tuple[int, float], list[float]] = {(bound, learn): [] for learn in LEARN for bound in BOUNDS}
    wanted = [list(range(step * PER_STEP, (step + 1) * PER_STEP)) for step in range(steps)]
    for pair in range(pairs):
        for bound, learn in list(found) if pair % 2 == 0 else list(found)[::-1]:
            units, batches = emulated(bound, learn, unit, steps)
            if batches != wanted:
                raise SystemExit(f"max_staleness {bound}, learn {learn}: other groups were consumed; see {batches}")
            found[bound, learn].append(units)
    table, too_slow = [], []
    for (bound, learn), units in found.items():
        median, ideal = statistics.median(units), limit(bound, learn)
        speedup = statistics.median(a / b for a, b in zip(found[0, learn], units, strict=True))
        table.append(
            {
                "max_staleness": bound,
                "learn": learn,
                "step_units": round(median, 3),
                "limit_units": round(ideal, 3),
                "over_limit": round(median / ideal, 3),
                "times_faster_than_0": round(speedup, 3),
            }
        )
        too_slow += [f"max_staleness {bound}, learn {learn}"] if median > ALLOWED * ideal else []
        print(f"max_staleness {bound}, learn {learn}: {median:.3f} units a step, limit {ideal:.3f}", flush=True)
    result = ratios(found[1, 0.1], found[0, 0.1])
    del result["seconds_ours"], result["seconds_theirs"]
    return {
        "comparison": "emulated stages, learn 0.1: step time of max_staleness 0 over max_staleness 1",
        **result,
        "equal_results": True,
        "unit_s": unit,
        "steps": steps,
        "table": table,
        "above_limit": too_slow,
    }


SIDES = {
    "0, whole batches": ("queue.max_staleness=0", "learner.streaming=false"),
    "0": ("queue.max_staleness=0",),
    "1": ("queue.max_staleness=1",),
}


def train(overrides: Sequence[str], steps: int, folder: Path) -> tuple[float, list[bytes]]:
    """Seconds of training, and the sampled tokens of every rollout in order."""
    command = [
        sys.executable, "-m", "nearpolicy.launch.cli", "train", str(RECIPE), f"run.dir={folder}", f"run.steps={steps}",
        "learner.learning_rate=1e-15", "learner.lr_schedule=constant", "tasks.0.held_out=0", "evaluation.pass_k=[]",
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with RunReader(folder) as reader:
        summary = reader.summary()
        assert summary is not None
        tokens = [s.token_ids.tobytes() for g in reader.groups() for r in g.rollouts for s in r.segments]
    return summary["wall_s"], tokens


def compare_demo(pairs: int, steps: int) -> dict[str, Any]:
    times: Mapping[str, list[float]] = {side: [] for side in SIDES}
    for pair in range(pairs):
        seen = {}
        for side in list(SIDES) if pair % 2 == 0 else list(SIDES)[::-1]:
            with tempfile.TemporaryDirectory() as scratch:
                seconds, seen[side] = train(SIDES[side], steps, Path(scratch) / "run")
            times[side].append(seconds)
            print(f"pair {pair + 1}, max_staleness {side}: {seconds:.1f} s", flush=True)
        if any(tokens != seen["0"] for tokens in seen.values()):
            raise SystemExit(f"pair {pair + 1}: the sides sampled different tokens; nothing can be compared")
    streaming = ratios(times["0"], times["0, whole batches"])
    return {
        "comparison": "demo: training time of max_staleness 0 over max_staleness 1",
        **ratios(times["1"], times["0"]),
        "equal_results": True,
        "steps": steps,
        "streaming_at_0": {"comparison": "max_staleness 0: whole batches over learner.streaming", **streaming},
        "max_staleness_1_over_whole_batches_at_0": ratios(times["1"], times["0, whole batches"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--demo", action="store_true", help="the real model instead of stages that sleep")
    parser.add_argument("--unit", type=float, default=0.2, help="seconds of a unit of time")
    parser.add_argument("--steps", type=int, help="16, or 6 with --demo")
    arguments = parser.parse_args()
    pairs = 2 if arguments.quick else 5
    if arguments.demo:
        print(json.dumps(compare_demo(pairs, arguments.steps or 6)))
        return
    result = compare_emulated(pairs, arguments.unit, arguments.steps or 16)
    print(json.dumps(result))
    if result["above_limit"] or result["ratio_median"] < 1.7:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
