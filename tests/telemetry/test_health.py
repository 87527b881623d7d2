"""Faults of learning that every run is watched for, and healthy runs in which nothing is said."""

from __future__ import annotations

import math

import pytest

from nearpolicy.telemetry.health import HEALTH, GradientNorms
from nearpolicy.telemetry.integrity import Monitors

HEALTHY = {
    "policy/skipped_updates": 0.0, "policy/grad_norm": 2.0, "policy/clip_high_share": 0.05,
    "policy/clip_low_share": 0.02, "policy/kl_reference": 0.3, "mismatch/ess": 0.8, "mismatch/engine_kl": 0.0,
    "reward/zero_variance_share": 0.4,
    "integrity/duplicate_share": 0.1,
}  # fmt: skip
FAULTS = {
    "a gradient that is not finite": ({"policy/skipped_updates": 1.0}, 1, "policy/skipped_updates"),
    "a spike of the gradient": ({"policy/grad_norm": 500.0}, 1, "policy/grad_norm_ratio"),
    "far from the reference": ({"policy/kl_reference": 40.0}, 2, "policy/kl_reference"),
    "most tokens clipped": ({"policy/clip_high_share": 0.7}, 3, "policy/clip_high_share"),
    "little of the batch left": ({"mismatch/ess": 0.01}, 2, "mismatch/ess"),
    "engine and learner apart": ({"mismatch/engine_kl": 0.4}, 2, "mismatch/engine_kl"),
    "nothing to learn from": ({"reward/zero_variance_share": 1.0}, 20, "reward/zero_variance_share"),
    "one text for all": ({"integrity/duplicate_share": 1.0}, 5, "integrity/duplicate_share"),
    "not a number": ({"mismatch/engine_kl": math.nan}, 2, "mismatch/engine_kl"),
}


def told(lines: list[dict]) -> list[tuple[int, str]]:
    monitors, gradients = Monitors(HEALTH), GradientNorms()
    return [
        (step, alarm.metric)
        for step, line in enumerate(lines)
        for alarm in monitors.observe(step, line | gradients.ratio(line))
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_as_soon_as_it_has_lasted_and_once(fault):
    change, steps, metric = FAULTS[fault]
    lines = [HEALTHY] * 10 + [HEALTHY | change] * steps + [HEALTHY] * 25
    assert told(lines) == [(9 + steps, metric)]


def test_nothing_is_said_of_a_healthy_run():
    lines = [HEALTHY | {"policy/grad_norm": 1.0 + (7 * step) % 5} for step in range(200)]
    assert told(lines) == []
