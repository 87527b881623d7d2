"""Which checkpoints are kept."""

from __future__ import annotations

from nearpolicy.learner.checkpoint import kept


def test_the_last_ones_and_the_best_one_are_kept_across_restarts():
    """K53."""
    scores = {10: 0.3, 20: 0.9, 30: 0.5, 40: 0.6}
    assert kept([10, 20, 30, 40], scores, last=2, best=1) == {20, 30, 40}
    assert kept([20, 30, 40, 50], scores | {50: 0.4}, last=2, best=1) == {20, 40, 50}


def test_versions_without_a_score_are_never_among_the_best():
    assert kept([1, 2, 3, 4], {1: 0.0}, last=1, best=2) == {1, 4}
    assert kept([1, 2, 3], {}, last=1, best=1) == {3}
    assert kept([1, 2, 3], {1: 0.5, 2: 0.5}, last=1, best=1) == {2, 3}
