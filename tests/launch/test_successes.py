"""Replay of successes: a second stream out of the store, with its own bound, correction and fate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_resume import _folder, begin, exit_of, fingerprints, go_on, recipe  # noqa: F401  the same folder and reward

from nearpolicy.errors import ConfigError
from nearpolicy.launch.rows import assembled, replayed
from nearpolicy.records import Fate
from nearpolicy.store.reader import RunReader

REPLAY = ("run.steps=8", "queue.replay.share=0.5", "queue.replay.min_reward=4", "queue.replay.max_age=3")
"""Rewards are 0 to 6."""


def lines(folder: str = "run") -> list[dict]:
    with RunReader(Path(folder)) as run:
        return [line for line in run.metrics() if "policy/loss" in line]


@pytest.mark.parametrize("bound", [0, 2])
def test_successes_of_earlier_steps_are_trained_again_within_their_own_bound(bound):
    begin(*REPLAY, f"queue.max_staleness={bound}")
    with RunReader(Path("run")) as run:
        used = {each.admission: each.step for each in run.consumption()}
        seen = 0
        for step in range(8):
            batch = run.batch(step)
            assert len(batch.replayed) <= 1
            for group in batch.replayed:
                seen += 1
                assert used[group.index] < step and step - group.oldest_version <= 3
            for row in batch.rows:
                if row.replayed:
                    group = next(group for group in batch.replayed if group.index == row.group)
                    assert group.rewards[row.sample] >= 4 and row.advantages.any()
                    own = {r.sample: r for r in assembled(run_config(run), [group], step)}
                    assert np.array_equal(row.advantages, own[row.sample].advantages)
        assert seen >= 3
        ledger, sampled = run.ledger(), run.query("SELECT sum(sampled) FROM rollouts")[0][0]
        again = ledger.pop(Fate.REPLAYED)
        assert sum(ledger.values()) == sampled
    assert again == sum(line.get("replay/tokens", 0) for line in lines()) > 0
    assert max(line.get("replay/age_max", 0) for line in lines()) <= 3
    assert lines()[-1]["ledger/replayed_tokens"] == again
    assert lines()[-1]["ledger/trained_tokens"] == ledger[Fate.TRAINED]
    assert json.loads(Path("run/summary.json").read_text())["ledger"]["replayed"] == again


def run_config(run: RunReader):
    from nearpolicy.config import config_from_dict

    return config_from_dict(run.config, where="run")


def test_replayed_tokens_change_the_weights_and_no_metric_of_the_stream():
    begin(*REPLAY, "queue.max_staleness=0", "run.steps=3")
    begin("run.steps=3", "queue.max_staleness=0", folder="without")
    assert (
        fingerprints("run")[0] == fingerprints("without")[0] and fingerprints("run")[-1] != fingerprints("without")[-1]
    )
    first = next(line for line in lines() if "replay/groups" in line)
    assert (
        first["mismatch/fresh_share"] == 1 and first["mismatch/ess"] == pytest.approx(1) and first["staleness/max"] == 0
    )
    assert 0 < first["replay/ess"] <= 1
    plain = next(line for line in lines("without") if line["step"] == first["step"])
    for name in ("reward/mean", "completion/length_mean", "batch/tokens"):
        assert first[name] == plain[name]


def test_a_run_with_replay_is_taken_up_and_replayed_bit_for_bit():
    settings = (*REPLAY, "queue.max_staleness=0", "checkpoint.every=0", "checkpoint.keep_last=1")
    begin(*settings, folder="whole")
    begin(*settings, stop_after=5)
    import shutil

    shutil.rmtree("run/checkpoints")
    go_on()
    assert fingerprints("run") == fingerprints("whole")
    assert exit_of("replay", "run") == 0
    assert exit_of("export", "run", "out") == 0 and exit_of("import", "out", "again") == 0
    assert exit_of("replay", "again") == 0


def test_learning_ahead_and_minibatches_take_replayed_rows_too():
    begin(*REPLAY, "queue.max_staleness=0", "learner.streaming=true", folder="streaming")
    begin(*REPLAY, "queue.max_staleness=0", "learner.streaming=false", folder="waiting")
    assert fingerprints("streaming") == fingerprints("waiting")
    begin(*REPLAY, "queue.max_staleness=0", "learner.minibatches=2", folder="parts")
    assert exit_of("replay", "parts") == 0


def test_only_successes_with_spread_are_replayed():
    begin("run.steps=2", "queue.max_staleness=0")
    config = recipe(*REPLAY)
    with RunReader(Path("run")) as run:
        groups = [group for group in run.groups() if group.failure is None]
    rows = replayed(config, groups)
    kept = {(row.group, row.sample) for row in rows}
    for group in groups:
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            mean = np.mean(group.rewards)
            expected = reward >= 4 and len(set(group.rewards)) > 1 and not np.isclose(reward, mean)
            assert ((group.index, rollout.sample) in kept) == expected
    assert replayed(config, []) == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("objective.correction=none",), "objective.correction=none"),
        (("objective.scale_rewards=batch",), "objective.scale_rewards=batch"),
        (("objective.advantage=remax", "sampling.num_generations=1"), "sampling.num_generations=1"),
        (("objective.advantage=gae",), "objective.advantage=gae"),
        (("objective.advantage=reinforce_baseline",), "objective.advantage=reinforce_baseline"),
        (("objective.kl_coef=0.1", "objective.kl_in=reward", "objective.reference=initial"), "objective.kl_in=reward"),
    ],
)
def test_objectives_that_cannot_train_old_groups_are_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        recipe(*REPLAY, *settings)
