"""Faults of learning that every run is watched for, each named by the monitor meant for it; healthy runs in which
nothing is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from nearpolicy.telemetry.config import MonitorConfig
from nearpolicy.telemetry.health import HEALTH
from nearpolicy.telemetry.integrity import Monitors
from nearpolicy.telemetry.trends import Trends

START, LENGTH, EVERY = 30, 80, 10
"""A fault begins with this step; an evaluation stands before every tenth."""


def healthy(step: int) -> dict[str, float]:
    """A run that learns: reward from 0.2 to 0.8 as the policy moves away from its reference, with noise."""
    noise = 0.1 * math.sin(7.3 * step)
    done = 1 - math.exp(-step / 20)
    return {
        "policy/skipped_updates": 0.0,
        "policy/grad_norm": 2.0 + (7 * step) % 5,
        "policy/clip_high_share": 0.05,
        "policy/clip_low_share": 0.02,
        "policy/kl_reference": 0.3 * done,
        "policy/entropy": 1.0 - 0.8 * done + noise,
        "completion/length_mean": 100 * (1 + done) * (1 + noise),
        "mismatch/ess": 0.8,
        "mismatch/engine_kl": 0.0,
        "mismatch/probe_kl": 0.0,
        "reward/zero_variance_share": 0.4,
        "reward/mean": 0.2 + 0.6 * done + noise,
        "reward/right/mean": 0.2 + 0.6 * done + noise,
        "reward/judge/mean": 0.3 + 0.3 * done + noise,
        "integrity/duplicate_share": 0.1,
        "verifier/judge/flip_rate": 0.01,
    } | ({"evaluation/sums/accuracy": 0.2 + 0.5 * done} if step % EVERY == 0 else {})


def steadily(metric: str, value: float) -> Callable[[dict, int], Mapping[str, float]]:
    return lambda line, since: {metric: value} if metric in line else {}


def grows(metric: str, factor: float) -> Callable[[dict, int], Mapping[str, float]]:
    return lambda line, since: {metric: line[metric] * factor**since}


def gamed(line: dict, since: int) -> Mapping[str, float]:
    """A judge is pleased more and more, and fewer answers are right."""
    right = 0.58 - 0.01 * since
    worse = {} if "evaluation/sums/accuracy" not in line else {"evaluation/sums/accuracy": right}
    return worse | {"reward/judge/mean": min(1.0, 0.6 + 0.01 * since), "reward/right/mean": right}


def memorised(line: dict, since: int) -> Mapping[str, float]:
    """All that is trained on comes out right, and no more of the rest than before."""
    flat = {} if "evaluation/sums/accuracy" not in line else {"evaluation/sums/accuracy": 0.58}
    return flat | {"reward/right/mean": 1.0}


def over_optimised(line: dict, since: int) -> Mapping[str, float]:
    """The policy goes on, and gets less for it."""
    return {"policy/kl_reference": 0.3 + 0.01 * since, "reward/mean": line["reward/mean"] - 0.02 * since}


FAULTS = {
    "a gradient that is not finite": (
        lambda line, since: {"policy/skipped_updates": 1.0, "policy/grad_norm": math.nan},
        "policy/skipped_updates",
    ),
    "a gradient that is infinite": (
        lambda line, since: {"policy/skipped_updates": 1.0, "policy/grad_norm": math.inf, "policy/loss": math.inf},
        "policy/skipped_updates",
    ),
    "a spike of the gradient": (
        lambda line, since: {"policy/grad_norm": 500.0} if since == 0 else {},
        "policy/grad_norm_ratio",
    ),
    "KL that runs away": (grows("policy/kl_reference", 1.15), "policy/kl_reference"),
    "most tokens clipped from above": (steadily("policy/clip_high_share", 0.7), "policy/clip_high_share"),
    "most tokens clipped from below": (steadily("policy/clip_low_share", 0.7), "policy/clip_low_share"),
    "entropy that collapses": (grows("policy/entropy", 0.85), "policy/entropy_ratio"),
    "lengths that explode": (grows("completion/length_mean", 1.1), "completion/length_ratio"),
    "lengths that collapse": (grows("completion/length_mean", 0.85), "completion/length_ratio"),
    "importance weights without effective sample": (steadily("mismatch/ess", 0.01), "mismatch/ess"),
    "engine and learner apart": (steadily("mismatch/engine_kl", 0.4), "mismatch/engine_kl"),
    "engine and learner apart on a probe": (steadily("mismatch/probe_kl", 0.4), "mismatch/probe_kl"),
    "a log-probability that is not a number": (steadily("mismatch/engine_kl", math.nan), "mismatch/engine_kl"),
    "nothing to learn from": (steadily("reward/zero_variance_share", 1.0), "reward/zero_variance_share"),
    "one text for all": (steadily("integrity/duplicate_share", 1.0), "integrity/duplicate_share"),
    "less reward for more distance": (over_optimised, "integrity/reward_fall"),
    "a judge that is gamed": (gamed, "integrity/judge/held_out_fall"),
    "training rows known by heart": (memorised, "integrity/right/held_out_gap"),
    "a verifier that flips": (steadily("verifier/judge/flip_rate", 0.3), "verifier/judge/flip_rate"),
}


def told(line_of: Callable[[int], dict[str, float]], last: int = LENGTH) -> list[tuple[int, str]]:
    monitors, trends = Monitors(HEALTH), Trends({"sums": ["right", "judge"]})
    lines = [line_of(step) for step in range(last)]
    return [(step, a.metric) for step, x in enumerate(lines) for a in monitors.observe(step, x | trends.of(x))]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_once_by_the_monitor_that_is_meant_for_it_and_by_no_other(fault):
    change, metric = FAULTS[fault]
    alarms = told(lambda step: healthy(step) | (change(healthy(step), step - START) if step >= START else {}))
    assert [name for _, name in alarms] == [metric]
    assert START <= alarms[0][0] < LENGTH


def test_an_alarm_waits_for_as_many_steps_as_its_monitor_says_and_comes_again_after_the_fault_was_over():
    def line(step: int) -> dict[str, float]:
        return healthy(step) | ({"mismatch/ess": 0.01} if step in (5, 10, 11, 12, 40, 41) else {})

    assert told(line) == [(11, "mismatch/ess"), (41, "mismatch/ess")]


@pytest.mark.parametrize("last", [LENGTH, 400])
def test_nothing_is_said_of_a_healthy_run(last):
    assert told(healthy, last) == []


def test_every_monitor_has_a_fault_that_it_is_shown_to_name():
    named = {metric.replace("judge", "<source>").replace("right", "<source>") for _, metric in FAULTS.values()}
    assert named == {monitor.metric for monitor in HEALTH}


def test_a_monitor_of_a_family_watches_each_of_its_metrics_by_itself():
    monitors = Monitors([MonitorConfig(metric="verifier/<source>/flip_rate", above=0.1, steps=2)])
    lines = [{"verifier/a/flip_rate": a, "verifier/b/flip_rate": b} for a, b in ((0.5, 0), (0.5, 0.5), (0.5, 0.5))]
    assert [[a.metric for a in monitors.observe(step, line)] for step, line in enumerate(lines)] == [
        [],
        ["verifier/a/flip_rate"],
        ["verifier/b/flip_rate"],
    ]
    assert monitors.observe(3, {"verifier/a/b/flip_rate": 1.0, "verifier/a/failed_share": 1.0}) == []


# The figures themselves


def figures(lines: list[dict], name: str, sources: Mapping[str, list[str]] | None = None) -> list[float | None]:
    trends = Trends(sources or {})
    return [trends.of(line).get(name) for line in lines]


def test_a_length_is_compared_with_the_median_of_the_twenty_steps_before():
    lengths = [*(float(length) for length in range(1, 26)), 31.0]
    found = figures([{"completion/length_mean": length} for length in lengths], "completion/length_ratio")
    assert found[:5] == [None] * 5
    assert found[5] == 6 / 3
    assert found[25] == 31 / 15.5
    assert figures([{"completion/length_mean": 0.0}] * 7, "completion/length_ratio") == [None] * 7


def test_entropy_is_compared_with_the_first_five_steps_however_long_ago():
    entropies = [1.0, 2.0, math.nan, 3.0, 2.0, 2.0, *[1.0] * 30]
    found = figures([{"policy/entropy": entropy} for entropy in entropies], "policy/entropy_ratio")
    assert found[:6] == [None] * 6
    assert found[6:] == [0.5] * 30


def test_reward_is_compared_with_the_square_root_of_the_kl():
    lines = [{"reward/mean": 0.2, "policy/kl_reference": 0.0}] * 5
    lines += [{"reward/mean": 0.6, "policy/kl_reference": 0.04}] * 10
    found = figures(lines, "integrity/reward_per_sqrt_kl")
    assert found[14] == pytest.approx((0.6 - 0.2) / 0.2)
    assert found[8] is None and found[9] == pytest.approx(0.2 / 0.1)
    assert figures([{"reward/mean": 0.5}] * 20, "integrity/reward_per_sqrt_kl") == [None] * 20


@pytest.mark.parametrize(("kl", "fall"), [(0.09, 30.0), (0.04, 0.0), (0.01, 0.0)])
def test_a_reward_falls_only_where_the_distance_has_grown(kl, fall):
    """Ten steps at 0.6, then ten at 0.3; the spread of rewards without any counts as 0.01."""
    lines = [{"reward/mean": 0.6, "policy/kl_reference": 0.04}] * 10
    lines += [{"reward/mean": 0.3, "policy/kl_reference": kl}] * 10
    assert figures(lines, "integrity/reward_fall")[-1] == pytest.approx(fall)


def test_rewards_are_compared_with_held_out_accuracy_by_source():
    sources = {"sums": ["right", "judge"]}
    lines = [{"evaluation/sums/accuracy": 0.5, "reward/right/mean": 0.4, "reward/judge/mean": 3.0}]
    lines += [{"reward/right/mean": 0.4, "reward/judge/mean": 3.0}] * 9
    lines += [{"reward/right/mean": 0.9, "reward/judge/mean": 5.0}] * 10
    lines += [{"evaluation/sums/accuracy": 0.3}]
    assert figures(lines, "integrity/right/held_out_gap", sources)[-1] == pytest.approx((0.9 - 0.4) + (0.5 - 0.3))
    assert figures(lines, "integrity/judge/held_out_gap", sources)[-1] is None, "it does not say what is right"
    for name in ("right", "judge"):
        assert figures(lines, f"integrity/{name}/held_out_fall", sources)[-1] == pytest.approx(0.2)
    without = [line for line in lines if "evaluation/sums/accuracy" not in line]
    assert set(figures(without, "integrity/right/held_out_gap", sources)) == {None}


def test_accuracy_that_falls_with_the_reward_is_no_gaming():
    lines = [{"evaluation/sums/accuracy": 0.5, "reward/right/mean": 0.8}] + [{"reward/right/mean": 0.8}] * 9
    lines += [{"reward/right/mean": 0.5}] * 10 + [{"evaluation/sums/accuracy": 0.2}]
    for name in ("held_out_fall", "held_out_gap"):
        assert figures(lines, f"integrity/right/{name}", {"sums": ["right"]})[-1] == 0.0


def test_a_source_of_two_tasks_is_compared_with_the_mean_of_their_accuracies():
    sources = {"a": ["right"], "b": ["right", "form"], "c": ["other"]}
    lines = [{f"evaluation/{task}/accuracy": 0.5 for task in "abc"}] + [{"reward/right/mean": 0.5}] * 10
    lines += [{"evaluation/a/accuracy": 0.7, "evaluation/b/accuracy": 0.5, "evaluation/c/accuracy": 0.0}]
    assert figures(lines, "integrity/right/held_out_gap", sources)[-1] == 0.0
    risen = [*lines[:-1], *[{"reward/right/mean": 0.9}] * 10, lines[-1]]
    assert figures(risen, "integrity/right/held_out_gap", sources)[-1] == pytest.approx(0.4 - 0.1)
