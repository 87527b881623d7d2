"""What a batch says of itself when its groups have greedy completions: they count in the ledger and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_run import group, segment

from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import BASELINE, Baseline, Batch, Fate, Finish, Rollout, StepReport, Verdict
from nearpolicy.telemetry.batch import batch_metrics, step_times, token_fates

REPORT = StepReport(version=1, updates=1, metrics={})
OBJECTIVE = ObjectiveConfig(advantage="remax")


def greedy(reward: float, length: int = 40) -> Baseline:
    """Longer than any sample, cut, and with a verdict that no sample has."""
    cut = segment(length, 0, np.random.default_rng(5), Finish.LENGTH)
    rollout = Rollout(sample=BASELINE, segments=(cut,), text="greedy", numerics="exact")
    verdicts = {"answer": Verdict.scored(9.0), "greedy": Verdict.failed("never seen in a sample")}
    return Baseline(rollout=rollout, verdicts=verdicts, reward=reward)


def batches() -> tuple[Batch, Batch]:
    """The same two groups without greedy completions and with them."""
    plain = (group(0), group(1))
    beside = (replace(plain[0], baseline=greedy(5.0)), replace(plain[1], baseline=greedy(7.0, 30)))
    rows = assign_advantages(beside, OBJECTIVE)
    return tuple(Batch(step=0, places=2, groups=groups, rows=rows) for groups in (plain, beside))


def test_greedy_completions_have_a_mean_of_their_own_and_change_no_other_metric():
    plain, beside = (batch_metrics(batch) for batch in batches())
    assert beside.pop("reward/baseline_mean") == 6.0
    assert "reward/baseline_mean" not in plain
    assert beside == plain
    plain, beside = (step_times(batch, 1.0, 2.0) for batch in batches())
    assert beside == plain


def test_tokens_of_a_greedy_completion_have_one_fate_and_are_never_trained():
    _, batch = batches()
    fates = token_fates(batch, REPORT)
    assert (fates[0, BASELINE], fates[1, BASELINE]) == ({Fate.BASELINE: 40}, {Fate.BASELINE: 30})
    assert sum(n for of in fates.values() for n in of.values()) == sum(g.num_sampled for g in batch.groups)
    assert all(row.sample != BASELINE for row in batch.rows)
    left_out = replace(batch, rows=tuple(row for row in batch.rows if row.group == 1))
    assert token_fates(left_out, REPORT)[0, BASELINE] == {Fate.FILTERED: 40}


@pytest.mark.parametrize(
    ("rewards", "baseline", "share"), [([1.0, 1.0], 1.0, 1.0), ([1.0, 1.0], 0.5, 0.0), ([1.0], 0.0, 0.0), ([0], 0, 1.0)]
)
def test_a_group_whose_samples_agree_carries_signal_if_the_greedy_completion_does_not(rewards, baseline, share):
    of_group = replace(group(0, size=len(rewards)), rewards=tuple(rewards), baseline=greedy(baseline))
    batch = Batch(step=0, places=1, groups=(of_group,), rows=assign_advantages([of_group], OBJECTIVE))
    assert batch_metrics(batch)["reward/zero_variance_share"] == share
    assert any(row.advantages.any() for row in batch.rows) == (share == 0.0)


def test_the_oldest_version_of_a_group_is_also_that_of_its_greedy_completion():
    newer = group(0, version=3)
    older = Rollout(sample=BASELINE, segments=(segment(2, 2, np.random.default_rng(0)),), text="", numerics="exact")
    assert (newer.oldest_version, replace(newer, baseline=Baseline(rollout=older)).oldest_version) == (3, 2)
