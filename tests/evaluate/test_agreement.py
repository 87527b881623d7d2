"""Agreement worked out by hand, and intervals that mean what they say."""

from __future__ import annotations

import numpy as np
import pytest

from nearpolicy.evaluate.agreement import agreement, bootstrap, correlation, difference, kappa, mean


def test_kappa_is_what_its_definition_gives():
    assert kappa(np.array([1, 1, 2, 2]), np.array([1, 1, 2, 1])) == pytest.approx(0.5)
    assert kappa(np.array([1, 2, 0]), np.array([1, 2, 0])) == 1.0
    assert kappa(np.array([1, 2, 1, 2]), np.array([1, 1, 2, 2])) == pytest.approx(0.0)
    assert kappa(np.array([1, 2]), np.array([2, 1])) == pytest.approx(-1.0)
    assert np.isnan(kappa(np.array([1, 1]), np.array([1, 1])))


def test_a_judge_that_guesses_has_a_kappa_around_0_however_often_it_is_right_by_chance():
    rng = np.random.default_rng(1)
    gold = (rng.random(2000) < 0.9).astype(float)
    guess = (rng.random(2000) < 0.9).astype(float)
    assert agreement(guess, gold) > 0.78
    found = bootstrap(kappa, guess, gold)
    assert found.low < 0 < found.high and abs(found.value) < 0.06


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for round in range(200):
        found = bootstrap(mean, rng.normal(0.3, 1.0, size=60), rounds=300, seed=round)
        hits += found.low <= 0.3 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_correlation_is_of_ranks_and_ties_share_theirs():
    assert correlation(np.array([1.0, 2.0, 9.0]), np.array([0.1, 0.2, 0.3])) == pytest.approx(1.0)
    assert correlation(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.8660254)
    assert bootstrap(correlation, [1.0, 1.0], [1.0, 2.0]) is None


def test_nothing_judged_is_no_number():
    assert bootstrap(mean, []) is None
    one = bootstrap(difference, [1.0], [0.5])
    assert (one.value, one.low, one.high, one.count) == (0.5, 0.5, 0.5, 1)
