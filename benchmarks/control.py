"""What directing a run costs: groups a second, calls and processor time per group, where generators compute nothing.

    python -m benchmarks.control [--quick] [--no-ray] [--only NAME]

The real control plane (pipeline, queue, single-turn environment, dispatch, store, recorder, publisher, advantages by
GRPO) runs with stand-ins for generators, verifier and learner (benchmarks/standins.py): 4,096 groups in flight, steps
of 512 groups, every step published to every generator, consumption in order of admission. A small group is 2 rollouts
of 16 tokens on average behind a prompt of 32; a large one 8 rollouts of 100.

in_process    8, 64 and 256 generators in 8 hosts, in the process of the controller: its processor time is that of the
              process less what the stand-ins have taken themselves
ray           256 generators in 8 actors, and 16 that are actors of their own, the record in one more: the processor
              time of the controller's process, Ray's threads in it included
decision      one choice of a replica, and its entry: microseconds on the clock, and of the processor

Measured between the first and the last step that find all slots in use. Prompts, tokens and log-probabilities go
through the controller here, as in a run with generators in other processes: from `collect` to the environment, the
record and the learner. `loop_late_ms` says how late the controller's loop is for anything else. What else runs
on the machine slows all of it, processor time too: run it alone, and see `load_average` (this benchmark alone makes
between 1 and 3, with 16 actors up to 11). So does the host: `yardstick_ms` is what the same piece of Python takes
before and after a run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.standins import TEXT, Law, RayHost, StandInHost, StandInLearner, StandInPrompts, StandInVerifier
from nearpolicy.environments.single_turn import Bounded, SingleTurn
from nearpolicy.generator.dispatch import Dispatch
from nearpolicy.generator.fleet import Fleet
from nearpolicy.launch.ray.parcels import Keeper
from nearpolicy.launch.ray.record import ActorRecord, start_record_actor
from nearpolicy.machine import collect_garbage_rarely
from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.pipeline import Next, Pipeline
from nearpolicy.records import Fate, StepReport, VersionRecord
from nearpolicy.roles import Load, Member, Request, Sampling
from nearpolicy.rollout_queue.ledger import Ledger
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.record import RunRecord
from nearpolicy.store.writer import SqliteStore
from nearpolicy.sync.publisher import Publisher
from nearpolicy.telemetry.events import Recorder
from nearpolicy.telemetry.metrics import MetricsWriter

PER_STEP, STALENESS = 512, 7
IN_FLIGHT = PER_STEP * (STALENESS + 1)
GENERATES_S = 0.8
"""How long a rollout takes on average. A step waits for the slowest of its rollouts, which takes two to three times
as long: that bounds what 4,096 groups in flight can give to about 1,900 a second."""
PROMPT = np.arange(32, dtype=np.int32)
SIZES = {"small": (2, 16), "large": (8, 100)}
"""Rollouts of a group, and tokens of each on average."""


def law_of(size: str, generators: int) -> Law:
    n, tokens = SIZES[size]
    return Law(
        mean=tokens,
        sigma=0.3,
        longest=4 * tokens,
        fixed_s=GENERATES_S / tokens,
        each_s=0.0,
        slots=-(-IN_FLIGHT * n // generators),
    )


class Controlled:
    """A run over stand-ins, and what it took."""

    def __init__(
        self,
        folder: Path,
        members: Sequence[Member],
        size: tuple[int, int],
        steps: int,
        *,
        per_step: int = PER_STEP,
        open_store: Callable[[RunFolder], RunRecord] | None = None,
        after_step: Callable[[Controlled, int], Awaitable[None]] | None = None,
    ) -> None:
        """``size``: rollouts of a group, and tokens of each on average. ``after_step`` is told how many there were."""
        n, tokens = size
        self._members, self._steps, self._per_step = members, steps, per_step
        self._and_then = after_step
        self._marks: list[dict[str, float]] = []
        self._late: list[float] = []
        made = create_run_folder("", directory=folder)
        self._store = SqliteStore.create(made, config={}) if open_store is None else open_store(made)
        self._telemetry = Recorder(
            self._store, wall_anchor=self._store.wall_anchor, metrics=MetricsWriter(self._store.folder.metrics)
        )
        tell = self._telemetry.event
        self.fleet = Fleet(members, on_event=partial(tell, "generator"))
        self.learner = StandInLearner()
        environment = Bounded(
            SingleTurn(
                self.fleet,
                StandInVerifier(tell),
                render=lambda prompt: PROMPT,
                decode=lambda ids: TEXT,
                reward_of=lambda verdicts, task: verdicts["correct"].value,
                sampling=Sampling(max_tokens=4 * tokens),
                n=n,
                timeout_s=600.0,
                earlier=self._store.recycled.take,
            ),
            timeout_s=600.0,
            retries=1,
            on_retry=self._store.retried,
        )
        objective = ObjectiveConfig()
        self._pipeline = Pipeline(
            queue=StalenessBoundedQueue(
                Ledger(prompts_per_step=per_step, max_staleness=STALENESS, order="admission"),
                StandInPrompts(),
                self._store,
                seed=0,
                num_groups=steps * per_step,
                give_up=environment.give_up,
                on_event=partial(tell, "queue"),
            ),
            environment=environment,
            learner=self.learner,
            weights=self,
            store=self._store,
            telemetry=self._telemetry,
            assemble=lambda groups, step: assign_advantages(groups, objective),
            after_step=self._after_step,
            num_steps=steps,
            prompts_per_step=per_step,
            num_slots=per_step * (STALENESS + 1),
        )

    async def run(self) -> None:
        """To the end; every group is consumed once, in order, and every token has a fate."""
        await self.publish()
        watch = asyncio.create_task(self._watch())
        await self._pipeline.run()
        watch.cancel()
        await self.fleet.close()
        self._telemetry.close()
        self._store.close()
        self._require_all_recorded()

    async def publish(self) -> VersionRecord:
        """To the members that are there now."""
        tell = partial(self._telemetry.event, "sync")
        return await Publisher(self.learner, self.fleet.links, timeout_s=30.0, on_event=tell).publish()

    def took(self) -> dict[str, Any]:
        """What it cost while all slots were in use."""
        first, last = self._marks[STALENESS + 1], self._marks[-STALENESS - 3]
        groups = (last["step"] - first["step"]) * self._per_step
        took = {name: last[name] - first[name] for name in first}
        late = sorted(self._late)
        return {
            "groups": int(groups),
            "groups_per_s": round(groups / took["wall_s"]),
            "controller_ms_per_group": round((took["process_s"] - took["standins_s"]) / groups * 1e3, 3),
            "main_thread_ms_per_group": round((took["thread_s"] - took["standins_s"]) / groups * 1e3, 3),
            "calls_per_group": round(took["calls"] / groups, 3),
            "load_average": round(os.getloadavg()[0], 1),
            "loop_late_ms": {q: round(late[int(len(late) * q / 100)] * 1e3, 1) for q in (50, 95)},
        }

    async def _after_step(self, report: StepReport) -> Next:
        self._marks.append(
            {
                "step": report.version,
                "wall_s": time.monotonic(),
                "process_s": time.process_time(),
                "thread_s": time.thread_time(),
                "standins_s": sum(getattr(member, "own_s", 0.0) for member in self._members),
                "calls": self.fleet.calls,
            }
        )
        if self._and_then is not None:
            await self._and_then(self, report.version)
        return Next(report.version)

    async def _watch(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            self._late.append(time.monotonic() - begin - 0.01)

    def _require_all_recorded(self) -> None:
        with RunReader(self._store.folder.path) as run:
            consumed, ledger = [place.admission for place in run.consumption()], run.ledger()
        wanted = self._steps * self._per_step
        if consumed != list(range(wanted)):
            raise SystemExit(f"{len(consumed)} groups were consumed of {wanted}, or out of order")
        if set(ledger) - {Fate.TRAINED, Fate.ZERO_ADVANTAGE}:
            raise SystemExit(f"tokens have other fates than expected: {ledger}")


def in_process(size: str, generators: int, steps: int) -> dict[str, Any]:
    async def play(folder: str) -> dict[str, Any]:
        hosts = [StandInHost(f"host {i}", generators // 8, law_of(size, generators)) for i in range(8)]
        try:
            run = Controlled(Path(folder), hosts, SIZES[size], steps)
            await run.run()
            return run.took()
        finally:
            for host in hosts:
                host.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(play(folder))


def in_actor(folder: RunFolder, actor: Any) -> RunRecord:
    import ray

    return ActorRecord.create(actor, folder, config={}, end=partial(ray.kill, actor), limit_s=60.0)


def on_ray(size: str, hosts: int, each: int, steps: int) -> dict[str, Any]:
    async def play(folder: str) -> dict[str, Any]:
        record = start_record_actor()
        members = [RayHost(f"host {i}", each, law_of(size, hosts * each), Keeper(record)) for i in range(hosts)]
        try:
            run = Controlled(Path(folder), members, SIZES[size], steps, open_store=partial(in_actor, actor=record))
            await run.run()
            return run.took()
        finally:
            for member in members:
                member.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(play(folder))


def decisions(generators: int, count: int = 4000) -> dict[str, float]:
    """With half of the room in use, and every replica measured."""
    dispatch, chance = Dispatch(), np.random.default_rng(0)
    dispatch.newest = 0
    for number in range(generators):
        dispatch.add()
        dispatch.holds(number, 0)
        for second in (1.0, 2.0):
            rate = 100 + chance.random()
            load = Load(slots=2 * count, running=8, sampled=int(rate * second), busy_s=second, at=second)
            dispatch.observe(number, load)
    took: dict[str, list[float]] = {"clock": [], "processor": []}
    for index in range(count):
        request = Request(
            id=str(index), token_ids=PROMPT, sampling=Sampling(max_tokens=64), n=2, seed=0, admission=index
        )
        begin = time.perf_counter(), time.thread_time()
        dispatch.placed(dispatch.choose(request), request)
        took["clock"].append((time.perf_counter() - begin[0]) * 1e6)
        took["processor"].append((time.thread_time() - begin[1]) * 1e6)
    found = {}
    for name, each in took.items():
        each.sort()
        quantiles = {"p50": each[count // 2], "p99": each[count * 99 // 100], "max": each[-1]}
        found |= {f"{name}_{quantile}_us": round(value, 1) for quantile, value in quantiles.items()}
    return found


YARDSTICK = """
import time
def work():
    begin, kept = time.thread_time(), {}
    for number in range(100_000):
        kept[number & 4095] = number, str(number)
    return time.thread_time() - begin
print(min(work() for _ in range(9)) * 1e3)
"""


def yardstick_ms() -> float:
    """Processor time of the same small piece of Python in a process of its own, the best of nine: what the host gives
    at the moment. On machines that share their cores it varies by half within an hour, and all processor time with it.
    """
    return float(subprocess.run([sys.executable, "-c", YARDSTICK], capture_output=True, check=True).stdout)


def median_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all runs, the one whose processor time is in the middle, with the range of it."""
    ordered = sorted(runs, key=lambda run: run["controller_ms_per_group"])
    ranges = {
        f"{name}_range": [min(run[name] for run in runs), max(run[name] for run in runs)]
        for name in ("groups_per_s", "controller_ms_per_group", "yardstick_ms")
    }
    return ordered[len(ordered) // 2] | ranges | {"runs": len(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run of each instead of three long ones")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--only", metavar="NAME", help="in_process, ray or decision")
    arguments = parser.parse_args()
    steps, repeats = (26, 1) if arguments.quick else (48, 3)
    wanted = {arguments.only} if arguments.only else {"in_process", "ray", "decision"}
    collect_garbage_rarely()
    result: dict[str, Any] = {"in_flight": IN_FLIGHT, "groups_per_step": PER_STEP, "sizes": SIZES}

    def repeated(name: str, run: Any) -> dict[str, Any]:
        found = []
        for _ in range(repeats):
            before = yardstick_ms()
            found.append(run() | {"yardstick_ms": round((before + yardstick_ms()) / 2, 2)})
            print(f"{name}: {found[-1]}", file=sys.stderr)
        return median_of(found)

    if "decision" in wanted:
        result["decision"] = {str(count): decisions(count) for count in (8, 64, 256)}
    if "in_process" in wanted:
        cases = [("small", 8), ("small", 64), ("small", 256), ("large", 256)]
        found = {f"{size}, {n}": repeated(f"{size}, {n}", partial(in_process, size, n, steps)) for size, n in cases}
        few, many = found["small, 8"], found["small, 256"]
        result["in_process"] = found | {
            "256_against_8": {
                name: round(many[name] / few[name], 3) for name in ("groups_per_s", "controller_ms_per_group")
            }
        }
    if "ray" in wanted and not arguments.no_ray:
        import ray

        ray.init(num_cpus=64, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        try:
            cases = [("small", 8, 32), ("small", 16, 1), ("large", 8, 32)]
            result["ray"] = {
                f"{size}, {hosts} actors x {each}": repeated(
                    f"ray {size}, {hosts} x {each}", partial(on_ray, size, hosts, each, steps)
                )
                for size, hosts, each in cases
            }
        finally:
            ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
