"""Bias and variance by resampling groups: against resampling written out, and where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from nearpolicy.objectives.comparison import GroupGradients, cosine, distance


def groups_of(gradients, divisors=None) -> GroupGradients:
    gradients = np.asarray(gradients, dtype=np.float64)
    divisors = np.ones(len(gradients)) if divisors is None else np.asarray(divisors, dtype=np.float64)
    return GroupGradients(gradients=gradients, losses=np.zeros(len(gradients)), divisors=divisors, means={})


def test_bias_and_variance_are_those_of_resampled_updates_written_out():
    numbers = np.random.default_rng(1)
    own = groups_of(numbers.normal(size=(6, 9)), numbers.integers(1, 5, 6))
    other = groups_of(numbers.normal(size=(6, 9)), numbers.integers(1, 5, 6))
    found = distance(own, other, rounds=50, seed=3)
    drawn = np.random.default_rng(3).multinomial(6, np.full(6, 1 / 6), size=50)

    def update(of, counts):
        return sum(c * g for c, g in zip(counts, of.gradients, strict=True)) / sum(counts * of.divisors)

    length = np.linalg.norm(update(other, np.ones(6)))
    pairs = [(update(own, c), update(other, c)) for c in drawn]
    gaps = [np.linalg.norm(a - b) / length for a, b in pairs]
    assert found.bias == pytest.approx(np.linalg.norm(update(own, np.ones(6)) - update(other, np.ones(6))) / length)
    assert (found.bias_low, found.bias_high) == pytest.approx(tuple(np.quantile(gaps, [0.025, 0.975])))
    for side, value in ((0, found.variance), (1, found.reference_variance)):
        middle = np.mean([pair[side] for pair in pairs], axis=0)
        right = np.mean([np.sum((pair[side] - middle) ** 2) for pair in pairs]) / length**2
        assert value == pytest.approx(right)


def test_an_objective_has_no_bias_from_itself_and_equal_groups_no_variance():
    same = groups_of(np.tile([1.0, 2.0], (4, 1)))
    found = distance(same, same, rounds=20, seed=0)
    assert (found.bias, found.bias_high) == (0.0, 0.0)
    assert found.variance == pytest.approx(0.0, abs=1e-12)


def test_twice_the_gradient_is_a_bias_of_one_in_the_same_direction():
    once, twice = groups_of([[1.0, 0.0], [0.0, 1.0]]), groups_of([[2.0, 0.0], [0.0, 2.0]])
    assert distance(twice, once, rounds=10, seed=0).bias == pytest.approx(1.0)
    assert cosine(twice.gradient(), once.gradient()) == pytest.approx(1.0)


def test_where_there_is_no_gradient_nothing_is_said():
    zero = groups_of(np.zeros((3, 2)), [0, 0, 0])
    assert distance(zero, zero, rounds=5, seed=0) is None
    assert cosine(zero.gradient(), zero.gradient()) is None
    assert zero.gradient().tolist() == [0.0, 0.0] and zero.loss == 0.0
