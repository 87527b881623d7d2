"""Which checkpoints are kept."""

from __future__ import annotations

from learner_cases import learner

from nearpolicy.learner.checkpoint import checkpoints, kept, save_checkpoint


def test_the_last_ones_and_the_best_one_are_kept_across_restarts():
    """K53."""
    scores = {10: 0.3, 20: 0.9, 30: 0.5, 40: 0.6}
    assert kept([10, 20, 30, 40], scores, last=2, best=1) == {20, 30, 40}
    assert kept([20, 30, 40, 50], scores | {50: 0.4}, last=2, best=1) == {20, 40, 50}


def test_versions_without_a_score_are_never_among_the_best():
    assert kept([1, 2, 3, 4], {1: 0.0}, last=1, best=2) == {1, 4}
    assert kept([1, 2, 3], {}, last=1, best=1) == {3}
    assert kept([1, 2, 3], {1: 0.5, 2: 0.5}, last=1, best=1) == {2, 3}


def test_checkpoints_and_foreign_files_in_one_folder(tmp_path):
    """K53 on the disk: last 2 and best 1, a restart before step 50, and things of others that look alike."""
    foreign = ["notes.txt", "step-10.bak", "step-x", "best", "step-20-mine", ".step-mine"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    scores = {10: 0.3, 20: 0.9, 30: 0.5, 40: 0.6}
    own = learner()
    for own.version in scores:
        known = {step: score for step, score in scores.items() if step <= own.version}
        save_checkpoint(own, tmp_path, keep_last=2, keep_best=1, scores=known)
    assert [step for step, _ in checkpoints(tmp_path)] == [20, 30, 40]
    own = learner()
    own.version = 50
    save_checkpoint(own, tmp_path, keep_last=2, keep_best=1, scores=scores | {50: 0.4})
    assert [step for step, _ in checkpoints(tmp_path)] == [20, 40, 50]
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
