"""A small run made with the real writer: for every test that needs something to read, and for looking at reports.

python tests/store/synthetic_run.py FOLDER      writes a run and its report
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np

from nearpolicy.records import (
    Admission,
    Batch,
    Fate,
    Finish,
    Group,
    Prompt,
    Rollout,
    Row,
    Segment,
    StepReport,
    Verdict,
    VersionRecord,
)
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.schema import EvaluatedSample
from nearpolicy.store.writer import SqliteStore
from nearpolicy.telemetry.events import Recorder
from nearpolicy.telemetry.metrics import MetricsWriter

CONFIG = {
    "run": {"name": "synthetic", "seed": 0},
    "model": {"path": "SmolLM2-135M-Instruct"},
    "queue": {"max_staleness": 1, "prompts_per_step": 4},
}
NASTY = "end\x00of\ud800text\u2028\udfff\ud83d\ude00\x1b[31m\u202e\x9b31m</script>\r\n[bold]"


def admission(index: int, **changes: object) -> Admission:
    question = f"What is {index % 30 + 1} + {7 * index % 30 + 1}?"
    prompt = Prompt(id=f"sum-{index}", task="sums", text=question, columns={"answer": index % 30 + 7 * index % 30 + 2})
    return Admission(**{"index": index, "prompt": prompt, "seed": 0, "version": 0} | changes)


def segment(num_tokens: int, version: int, rng: np.random.Generator, finish: Finish = Finish.STOP, **extras) -> Segment:
    return Segment(
        context_ids=rng.integers(0, 50_000, 9),
        token_ids=rng.integers(0, 50_000, num_tokens),
        mask=np.ones(num_tokens, bool),
        behavior_logprobs=-rng.exponential(0.4, num_tokens),
        versions=np.full(num_tokens, version),
        finish=finish,
        extras=extras,
    )


def group(index: int, *, skill: float = 0.5, version: int = 0, size: int = 4) -> Group:
    """A group whose rollouts are right with chance ``skill``; its numbers depend on its index alone."""
    rng = np.random.default_rng(index)
    rollouts, verdicts, rewards = [], [], []
    for sample in range(size):
        right, formed = rng.random() < skill, rng.random() < 0.4 + skill / 2
        length = int(rng.integers(3, 12 - int(5 * skill)))
        text = f"The answer is {index % 30 + 7 * index % 30 + 2}" if right else "Let me think about it, it is 12"
        rollouts.append(Rollout(sample=sample, segments=(segment(length, version, rng),), text=text, numerics="exact"))
        verdicts.append({"answer": Verdict.scored(float(right)), "format": Verdict.scored(float(formed), short=1.0)})
        rewards.append(0.9 * right + 0.1 * formed)
    return Group(
        admission=admission(index, version=version),
        rollouts=tuple(rollouts),
        verdicts=tuple(verdicts),
        rewards=tuple(rewards),
    )


def batch(step: int, groups: list[Group]) -> Batch:
    rows = []
    for each in groups:
        mean = sum(each.rewards) / len(each.rewards)
        for rollout, reward in zip(each.rollouts, each.rewards, strict=True):
            of_rollout = rollout.segments[0]
            advantages = np.full(len(of_rollout.token_ids), reward - mean)
            rows.append(
                Row(
                    group=each.index,
                    sample=rollout.sample,
                    segment=of_rollout,
                    trained=of_rollout.mask,
                    advantages=advantages,
                )
            )
    return Batch(step=step, places=len(groups), groups=tuple(groups), rows=tuple(rows))


def trained(groups: list[Group]) -> dict[tuple[int, int], dict[Fate, int]]:
    fate = {True: Fate.TRAINED, False: Fate.ZERO_ADVANTAGE}
    return {(g.index, r.sample): {fate[g.has_signal]: r.num_sampled} for g in groups for r in g.rollouts}


class _Clock:
    """Time that the run itself moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_run(parent: Path, *, steps: int = 4, bad_steps: tuple[int, ...] = (), per_step: int = 4) -> RunFolder:
    """A finished run; at ``bad_steps`` the gradient norm is infinite and the KL is not a number."""
    folder = create_run_folder("synthetic", parent=parent)
    with SqliteStore.create(folder, config=CONFIG, packages={"torch": "2.13.0", "numpy": np.__version__}) as store:
        clock = _Clock()
        recorder = Recorder(store, wall_anchor=time.time(), metrics=MetricsWriter(folder.metrics), clock=clock)
        _publish(store, 0)
        _evaluate(store, 0, skill=0.2)
        for step in range(steps):
            skill = 0.2 + 0.6 * (1 - math.exp(-3 * step / steps))
            groups = [group(step * per_step + i, skill=skill, version=max(0, step - 1)) for i in range(per_step)]
            for each in groups:
                store.admitted(each.admission)
                store.filled(each)
            _tell_time(recorder, clock, step)
            report = StepReport(version=step + 1, updates=step + 1, metrics={})
            store.consumed(batch(step, groups), report, trained(groups))
            recorder.log_step(step, _metrics(step, steps, groups, bad=step in bad_steps))
            _publish(store, step + 1)
        lost = group(steps * per_step, version=steps)
        store.discarded(lost, Fate.FAILED, "the verifier's worker died twice")
        store.filled(group(steps * per_step + 1, version=steps))
        _evaluate(store, steps, skill=0.75)
        recorder.close()
    folder.write_summary(_summary(steps))
    return folder


def _publish(store: SqliteStore, version: int) -> None:
    parent = version - 1 if version else None
    fingerprint = f"{version + 1:032x}"
    record = VersionRecord(lineage=0, version=version, updates=version, fingerprint=fingerprint, parent=parent)
    store.published(record, 0.2)


def _evaluate(store: SqliteStore, version: int, skill: float) -> None:
    rng = np.random.default_rng(version)
    samples = []
    for mode, count in (("accuracy", 1), ("pass", 4)):
        for row in range(40):
            for sample in range(count):
                right = bool(rng.random() < skill)
                samples.append(
                    EvaluatedSample(
                        task="sums",
                        mode=mode,
                        temperature=0.0 if mode == "accuracy" else 1.0,
                        row=row,
                        sample=sample,
                        prompt=f"What is {row} + {row + 3}?",
                        text=f"{2 * row + 3}" if right else f"Sure! {row} plus something <b>is</b> {row}",
                        correct=right,
                        value=float(right),
                        num_tokens=7,
                        finish="stop",
                        version=version,
                    )
                )
    store.evaluated(samples)


def _tell_time(recorder: Recorder, clock: _Clock, step: int) -> None:
    def spend(role: str, kind: str, seconds: float, **numbers: object) -> None:
        clock.now += seconds
        recorder.event(role, kind, seconds=seconds, **numbers)

    wobble = 1 + 0.3 * math.sin(step)
    spend("generator", "prefill", 0.4, tokens=80, cached=240, version=step)
    for token in range(80):
        clock.now += 0.05 * wobble
        recorder.event("generator", "decode_step", batch=16, context_sum=900, ms=50, sampled=16, running=79 - token)
        if token % 8 == 7:
            recorder.event("verifier", "verify", seconds=0.12, queue_s=0.01, admission=step, sample=token // 8)
    recorder.event("learner", "idle", seconds=3.0 * wobble, cause="no_batch")
    recorder.event("queue", "take", step=step, groups=4, wait_s=1.0, staleness_max=min(step, 1))
    before = clock.now
    spend("learner", "annotate", 0.7, step=step, tokens=120)
    spend("learner", "forward_backward", 2.1 * wobble, step=step, tokens=120, rows=16)
    spend("learner", "optim", 0.3, step=step, update=step)
    recorder.event("generator", "idle", seconds=0.8 * (clock.now - before), cause="staleness_bound")
    spend("sync", "export", 0.15, bytes=540_000_000)
    spend("sync", "load", 0.2, bytes=540_000_000)
    spend("sync", "compare", 0.05, tensors=272)
    recorder.event("generator", "swap", seconds=0.2, running=0)


def _metrics(step: int, steps: int, groups: list[Group], *, bad: bool) -> dict[str, float]:
    rewards = [reward for each in groups for reward in each.rewards if reward is not None]
    lengths = [rollout.num_sampled for each in groups for rollout in each.rollouts]
    return {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/answer/mean": sum(reward > 0.5 for reward in rewards) / len(rewards),
        "reward/format/mean": 0.4 + 0.5 * step / steps,
        "reward/zero_variance_share": sum(not each.has_signal for each in groups) / len(groups),
        "completion/length_mean": sum(lengths) / len(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_share": 0.3 / (step + 1),
        "policy/entropy": 1.4 / (1 + 0.1 * step),
        "policy/loss": 0.02 * math.sin(step),
        "policy/kl_reference": math.nan if bad else 0.002 * step,
        "policy/grad_norm": math.inf if bad else 0.8 + 0.3 * math.sin(2 * step),
        "learner/learning_rate": 1e-5 * min(1.0, (step + 1) / 4),
        "mismatch/logprob_diff_mean": 0.0,
        "mismatch/logprob_diff_p99": 0.0,
        "mismatch/logprob_diff_max": 0.0,
        "staleness/mean": min(step, 1) * 0.8,
        "staleness/max": min(step, 1),
        "throughput/tokens_per_s": 40 + 5 * math.sin(step),
    }


def _summary(steps: int) -> dict[str, object]:
    return {
        "steps": steps,
        "wall_s": 9.1 * steps,
        "peak_memory_mb": 3890.0,
        "held_out": {},
        "ledger": {},
        "staleness": {"mean": 0.8, "max": 1},
        "mismatch": {"mean": 0.0, "p99": 0.0, "max": 0.0},
        "packages": {},
    }


if __name__ == "__main__":
    from nearpolicy.launch.report import write_report

    print(write_report(make_run(Path(sys.argv[1]), steps=24, bad_steps=(9, 15)).path))
