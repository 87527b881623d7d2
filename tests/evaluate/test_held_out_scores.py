"""pass@k (K57), Wilson intervals, and scores of held-out samples."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from nearpolicy.evaluate.metrics import held_out_scores, mean_pass_at_k, pass_at_k, wilson_interval
from nearpolicy.store.schema import EvaluatedSample


@pytest.mark.parametrize(("n", "c", "k", "right"), [(5, 2, 3, 0.9), (10, 3, 4, 5 / 6), (8, 1, 8, 1.0), (4, 0, 2, 0.0)])
def test_k57_pass_at_k_draws_without_replacement(n, c, k, right):
    assert pass_at_k(n, c, k) == pytest.approx(right, abs=1e-12)


def test_k57_fewer_samples_than_k_cannot_be_told():
    assert pass_at_k(3, 0, 7) is None
    assert pass_at_k(3, 3, 7) is None
    assert mean_pass_at_k([(8, 8), (3, 0)], 7) is None


def test_k57_the_mean_is_over_problems_not_over_pooled_counts():
    assert mean_pass_at_k([(4, 1), (4, 4), (4, 0)], 2) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_equals_counting_all_draws(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="makes no sense"):
        pass_at_k(n, c, k)


def test_wilson_interval_has_its_known_values():
    # R: prop.test(15, 20, correct = FALSE), and the closed form at the ends: z^2 / (n + z^2).
    assert wilson_interval(15, 20) == pytest.approx((0.5312989, 0.8881377), abs=1e-6)
    z2 = 1.959963984540054**2
    assert wilson_interval(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))
    assert wilson_interval(10, 10) == pytest.approx((10 / (10 + z2), 1.0))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 correct of 2"):
        wilson_interval(3, 2)


def test_wilson_interval_solves_the_score_test():
    for correct, count in [(1, 7), (68, 200), (199, 200)]:
        for bound in wilson_interval(correct, count):
            z = (correct / count - bound) / math.sqrt(bound * (1 - bound) / count)
            assert abs(z) == pytest.approx(1.959964, abs=1e-6)


def sample(row: int, place: int, correct: bool | None, version: int = 0, mode: str = "pass") -> EvaluatedSample:
    words = {"prompt": "?", "text": "!", "finish": "stop", "value": None, "task": "sums", "temperature": 1.0}
    return EvaluatedSample(mode=mode, row=row, sample=place, correct=correct, num_tokens=4, version=version, **words)


def test_a_sample_nobody_could_judge_is_neither_right_nor_wrong():
    (score,) = held_out_scores([sample(0, 0, True), sample(0, 1, None), sample(1, 0, False), sample(2, 0, None)])
    assert (score.correct, score.count, score.unjudged, score.accuracy) == (1, 2, 2, 0.5)
    assert score.questions == ((1, 1), (1, 0)) and score.pass_at(1) == 0.5 and score.pass_at(2) is None


def test_scores_are_apart_by_version_and_mode():
    scores = held_out_scores([sample(0, 0, True, 3), sample(0, 0, False), sample(0, 0, True, mode="accuracy")])
    assert [(s.mode, s.version, s.accuracy) for s in scores] == [
        ("accuracy", 0, 1.0),
        ("pass", 0, 0.0),
        ("pass", 3, 1.0),
    ]
