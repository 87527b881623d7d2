"""Older groups count less below the bound, the same way in a run, its resume and its replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_resume import _folder, exit_of  # noqa: F401  the same folder, recipe and reward

from nearpolicy.config import load_recipe
from nearpolicy.errors import ConfigError
from nearpolicy.launch.rows import age_weight
from nearpolicy.launch.session import Session, run_session
from nearpolicy.store.reader import RunReader


def test_weights_fall_with_the_steps_beyond_the_soft_bound():
    assert [age_weight(staleness, 1) for staleness in range(5)] == [1, 1, 1 / 2, 1 / 3, 1 / 4]


def test_advantages_of_older_groups_are_multiplied_and_a_replay_agrees(capsys):
    settings = ("queue.max_staleness=3", "queue.soft_staleness=0", "run.steps=5")
    run_session(Session(config=load_recipe(Path("demo.yaml"), settings), say=lambda text: None))
    weights = set()
    with RunReader(Path("run")) as run:
        for step in range(5):
            batch = run.batch(step)
            for group in batch.groups:
                rewards = np.array(group.rewards)
                if rewards.std() == 0:
                    continue
                weight = age_weight(step - group.oldest_version, 0)
                plain = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                told = {row.sample: row.advantages[0] for row in batch.rows if row.group == group.index}
                assert [told[i] for i in range(3)] == pytest.approx(weight * plain, rel=1e-3)
                weights.add(weight)
    assert len(weights) > 1  # some were older than others
    assert exit_of("replay", "run") == 0
    assert "the same, bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("queue.max_staleness=1", "queue.soft_staleness=1"), "has no effect"),
        (("queue.max_staleness=0", "queue.adaptive_slots=true"), "has no effect"),
        (("queue.max_staleness=2", "queue.soft_staleness=0", "objective.advantage=gae"), "soft_staleness"),
    ],
)
def test_settings_without_effect_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_recipe(Path("demo.yaml"), settings)


def test_a_monitor_lowers_staleness_and_slots_follow():
    monitor = "monitors=[{metric: completion/length_mean, above: 0, action: lower_staleness}]"
    config = load_recipe(Path("demo.yaml"), ["queue.max_staleness=3", monitor, "run.steps=6"])
    said: list[str] = []
    run_session(Session(config=config, say=said.append))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["queue/slots"] for line in lines if "queue/slots" in line] == [8, 6, 4, 2, 2, 2]
    assert sum("fewer groups are admitted" in line for line in said) == 1
    with RunReader(Path("run")) as run:
        assert len(list(run.events("alarm"))) == 1
