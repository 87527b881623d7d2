"""Groups whose completions differ much in length: consumed tokens per second under several ways to treat stragglers.

    python -m benchmarks.long_tail [--quick] [--bound 2] [--steps 24] [--learn-ms 0.1]

The real engine on a tiny random model, the real environment, queue, pipeline and weight loading; the learner sleeps for
a time per token. Of 100 completions 97 have a length from a log-normal law (median 16, most 8 to 30) and 3 run to the
limit of 400; a length belongs to its admission, so that a prompt that is asked again draws again. Weights never change
in value, so the first three sides must consume the same tokens, which is checked.

Sides, at one max_staleness:
    finish     order admission, on_sync finish: every publication waits for what runs
    continue   order ready, on_sync continue; nothing is dropped
    resume     the same with on_sync resume
    requeue    order ready, at_bound requeue, on_sync continue, oversample 1.5

The ratio of the last line is continue over finish in consumed tokens per second, both with all groups consumed;
`requeue` has its own. Nothing but tokens of consumed groups is counted, in steady state: from step 6 to the last one
before the end of admissions, with the backlog in both halves of that time beside it.

What was found (two shared cores; `passes_per_step` depends on no neighbour). Dropping is no way to be faster here. A
completion of L tokens takes L passes of the engine, and is consumed only if they fit into max_staleness + 1 steps.
Where nobody waits for it a step is 10 to 25 passes, so `requeue` consumes none of the long completions (0 instead of 3
in 100): its tokens per second are several times those of `finish`, and the lengths it trains on are of another law.
`oversample` o adds to that: slots are always given out and a group holds one for at most max_staleness + 1 steps, so a
share of at least (o - 1) / o of all groups expires, whatever their length. At bound 2 and 4 oversample 1.25 and 1.5
gave no more tokens per second than 1, and 2 only more of the short ones.

Without dropping, `continue` lets long completions run on through max_staleness + 1 publications, where `finish` ends
all of them at each: 88 passes a step against 279 at bound 2 (131 against 265 with --learn-ms 0.6). So what pays is
order ready and on_sync continue (or resume) with at_bound wait, the more the larger the bound; dropping suits
completions whose length says nothing, in steps longer than the longest of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from nearpolicy.machine import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.pairs import ratios  # noqa: E402
from nearpolicy.environments.single_turn import Bounded, SingleTurn  # noqa: E402
from nearpolicy.generator.engine import Engine, EngineLimits  # noqa: E402
from nearpolicy.generator.runner import EngineRunner  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.numerics import probe_model  # noqa: E402
from nearpolicy.models.weights import digests, named_weights  # noqa: E402
from nearpolicy.objectives.assign import assign_advantages  # noqa: E402
from nearpolicy.objectives.config import ObjectiveConfig  # noqa: E402
from nearpolicy.pipeline import Pipeline  # noqa: E402
from nearpolicy.records import Admission, Batch, Fate, Group, Prompt, Rollout, StepReport, Verdict, VersionRecord  # noqa: E402
from nearpolicy.roles import Completion, Request, Sampling, Weights  # noqa: E402
from nearpolicy.rollout_queue.ledger import Ledger, State  # noqa: E402
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue  # noqa: E402

TINY = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "vocab_size": 1024}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PER_STEP, SAMPLES, PROMPT, LONGEST = 8, 4, 24, 400
SKIPPED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    order: str = "admission"
    at_bound: str = "wait"
    on_sync: str = "finish"
    oversample: float = 1.0
    bound: int = 2
    learn_ms: float = 0.1
    """Milliseconds of the learner per consumed token."""

    @property
    def num_slots(self) -> int:
        return int(self.oversample * (self.bound + 1) * PER_STEP + 1e-9)

    def __str__(self) -> str:
        over = f", oversample {self.oversample:g}" if self.oversample > 1 else ""
        return f"bound {self.bound}, order {self.order}, at_bound {self.at_bound}, on_sync {self.on_sync}{over}"


def length(admission: int, sample: int) -> int:
    """Of a completion, by its admission: 97 in 100 from a log-normal law (median 16), the others run to the limit."""
    draw = np.random.default_rng([admission, sample])
    if draw.random() < 0.03:
        return LONGEST
    return int(np.clip(np.exp(np.log(16) + 0.5 * draw.standard_normal()), 4, LONGEST))


class ForcedLengths(Engine):
    passes = 0

    def step(self) -> list[Completion]:
        self.passes += 1
        return super().step()

    def submit(self, request: Request) -> list[Completion]:
        refused = super().submit(request)
        for sequence in self.scheduler.waiting(request.id):
            sequence.max_tokens = length(request.admission, sequence.sample)
        return refused


@dataclass
class World:
    """Learner, weights, store and telemetry: what the pipeline needs beside the engine, and what is counted."""

    runner: EngineRunner
    engine: Engine
    ledger: Ledger
    weights: Weights
    steps: int
    learn_s_per_token: float
    passes: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """When each step was published."""
    consumed_lengths: list[list[int]] = field(default_factory=list)
    backlog: list[dict[str, int]] = field(default_factory=list)
    admitted_groups: list[tuple[int, float]] = field(default_factory=list)
    tokens: Counter[Fate] = field(default_factory=Counter)
    groups: Counter[Fate] = field(default_factory=Counter)
    staleness: list[int] = field(default_factory=list)
    sampled: dict[int, list[bytes]] = field(default_factory=dict)
    """By consumed admission."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), task="t", text="?")

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> dict[str, Verdict]:
        return {"tokens": Verdict.scored(float(rollout.segments[0].token_ids.sum() % 5))}

    async def step(self, batch: Batch) -> StepReport:
        self.backlog.append(
            {
                "groups_running": self.ledger.count(State.RUNNING),
                "groups_ready": self.ledger.count(State.READY),
                "sequences_running": len(self.engine.scheduler.running),
            }
        )
        self.sampled |= {g.index: [r.segments[0].token_ids.tobytes() for r in g.rollouts] for g in batch.groups}
        self.staleness += [batch.step - group.oldest_version for group in batch.groups]
        tokens = sum(group.num_sampled for group in batch.groups)
        await asyncio.sleep(self.learn_s_per_token * tokens)
        self.consumed_lengths.append([r.num_sampled for group in batch.groups for r in group.rollouts])
        return StepReport(version=batch.step + 1, updates=batch.step + 1, metrics={})

    async def publish(self) -> VersionRecord:
        version = len(self.consumed_lengths)
        record = replace(self.weights.record, version=version, updates=version)
        await self.runner.load(replace(self.weights, record=record))
        self.at.append(time.perf_counter())
        self.passes.append(self.engine.passes)
        return record

    def admitted(self, admission: Admission) -> None:
        self.admitted_groups.append((admission.index, time.perf_counter()))

    def discarded(self, group: Group, fate: Fate, reason: str) -> None:
        if fate is Fate.FAILED:
            raise SystemExit(f"group {group.index} failed: {reason}")
        if len(self.at) >= SKIPPED and len(self.at) < self.steps:
            self.groups[fate] += 1
            self.tokens[fate] += group.num_sampled

    async def go_on(self, report: StepReport) -> bool:
        return False

    def filled(self, *_: Any) -> None: ...
    def consumed(self, *_: Any) -> None: ...
    def published(self, *_: Any) -> None: ...
    def event(self, *_: Any, **__: Any) -> None: ...
    def log_step(self, *_: Any) -> None: ...


def run(setting: Setting, steps: int) -> tuple[dict[str, Any], dict[int, list[bytes]]]:
    """What was measured, and the tokens consumed by admission."""
    policy = load_policy(resolve("random:llama", TINY), known_to_fit=True)
    numerics = probe_model(policy, 1)
    if numerics is None:
        raise SystemExit("exact numerics are not to be had on this machine; this benchmark measures them")
    limits = EngineLimits.sized(
        policy, max_running=512, prefill_chunk=512, max_length=PROMPT + LONGEST, kv_memory_mb=1500
    )
    engine = ForcedLengths(policy, limits, numerics)
    runner = EngineRunner(engine, on_sync=setting.on_sync)
    tensors = {name: tensor.detach().clone() for name, tensor in named_weights(policy.model).items()}
    record = VersionRecord(lineage=0, version=0, updates=0, fingerprint="", parent=None)
    weights = Weights(record=record, tensors=tensors, digests=digests(tensors))
    ledger = Ledger(
        prompts_per_step=PER_STEP,
        max_staleness=setting.bound,
        order=setting.order,
        at_bound=setting.at_bound,
        num_slots=setting.num_slots,
    )
    world = World(runner, engine, ledger, weights, steps, setting.learn_ms / 1e3)
    single = SingleTurn(
        runner,
        world,
        render=lambda prompt: np.random.default_rng(int(prompt.id)).integers(5, 1000, PROMPT).astype(np.int32),
        decode=lambda ids: "",
        reward_of=lambda verdicts, task: verdicts["tokens"].value,
        sampling=Sampling(max_tokens=LONGEST),
        n=SAMPLES,
    )
    environment = Bounded(single, timeout_s=120.0, retries=0)

    async def scenario() -> None:
        queue = StalenessBoundedQueue(
            ledger,
            world,
            world,
            seed=0,
            num_groups=steps * PER_STEP,
            requeue=setting.at_bound == "requeue",
            give_up=environment.give_up,
        )
        objective = ObjectiveConfig(loss="pg")
        pipeline = Pipeline(
            queue=queue,
            environment=environment,
            learner=world,
            weights=world,
            store=world,
            telemetry=world,
            assemble=lambda groups: assign_advantages(groups, objective),
            after_step=world.go_on,
            num_steps=steps,
            prompts_per_step=PER_STEP,
            num_slots=ledger.num_slots,
        )
        await pipeline.run()

    try:
        asyncio.run(scenario())
    finally:
        runner.close()
    return summary(setting, world), world.sampled


def summary(setting: Setting, world: World) -> dict[str, Any]:
    """Of the steps behind the first ones, up to where no further prompt was admitted because the run was to end."""
    last = world.steps - 1 - setting.bound
    seconds = world.at[last] - world.at[SKIPPED]
    lengths = [n for of_step in world.consumed_lengths[SKIPPED + 1 : last + 1] for n in of_step]
    admitted = [
        length(index, sample)
        for index, at in world.admitted_groups
        if world.at[SKIPPED] <= at < world.at[last]
        for sample in range(SAMPLES)
    ]
    half = (SKIPPED + last) // 2
    halves = {
        name: [
            round(statistics.mean(b[name] for b in part), 1)
            for part in (world.backlog[SKIPPED:half], world.backlog[half:last])
        ]
        for name in world.backlog[0]
    }
    expired = world.tokens[Fate.EXPIRED]
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "step_s": seconds / (last - SKIPPED),
        "passes_per_step": round((world.passes[last] - world.passes[SKIPPED]) / (last - SKIPPED), 1),
        "mean_length_consumed": round(statistics.mean(lengths), 2),
        "mean_length_admitted": round(statistics.mean(admitted), 2),
        "long_consumed": round(sum(n == LONGEST for n in lengths) / len(lengths), 4),
        "long_admitted": round(sum(n == LONGEST for n in admitted) / len(admitted), 4),
        "expired_tokens_share": round(expired / (expired + sum(lengths)), 3),
        "expired_groups_per_step": round(world.groups[Fate.EXPIRED] / (last - SKIPPED), 2),
        "staleness_mean": round(statistics.mean(world.staleness), 2),
        "staleness_max": max(world.staleness),
        "backlog_by_halves": halves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--bound", type=int, default=2, help="queue.max_staleness")
    parser.add_argument("--oversample", type=float, default=1.5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--learn-ms", type=float, default=0.1, help="of the learner, per consumed token")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    finish = Setting(bound=arguments.bound, learn_ms=arguments.learn_ms)
    keeping = replace(finish, order="ready", on_sync="continue")
    sides = {
        "finish": finish,
        "continue": keeping,
        "resume": replace(keeping, on_sync="resume"),
        "requeue": replace(keeping, at_bound="requeue", oversample=arguments.oversample),
    }
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for pair in range(2 if arguments.quick else 5):
        sampled = {}
        for side in list(sides) if pair % 2 == 0 else list(sides)[::-1]:
            one, sampled[side] = run(sides[side], arguments.steps)
            found[side].append(one)
            print(f"pair {pair + 1}, {sides[side]}: {one['tokens_per_s']:.0f} tokens/s", flush=True)
        if any(sampled[side] != sampled["finish"] for side in ("continue", "resume")):
            raise SystemExit(f"pair {pair + 1}: the sides consumed different tokens; nothing can be compared")
    seconds_per_token = {side: [1 / one["tokens_per_s"] for one in all_of] for side, all_of in found.items()}
    ratio = {side: ratios(seconds, seconds_per_token["finish"]) for side, seconds in seconds_per_token.items()}
    for one in ratio.values():
        del one["seconds_ours"], one["seconds_theirs"]
    result = {
        "comparison": "consumed tokens per second: order ready, on_sync continue over order admission, on_sync finish",
        **ratio["continue"],
        "equal_results": True,
        "resume_over_finish": ratio["resume"],
        "requeue_over_finish": ratio["requeue"],
        "max_staleness": arguments.bound,
        "steps": arguments.steps,
        "settings": {side: str(setting) for side, setting in sides.items()},
        "median_run": {side: _median_run(all_of) for side, all_of in found.items()},
    }
    print(json.dumps(result))
    if result["ratio_median"] < 1.2:
        raise SystemExit(1)


def _median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    median = sorted(runs, key=lambda one: one["tokens_per_s"])[len(runs) // 2]
    return median | {name: round(median[name], 3) for name in ("tokens_per_s", "step_s")}


if __name__ == "__main__":
    main()
