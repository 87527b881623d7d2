from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.standins import Law, StandInHost, StandInLearner, StandInPrompts, StandInVerifier
from nearpolicy.environments.single_turn import Bounded, SingleTurn
from nearpolicy.generator.fleet import Fleet
from nearpolicy.machine import collect_garbage_rarely
from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.pipeline import Next, Pipeline
from nearpolicy.roles import Sampling
from nearpolicy.rollout_queue.ledger import Ledger
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.writer import SqliteStore
from nearpolicy.sync.publisher import Publisher
from nearpolicy.telemetry.events import Recorder
from nearpolicy.telemetry.metrics import MetricsWriter

PROMPT = np.arange(32, dtype=np.int32)


async def controlled(
    folder: Path, members, *, steps: int, per_step: int, staleness: int, n: int, max_tokens: int
) -> dict[str, Any]:
    store = SqliteStore.create(create_run_folder("", directory=folder), config={})
    telemetry = Recorder(store, wall_anchor=store.wall_anchor, metrics=MetricsWriter(store.folder.metrics))
    fleet = Fleet(members, on_event=partial(telemetry.event, "generator"))
    learner = StandInLearner()
    publisher = Publisher(learner, fleet.links, timeout_s=30.0, on_event=partial(telemetry.event, "sync"))
    verifier = StandInVerifier(telemetry.event)
    inner = SingleTurn(
        fleet,
        verifier,
        render=lambda prompt: PROMPT,
        decode=lambda ids: "The answer is 4.",
        reward_of=lambda verdicts, task: verdicts["correct"].value,
        sampling=Sampling(max_tokens=max_tokens),
        n=n,
        smallest_group=min(2, n),
        timeout_s=600.0,
        earlier=store.recycled.take,
    )
    environment = Bounded(inner, timeout_s=600.0, retries=1, on_retry=store.retried)
    slots = (staleness + 1) * per_step
    queue = StalenessBoundedQueue(
        Ledger(prompts_per_step=per_step, max_staleness=staleness, order="admission"),
        StandInPrompts(),
        store,
        seed=0,
        num_groups=steps * per_step,
        give_up=environment.give_up,
        on_event=partial(telemetry.event, "queue"),
    )
    objective = ObjectiveConfig()
    marks = []

    async def after_step(report):
        own = sum(getattr(m, "own_s", 0.0) for m in members)
        marks.append((time.monotonic(), time.process_time(), own, fleet.calls, time.thread_time()))
        return Next(report.version)

    pipeline = Pipeline(
        queue=queue,
        environment=environment,
        learner=learner,
        weights=publisher,
        store=store,
        telemetry=telemetry,
        assemble=lambda groups, step: assign_advantages(groups, objective),
        after_step=after_step,
        num_steps=steps,
        prompts_per_step=per_step,
        num_slots=slots,
    )
    await publisher.publish()
    await pipeline.run()
    await fleet.close()
    telemetry.close()
    store.close()
    warm = staleness + 2
    (t0, c0, o0, k0, m0), (t1, c1, o1, k1, m1) = marks[warm], marks[-1]
    groups = (len(marks) - 1 - warm) * per_step
    return {
        "groups": groups,
        "groups_per_s": groups / (t1 - t0),
        "cpu_ms_per_group": ((c1 - c0) - (o1 - o0)) / groups * 1e3,
        "main_ms": ((m1 - m0) - (o1 - o0)) / groups * 1e3,
        "standin_ms_per_group": (o1 - o0) / groups * 1e3,
        "calls_per_group": (k1 - k0) / groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generators", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    a = parser.parse_args()
    law = Law(slots=4096 * a.n // a.generators, fixed_s=0.01, each_s=0.0)

    async def go(folder):
        hosts = [StandInHost(f"h{i}", a.generators // a.hosts, law) for i in range(a.hosts)]
        try:
            return await controlled(Path(folder), hosts, steps=a.steps, per_step=512, staleness=7, n=a.n, max_tokens=64)
        finally:
            for h in hosts:
                h.close()

    with tempfile.TemporaryDirectory() as folder:
        if a.profile:
            import cProfile, pstats

            p = cProfile.Profile()
            p.enable()
        collect_garbage_rarely()
        result = asyncio.run(go(folder))
        if a.profile:
            p.disable()
            pstats.Stats(p).sort_stats("tottime").print_stats(35)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
