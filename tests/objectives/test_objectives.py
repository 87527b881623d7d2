"""Advantages, divisors, losses and the correction, on numbers that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.objectives import aggregation, corrections, losses
from nearpolicy.objectives.advantages import grpo
from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.diagnostics import FRESH, KEPT_KV, STALE, causes_of, mismatch, mismatch_by_cause
from nearpolicy.objectives.objective import Objective, Tokens
from nearpolicy.objectives.sequences import Sequences
from nearpolicy.records import Admission, Batch, Fate, Finish, Group, Prompt, Rollout, Segment, StepReport
from nearpolicy.telemetry.batch import batch_metrics, token_fates

REPORT = StepReport(version=1, updates=1, metrics={})


def group_of(index: int, rewards, *, lengths=None, finishes=None) -> Group:
    lengths = lengths or [2] * len(rewards)
    finishes = finishes or [Finish.STOP] * len(rewards)
    return Group(
        admission=Admission(index=index, prompt=Prompt(id=str(index), task="t", text="?"), seed=0, version=0),
        rollouts=tuple(
            Rollout(
                sample=i,
                numerics="exact",
                text="",
                segments=(
                    Segment(
                        context_ids=[index + 1],
                        token_ids=np.arange(length),
                        mask=np.ones(length, bool),
                        behavior_logprobs=np.zeros(length),
                        versions=np.zeros(length),
                        finish=finish,
                    ),
                ),
            )
            for i, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
        ),
        verdicts=({},) * len(rewards),
        rewards=tuple(rewards),
    )


def per_sample(rows) -> dict[tuple[int, int], float]:
    return {(row.group, row.sample): float(row.advantages.max(initial=-9.0)) for row in rows}


def test_a_group_of_one_has_advantage_zero():
    assert grpo([0.7]).tolist() == [0.0]


def test_advantages_use_the_spread_with_n_minus_one():
    np.testing.assert_allclose(grpo([0.0, 1.0]), [-0.70710678, 0.70710678], atol=1e-8)
    np.testing.assert_allclose(grpo([0.0, 1.0, 2.0, 5.0]), (np.array([0, 1, 2, 5]) - 2) / math.sqrt(14 / 3), atol=1e-12)


def test_a_group_of_one_beside_another_group_changes_nothing():
    rows = assign_advantages([group_of(0, [1.0]), group_of(1, [0.0, 1.0])], ObjectiveConfig())
    assert per_sample(rows) == pytest.approx({(0, 0): 0.0, (1, 0): -0.70710678, (1, 1): 0.70710678})


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_equal_rewards_give_exactly_zero_although_their_mean_may_be_rounded(value, size):
    assert grpo([value] * size).tolist() == [0.0] * size


def test_groups_without_spread_are_counted_as_such():
    groups = (group_of(0, [1.0] * 4), group_of(1, [0.0] * 4))
    batch = Batch(step=0, places=2, groups=groups, rows=assign_advantages(groups, ObjectiveConfig()))
    assert all(not row.advantages.any() for row in batch.rows)
    assert batch_metrics(batch)["reward/zero_variance_share"] == 1.0
    assert all(of == {Fate.ZERO_ADVANTAGE: 2} for of in token_fates(batch, REPORT).values())


def test_a_completion_is_compared_with_completions_of_its_own_prompt_only():
    # The scores came in as A1 = 1, B1 = 0, A2 = 0, B2 = 0; groups keep them apart.
    rows = assign_advantages([group_of(0, [1.0, 0.0]), group_of(1, [0.0, 0.0])], ObjectiveConfig(scale_rewards="none"))
    assert per_sample(rows) == {(0, 0): 0.5, (0, 1): -0.5, (1, 0): 0.0, (1, 1): 0.0}


def test_an_unscored_rollout_is_not_trained_and_takes_no_part_in_its_groups_mean():
    [first, second, third] = assign_advantages([group_of(0, [1.0, None, 0.0])], ObjectiveConfig(scale_rewards="none"))
    assert (first.advantages.tolist(), third.advantages.tolist()) == ([0.5, 0.5], [-0.5, -0.5])
    assert (second.trained.any(), second.advantages.any()) == (False, False)


def test_masked_truncated_completions_leave_sum_and_divisor_but_not_their_groups_mean():
    group = group_of(0, [1.0, 0.0, 0.5], lengths=[4, 4, 8], finishes=[Finish.STOP, Finish.STOP, Finish.LENGTH])
    config = ObjectiveConfig(scale_rewards="none", mask_truncated_completions=True)
    rows = assign_advantages([group], config)
    trained = [int(row.trained.sum()) for row in rows]
    assert trained == [4, 4, 0]
    assert rows[0].advantages.tolist() == [0.5] * 4
    assert mean_of(Objective(config, 10), trained, [0.5, 0.5, 0.5]) == 0.5
    batch = Batch(step=0, places=1, groups=(group,), rows=rows)
    assert token_fates(batch, REPORT)[(0, 2)] == {Fate.MASKED: 8}
    assert batch.num_tokens == 8


def test_observations_between_sampled_tokens_have_no_advantage_and_no_fate():
    group = group_of(0, [1.0, 0.0])
    mixed = Segment(
        context_ids=[1],
        token_ids=[5, 6, 7],
        mask=[True, False, True],
        behavior_logprobs=[-1, 0, -1],
        versions=[0, -1, 0],
        finish=Finish.STOP,
    )
    other = group.rollouts[1]
    group = Group(
        admission=group.admission,
        rollouts=(Rollout(sample=0, segments=(mixed,), text="", numerics="exact"), other),
        verdicts=({}, {}),
        rewards=(1.0, 0.0),
    )
    rows = assign_advantages([group], ObjectiveConfig(scale_rewards="none"))
    assert rows[0].advantages.tolist() == [0.5, 0.0, 0.5]
    assert token_fates(Batch(step=0, places=1, groups=(group,), rows=rows), REPORT)[(0, 0)] == {Fate.TRAINED: 2}


def test_tokens_whose_update_was_skipped_are_not_told_as_trained():
    groups = (group_of(0, [1.0, 0.0, 0.5]), group_of(1, [1.0, 0.0]))
    batch = Batch(step=0, places=2, groups=groups, rows=assign_advantages(groups, ObjectiveConfig()))
    skipped = tuple(
        replace(row, trained=row.trained & False, advantages=row.advantages * 0)
        if row.group == 0 and row.advantages.any()
        else row
        for row in batch.rows
    )
    report = StepReport(version=1, updates=1, metrics={}, rows=skipped)
    assert token_fates(batch, report) == {
        (0, 0): {Fate.MASKED: 2},
        (0, 1): {Fate.MASKED: 2},
        (0, 2): {Fate.ZERO_ADVANTAGE: 2},
        (1, 0): {Fate.TRAINED: 2},
        (1, 1): {Fate.TRAINED: 2},
    }


REWARDS = st.lists(st.none() | st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=1, max_size=8)


@given(REWARDS)
def test_advantages_are_finite_sum_to_zero_and_have_spread_one_or_none(rewards):
    values = grpo(rewards)
    scored = [i for i, reward in enumerate(rewards) if reward is not None]
    assert np.isfinite(values).all()
    assert abs(values.sum()) < 1e-6
    assert all(values[i] == 0 for i, reward in enumerate(rewards) if reward is None)
    differ = len({rewards[i] for i in scored}) > 1
    assert np.std(values[scored], ddof=1) == pytest.approx(1.0) if differ else not values.any()


def mean_of(objective: Objective, lengths, values) -> float:
    """The loss of sequences of these lengths whose tokens have one value each."""
    sequences = Sequences.of_lengths(lengths)
    kept = torch.ones(sum(lengths), dtype=torch.bool)
    total = objective.shares(kept, sequences).double() @ torch.repeat_interleave(
        torch.tensor(values, dtype=torch.float64), torch.tensor(lengths)
    )
    return float(total) / objective.divisor(kept, sequences)


@pytest.mark.parametrize(
    ("loss_agg", "right"),
    [
        ("token_mean", 1.75),
        ("seq_mean_token_mean", 2.5),
        ("seq_mean_token_sum", 7.0),
        ("seq_mean_token_sum_norm", 0.7),
    ],
)
def test_shares_give_the_documented_means(loss_agg, right):
    objective = Objective(ObjectiveConfig(loss_agg=loss_agg), 10)
    assert mean_of(objective, [6, 2], [1.0, 4.0]) == pytest.approx(right, abs=1e-6)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10))
def test_shares_of_the_means_add_up_to_one_over_trained_tokens(lengths):
    for loss_agg in ("token_mean", "seq_mean_token_mean"):
        if any(lengths):
            found = mean_of(Objective(ObjectiveConfig(loss_agg=loss_agg), 10), lengths, [1.0] * len(lengths))
            assert found == pytest.approx(1.0)


def test_an_unknown_divisor_is_refused_by_name():
    with pytest.raises(ValueError, match="'mean'"):
        aggregation.shares(torch.ones(1, dtype=torch.bool), Sequences.of_lengths([1]), "mean", 1)


def token_losses(config: ObjectiveConfig, now, proximal, behavior, advantages) -> tuple[torch.Tensor, dict]:
    tokens = Tokens(
        logprobs=now,
        entropies=torch.zeros_like(now),
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=advantages,
        sequences=Sequences.of_lengths([len(now)]),
    )
    found = Objective(config, 10).token_losses(tokens)
    return found.losses, found.named


def tensors(*columns) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def test_the_decoupled_loss_takes_weight_and_ratio_at_the_right_versions():
    # Engine -1.0, learner at the start of the step -0.7, now -0.2, advantage 1, clip 0.2, cap 2.
    now, proximal, behavior, advantage = tensors([-0.2], [-0.7], [-1.0], [1.0])
    weight = corrections.token_truncate(proximal, behavior, cap=2.0).weights
    assert float(weight) == pytest.approx(1.349859, abs=1e-6)
    assert float((now - proximal).exp()) == pytest.approx(1.648721, abs=1e-6)
    config = ObjectiveConfig(clip_low=0.2, clip_high=0.2, correction_cap=2.0)
    loss, named = token_losses(config, now, proximal, behavior, advantage)
    assert float(loss) == pytest.approx(-1.619831, abs=1e-6)
    assert float(named["correction/weight_mean"]) == pytest.approx(1.349859, abs=1e-6)
    assert float(named["policy/clip_high_share"]) == 1.0


def test_clipping_follows_the_sign_of_the_advantage_with_two_bounds():
    advantages, ratios = tensors([1, -1, 1, -1, 1, -1], [1.5, 0.5, 0.5, 1.5, 1.1, 0.9])
    now = ratios.log().requires_grad_()
    zeros = torch.zeros_like(ratios)
    loss = losses.ppo_clip(now, zeros, advantages, torch.ones_like(ratios), clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28, 0.8, -0.5, 1.5, -1.1, 0.9])
    loss.sum().backward()
    assert now.grad.tolist() == pytest.approx([0.0, 0.0, -0.5, 1.5, -1.1, 0.9])
    low, high = losses.clip_shares(now, advantages, clip_low=0.2, clip_high=0.28)
    assert low.tolist() == [False, True, False, False, False, False]
    assert high.tolist() == [True, False, False, False, False, False]


def test_the_correction_is_truncated_has_no_gradient_and_survives_distant_policies():
    proximal, behavior = tensors([-1.0, -1.0, -1.0], [-1.1, -6.0, -400.0])
    proximal.requires_grad_()
    weights = corrections.token_truncate(proximal, behavior, cap=2.0).weights
    assert weights.tolist() == pytest.approx([math.exp(0.1), 2.0, 2.0])
    assert not weights.requires_grad
    unbounded = corrections.token_truncate(proximal, behavior, cap=math.inf).weights
    assert float(unbounded[2]) == pytest.approx(math.exp(20.0))  # where exponentials are held


def test_equal_policies_give_plain_reinforce():
    now, advantages = tensors([-0.3, -2.0], [1.5, -0.5])
    now.requires_grad_()
    loss, _ = token_losses(ObjectiveConfig(loss="pg"), now, now.detach(), now.detach(), advantages)
    assert loss.tolist() == pytest.approx([0.45, -1.0])
    loss.sum().backward()
    assert now.grad.tolist() == [-1.5, 0.5]


def test_without_correction_the_gap_is_not_multiplied_in():
    now, behavior, advantages = tensors([-0.7], [-1.0], [1.0])
    config = ObjectiveConfig(loss="pg", correction="none")
    loss, named = token_losses(config, now, now, behavior, advantages)
    assert (float(loss), float(named["correction/weight_mean"])) == (pytest.approx(0.7), 1.0)


def test_mismatch_numbers_are_those_of_their_definitions():
    proximal, behavior = np.array([-1.0, -2.0]), np.array([-1.2, -1.9])
    found = mismatch(proximal, behavior)
    d = np.array([0.2, -0.1])
    assert found["mismatch/logprob_diff_mean"] == pytest.approx(0.15)
    assert found["mismatch/logprob_diff_max"] == pytest.approx(0.2)
    assert found["mismatch/kl"] == pytest.approx(np.mean(np.exp(d) - 1 - d))
    assert found["mismatch/prob_diff_mean"] == pytest.approx(
        (math.exp(-1) - math.exp(-1.2) + math.exp(-1.9) - math.exp(-2)) / 2
    )
    w = np.exp(d)
    assert found["mismatch/ess"] == pytest.approx(w.sum() ** 2 / (2 * (w**2).sum()))
    assert mismatch(np.array([]), np.array([])) == {}
    assert set(mismatch(proximal, proximal).values()) == {0.0, 1.0}


def test_mismatch_is_told_by_what_may_cause_it():
    versions, mask = np.array([3, -1, 3, 4, 4, 4]), np.array([True, False, True, True, True, True])
    assert causes_of(versions, mask, 4)[mask].tolist() == [STALE, STALE, KEPT_KV, KEPT_KV, KEPT_KV]
    fresh = np.array([4, -1, 4, 4]), np.array([True, False, True, True])
    assert causes_of(*fresh, 4)[fresh[1]].tolist() == [FRESH] * 3
    causes = np.array([FRESH, FRESH, KEPT_KV, STALE])
    proximal = np.log([0.5, 0.5, 0.25, 0.2])
    behavior = np.log([0.5, 0.25, 0.25, 0.4])
    found = mismatch_by_cause(proximal, behavior, causes)
    assert found["mismatch/fresh_share"] == 0.5
    assert found["mismatch/engine_kl"] == pytest.approx((0 + 2 - 1 - np.log(2)) / 2)
    assert found["mismatch/engine_logprob_diff_max"] == pytest.approx(np.log(2))
    assert found["mismatch/kept_kv_kl"] == 0
    assert found["mismatch/staleness_kl"] == pytest.approx(0.5 - 1 + np.log(2))
    assert mismatch_by_cause(*map(np.array, ([], [], []))) == {}
