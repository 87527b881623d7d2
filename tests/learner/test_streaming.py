"""A step that begins before its batch is complete: the same bits, whatever was there when."""

from __future__ import annotations

import pytest
import torch
from learner_cases import batch_of, learner, random_rows, weights

from nearpolicy.objectives.config import ObjectiveConfig

OBJECTIVES = {
    "grpo": {},
    "token mask": {"correction": "token_mask"},
    "whole rollouts": {"loss": "gspo"},
    "sequence mean": {"loss": "pg", "loss_agg": "seq_mean_token_mean"},
    "sequence mask": {"correction": "sequence_mask", "loss_agg": "seq_mean_token_sum_norm"},
    "entropy": {"entropy_coef": 0.01},
}


def after_two_steps(objective: dict, seen_after: list[list[int]], budget: int) -> tuple:
    """``seen_after``: by step, the numbers of groups that are there when the learner looks."""
    own = learner(objective=ObjectiveConfig(**objective), max_tokens_per_microbatch=budget)
    found = []
    for step, seen in enumerate(seen_after):
        rows = random_rows(step, groups=6, signal=[True, True, False, True, True, False])
        for groups in seen:
            own.learn_ahead([row for row in rows if row.group < groups])
        report = own.step(batch_of(rows, step=step))
        metrics = {name: value for name, value in report.metrics.items() if not name.startswith("time/")}
        found.append((metrics, [row.trained.tolist() for row in report.rows]))
    return found, weights(own.policy)


@pytest.mark.parametrize("budget", [30, 100, 1000])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_learnt_ahead_of_its_batch_has_the_bits_of_one_learnt_at_once(objective, budget):
    plain, right = after_two_steps(OBJECTIVES[objective], [[], []], budget)
    for seen_after in ([[1, 2, 3, 4, 5], [2]], [[3], [6]], [[], [1, 5]]):
        found, moved = after_two_steps(OBJECTIVES[objective], seen_after, budget)
        assert found == plain
        assert torch.equal(moved, right)


def test_most_of_the_work_is_done_before_the_last_group_comes():
    own = learner(max_tokens_per_microbatch=40)
    rows = random_rows(0, groups=6)
    calls = []
    score = own.passes.score
    own.passes.score = lambda *arguments, **options: calls.append(1) or score(*arguments, **options)
    own.learn_ahead([row for row in rows if row.group < 5])
    ahead = len(calls)
    own.step(batch_of(rows))
    assert ahead >= 4 * (len(calls) - ahead) / 2 and ahead > 3


def test_other_rows_than_the_step_began_with_are_refused():
    own = learner()
    own.learn_ahead(random_rows(0, groups=2))
    with pytest.raises(ValueError, match="goes on with other ones"):
        own.step(batch_of(random_rows(1)))
    with pytest.raises(ValueError, match="goes on with other ones"):
        own.learn_ahead(random_rows(1))


@pytest.mark.parametrize(
    ("objective", "config"),
    [
        ({"scale_rewards": "batch"}, {}),
        ({"advantage": "reinforce_baseline"}, {}),
        ({"advantage": "reinforce_plus_plus"}, {}),
        ({"loss": "kl_cov"}, {}),
        ({}, {"num_iterations": 2}),
        ({}, {"minibatches": 3}),
    ],
)
def test_what_needs_the_whole_batch_waits_for_it(objective, config):
    own = learner(objective=ObjectiveConfig(**objective), **config)
    assert not own.can_learn_ahead
    with pytest.raises(ValueError, match="cannot be learnt ahead"):
        own.learn_ahead(random_rows(0))
    assert learner().can_learn_ahead
