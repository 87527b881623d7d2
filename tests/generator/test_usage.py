"""Time of replicas between two reports: working, resting, and resting although work waited."""

from __future__ import annotations

import pytest

from nearpolicy.generator.usage import Usage
from nearpolicy.roles import Load
from nearpolicy.telemetry.metrics import unknown_names


def load(at: float, busy: float, sampled: int = 0) -> Load:
    return Load(slots=8, at=at, busy_s=busy, sampled=sampled)


def test_a_bubble_is_rest_while_work_waited_and_no_more():
    usage = Usage()
    usage.observe(0, load(100.0, 0.0), 0.0)
    usage.observe(1, load(500.0, 0.0), 0.0)  # another machine, another clock
    usage.waits(True, 2.0)
    usage.waits(False, 5.0)
    usage.observe(0, load(110.0, 6.0, 300), 10.0)  # rested 4 of 10 s; work waited for 3
    usage.observe(1, load(510.0, 9.0, 90), 10.0)  # rested 1 s
    found = usage.metrics()
    assert found["utilisation/generator_0"] == pytest.approx(0.6)
    assert found["bubble/generator_0"] == pytest.approx(0.3)
    assert found["bubble/generator_1"] == pytest.approx(0.1)
    assert found["throughput/generator_0_tokens_per_s"] == pytest.approx(30.0)
    assert unknown_names(found) == []
    assert usage.metrics() == {}  # since the last call


def test_work_that_waits_on_counts_up_to_each_report():
    usage = Usage()
    usage.observe(0, load(0.0, 0.0), 0.0)
    usage.waits(True, 1.0)
    usage.observe(0, load(2.0, 0.0), 2.0)
    usage.observe(0, load(4.0, 0.0), 4.0)
    assert usage.metrics()["bubble/generator_0"] == pytest.approx(3 / 4)


def test_a_replica_that_began_again_is_another_one():
    usage = Usage()
    usage.observe(0, load(100.0, 50.0, 1000), 0.0)
    usage.observe(0, load(3.0, 1.0, 10), 1.0)
    usage.observe(0, load(5.0, 2.0, 30), 3.0)
    assert usage.metrics()["utilisation/generator_0"] == pytest.approx(0.5)
    usage.forget(0)
    assert usage.metrics() == {}
