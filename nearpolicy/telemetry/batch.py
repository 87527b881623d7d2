"""What a batch says before the learner sees it: the fate of every token, rewards, lengths, staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nearpolicy.records import BASELINE, Batch, Fate, Outcome, StepReport
from nearpolicy.telemetry.integrity import integrity_metrics


def token_fates(batch: Batch, report: StepReport) -> dict[tuple[int, int], dict[Fate, int]]:
    """(admission index, sample) -> fate -> sampled tokens, for every rollout of the batch; the sums are exact."""
    fates: dict[tuple[int, int], dict[Fate, int]] = {}
    for row in report.rows or batch.rows:
        if row.replayed:
            continue
        counts = fates.setdefault((row.group, row.sample), {})
        for fate, count in (
            (Fate.TRAINED, row.num_useful),
            (Fate.ZERO_ADVANTAGE, row.num_trained - row.num_useful),
            (Fate.MASKED, row.segment.num_sampled - row.num_trained),
        ):
            if count:
                counts[fate] = counts.get(fate, 0) + count
    there = {group for group, _ in fates}
    for group in batch.groups:
        if group.index not in there:  # it was left out of the batch, and its place stayed empty
            fates |= {(group.index, r.sample): {Fate.FILTERED: r.num_sampled} for r in group.everything}
        elif group.baseline is not None:
            fates[group.index, BASELINE] = {Fate.BASELINE: group.baseline.rollout.num_sampled}
    return fates


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch, known before the learner sees it; those of its samples, but for the
    mean of baselines."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = [reward for group in batch.groups for reward in group.rewards if reward is not None]
    lengths = [rollout.num_sampled for rollout in rollouts]
    staleness = [batch.step - group.oldest_version for group in batch.groups]
    baselines = [group.baseline.reward for group in batch.groups if group.baseline is not None]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/baseline_mean": _mean([reward for reward in baselines if reward is not None]),
        "reward/zero_variance_share": _mean([not group.has_signal for group in batch.groups]),
        "reward/unscored": float(sum(reward is None for group in batch.groups for reward in group.rewards)),
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(lengths, default=None),
        "completion/truncated_share": _mean([r.finish.value == "length" for r in rollouts]),
        "staleness/mean": _mean(staleness),
        "staleness/max": float(max(staleness, default=0)),
        "batch/groups": float(len(batch.groups)),
        "batch/tokens": float(sum(lengths)),
    }
    if batch.replayed:
        ages = [batch.step - group.oldest_version for group in batch.replayed]
        metrics |= {
            "replay/groups": float(len(batch.replayed)),
            "replay/tokens": float(sum(row.num_trained for row in batch.rows if row.replayed)),
            "replay/age_mean": _mean(ages),
            "replay/age_max": float(max(ages)),
        }
    metrics |= integrity_metrics(batch)
    metrics |= {f"reward/{name}": _mean(values) for name, values in _by_source(batch).items()}
    metrics |= {f"verifier/{name}/failed_share": _mean(values) for name, values in _failures(batch).items()}
    for task in sorted({group.admission.prompt.task for group in batch.groups}):
        own = [r for g in batch.groups if g.admission.prompt.task == task for r in g.rewards if r is not None]
        metrics[f"task/{task}/reward"] = _mean(own)
    return {name: value for name, value in metrics.items() if value is not None}


def group_losses(batch: Batch, failed: int, filtered: int, expired: int = 0) -> dict[str, float]:
    """Groups that did not come into the batch since the step before, and those in it whose place stayed empty."""
    empty = len({group.index for group in batch.groups} - {row.group for row in batch.rows})
    return {
        "batch/failed_groups": float(failed),
        "batch/filtered_groups": float(filtered + empty),
        "batch/expired_groups": float(expired),
    }


def step_times(batch: Batch, wait_s: float, step_s: float) -> dict[str, float]:
    """Where the wall time of a step went, seen from in front of the loop, and consumed tokens per second of it."""
    tokens = sum(rollout.num_sampled for group in batch.groups for rollout in group.rollouts)
    return {"time/wait_s": wait_s, "time/step_s": step_s, "throughput/tokens_per_s": tokens / step_s if step_s else 0.0}


def _by_source(batch: Batch) -> Mapping[str, list[float]]:
    """Values as ``source/mean``, and their named parts as ``source/part``."""
    values: dict[str, list[float]] = {}
    for group in batch.groups:
        for verdicts in group.verdicts:
            for source, verdict in verdicts.items():
                if verdict.value is not None:
                    values.setdefault(f"{source}/mean", []).append(verdict.value)
                for part, value in verdict.parts.items():
                    values.setdefault(f"{source}/{part}", []).append(value)
    return values


def _failures(batch: Batch) -> Mapping[str, list[bool]]:
    """By source: which of its verdicts failed."""
    failed: dict[str, list[bool]] = {}
    for group in batch.groups:
        for verdicts in group.verdicts:
            for source, verdict in verdicts.items():
                failed.setdefault(source, []).append(verdict.outcome is Outcome.FAILED)
    return failed


def _mean(values: Sequence[float]) -> float | None:
    """None where there is nothing to take a mean of: the metric is then left out, not made up."""
    return float(np.mean(values)) if len(values) else None
