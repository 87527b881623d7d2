"""From groups to rows: which numbers reach which token, for every advantage and every change of the reward."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from nearpolicy.objectives import advantages, credit
from nearpolicy.objectives.assign import (
    Annotations,
    assign_advantages,
    needs_annotations,
    needs_logprobs,
    shaped_rewards,
    value_targets,
)
from nearpolicy.objectives.catalogue import ADVANTAGES
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import BASELINE, Admission, Baseline, Finish, Group, Prompt, Rollout, Segment


def segment(tokens, mask=None, *, behavior=-1.0, finish=Finish.STOP) -> Segment:
    mask = np.ones(len(tokens), bool) if mask is None else np.array(mask, bool)
    return Segment(
        context_ids=[1],
        token_ids=tokens,
        mask=mask,
        behavior_logprobs=np.where(mask, behavior, 0.0),
        versions=np.where(mask, 0, -1),
        finish=finish,
    )


def group_of(index: int, rewards, segments) -> Group:
    """``segments``: per rollout a list of segments."""
    return Group(
        admission=Admission(index=index, prompt=Prompt(id=str(index), task="t", text="?"), seed=0, version=0),
        rollouts=tuple(
            Rollout(sample=i, text="", numerics="exact", segments=tuple(own)) for i, own in enumerate(segments)
        ),
        verdicts=({},) * len(rewards),
        rewards=tuple(rewards),
    )


def plain_group(index: int, rewards, lengths=None) -> Group:
    lengths = lengths or [2] * len(rewards)
    return group_of(index, rewards, [[segment(np.arange(n))] for n in lengths])


def with_baseline(group: Group, reward: float | None, length: int = 2) -> Group:
    rollout = Rollout(sample=BASELINE, text="", numerics="exact", segments=(segment(np.arange(length)),))
    return replace(group, baseline=Baseline(rollout=rollout, reward=reward))


def by_sample(rows) -> dict[tuple[int, int], list[float]]:
    return {(row.group, row.sample): row.advantages.tolist() for row in rows}


REWARDS = [1.0, 0.0, 0.0, 1.0]
LENGTHS = [2, 3, 1, 4]
ONE_NUMBER = [name for name in ADVANTAGES if name not in ("vtrace", "teacher", "remax")]


@pytest.mark.parametrize("advantage", ONE_NUMBER)
def test_every_token_of_a_rollout_gets_the_number_of_its_estimator(advantage):
    groups = [plain_group(0, REWARDS, LENGTHS), plain_group(1, [1.0, 0.0, 0.0, 0.0], LENGTHS)]
    rewards = [list(group.rewards) for group in groups]
    config = ObjectiveConfig(advantage=advantage, **({"pass_k": 2} if advantage == "grpo_passk" else {}))
    right = {
        "grpo": lambda: [advantages.grpo(r) for r in rewards],
        "dr_grpo": lambda: [advantages.dr_grpo(r) for r in rewards],
        "rloo": lambda: [advantages.rloo(r) for r in rewards],
        "reinforce": lambda: [advantages.reinforce(r) for r in rewards],
        "gae": lambda: [advantages.reinforce(r) for r in rewards],  # nothing is known of values yet
        "reinforce_baseline": lambda: advantages.reinforce_baseline(rewards),
        "reinforce_plus_plus": lambda: advantages.reinforce_plus_plus(rewards),
        "reinforce_plus_plus_baseline": lambda: advantages.reinforce_plus_plus_baseline(rewards),
        "opo": lambda: [advantages.opo(r, LENGTHS) for r in rewards],
        "grpo_passk": lambda: [advantages.grpo_passk(r, k=2) for r in rewards],
    }[advantage]()
    found = by_sample(assign_advantages(groups, config))
    for group, values in enumerate(right):
        for sample, value in enumerate(values):
            assert found[group, sample] == pytest.approx([value] * LENGTHS[sample], abs=1e-6)


def test_scaling_by_the_batch_uses_one_spread_for_all_groups():
    groups = [plain_group(0, [1.0, 0.0]), plain_group(1, [0.6, 0.4])]
    found = by_sample(assign_advantages(groups, ObjectiveConfig(scale_rewards="batch")))
    spread = np.std([1.0, 0.0, 0.6, 0.4], ddof=1)
    assert found[0, 0][0] == pytest.approx(0.5 / spread)
    assert found[1, 0][0] == pytest.approx(0.1 / spread)


def test_a_rollout_of_several_segments_counts_once_in_its_group():
    group = group_of(0, [1.0, 0.0], [[segment([5, 6]), segment([7])], [segment([8])]])
    rows = assign_advantages([group], ObjectiveConfig(scale_rewards="none"))
    assert [(row.sample, row.advantages.tolist()) for row in rows] == [(0, [0.5, 0.5]), (0, [0.5]), (1, [-0.5])]


def test_the_overlong_penalty_is_in_the_reward_before_the_group_is_compared():
    group = plain_group(0, [1.0, 1.0, None], [80, 90, 90])
    config = ObjectiveConfig(scale_rewards="none", overlong_buffer=20)
    assert shaped_rewards(group, config, 100) == pytest.approx([1.0, 0.5, None])
    rows = assign_advantages([group], config, max_completion_length=100)
    assert [row.advantages[0] for row in rows] == pytest.approx([0.25, -0.25, 0.0])
    assert not rows[2].trained.any()


def test_length_and_diversity_change_the_reward_by_their_weights():
    group = plain_group(0, [1.0, 1.0, 0.0], [2, 6, 4])
    assert shaped_rewards(group, ObjectiveConfig(length_cost=0.01)) == pytest.approx([0.98, 0.94, -0.04])
    assert shaped_rewards(group, ObjectiveConfig(length_reward=1.0)) == pytest.approx([1.5, 0.5, 0.0])
    apart = group_of(0, [1.0, 1.0, 0.0], [[segment([1, 2, 3])], [segment([4, 5, 6])], [segment([1, 2, 3])]])
    alike = group_of(0, [1.0, 1.0, 0.0], [[segment([1, 2, 3])], [segment([1, 2, 3])], [segment([4, 5, 6])]])
    assert shaped_rewards(apart, ObjectiveConfig(diversity_bonus=0.2)) == pytest.approx([1.2, 1.2, 0.0])
    assert shaped_rewards(alike, ObjectiveConfig(diversity_bonus=0.2)) == pytest.approx([1.0, 1.0, 0.0])


def test_a_group_that_is_left_out_gives_no_rows():
    groups = [plain_group(0, [1.0, 0.0]), plain_group(1, [1.0, 1.0])]
    rows = assign_advantages(groups, ObjectiveConfig(), left_out=lambda g: "same" if g.rewards[1] else None)
    assert {row.group for row in rows} == {0}


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name != "teacher"])
def test_a_step_whose_groups_are_all_left_out_has_no_rows(advantage):
    config = ObjectiveConfig(advantage=advantage)
    assert assign_advantages([plain_group(0, [1.0, 1.0])], config, left_out=lambda group: "zero_variance") == ()


def annotations(groups, own, reference=None) -> Annotations:
    """The same log-probability for each token of the policy, or a function of (group, sample, segment, length)."""

    def table(value):
        return {
            (g.index, r.sample, k): np.full(len(s.token_ids), value, dtype=np.float32)
            for g in groups
            for r in g.rollouts
            for k, s in enumerate(r.segments)
        }

    return Annotations(
        proximal_logprobs=table(own), reference_logprobs={} if reference is None else table(reference), reference_kl={}
    )


@pytest.mark.parametrize(("estimator", "per_token"), [("k1", 0.2), ("k2", 0.02), ("k3", math.exp(-0.2) - 1 + 0.2)])
def test_a_penalty_in_the_reward_is_taken_from_the_whole_rollout_before_the_group_is_compared(estimator, per_token):
    groups = [plain_group(0, [1.0, 0.0], [2, 4])]
    config = ObjectiveConfig(scale_rewards="none", kl_coef=0.5, kl_in="reward", kl_estimator=estimator)
    assert needs_annotations(config)
    rows = assign_advantages(groups, config, annotations=annotations(groups, -1.0, -1.2))
    first, second = 1.0 - 0.5 * 2 * per_token, 0.0 - 0.5 * 4 * per_token
    assert rows[0].advantages.tolist() == pytest.approx([(first - second) / 2] * 2, abs=1e-6)
    assert rows[1].advantages.tolist() == pytest.approx([(second - first) / 2] * 4, abs=1e-6)


def test_reinforce_plus_plus_takes_the_penalty_from_each_tokens_own_reward():
    groups = [plain_group(0, [1.0, 0.0], [2, 1])]
    config = ObjectiveConfig(advantage="reinforce_plus_plus", kl_coef=0.5, kl_in="reward", gamma=0.5)
    rows = assign_advantages(groups, config, annotations=annotations(groups, -1.0, -1.2))
    returns = np.array([-0.1 + 0.5 * 0.9, 0.9, -0.1])
    right = (returns - returns.mean()) / returns.std(ddof=1)
    assert np.concatenate([row.advantages for row in rows]).tolist() == pytest.approx(right.tolist(), abs=1e-5)


def test_vtrace_carries_the_reward_back_through_capped_ratios_against_the_mean_of_the_others():
    groups = [group_of(0, [1.0, 0.0], [[segment([5, 6, 7], [1, 0, 1])], [segment([8])]])]
    config = ObjectiveConfig(advantage="vtrace", gamma=0.9, vtrace_rho=2.0, vtrace_c=1.5)
    rows = assign_advantages(groups, config, annotations=annotations(groups, -0.5))
    ratio = math.exp(0.5)
    _, right = credit.vtrace([0, 0, 1.0], [0.0] * 3, [0.5] * 3, [True, False, True], gamma=0.9, rho_bar=2.0, c_bar=1.5)
    assert rows[0].advantages.tolist() == pytest.approx(right.tolist(), abs=1e-6)
    # The reward reaches the first token through the second: rho (gamma v), v = rho_bar-capped target of the second.
    assert rows[0].advantages[2] == pytest.approx(ratio, abs=1e-6)
    assert rows[0].advantages[0] == pytest.approx(ratio * 0.9 * ratio, abs=1e-6)
    assert rows[0].advantages[1] == 0.0
    assert rows[1].advantages.tolist() == pytest.approx([ratio * (0.0 - 1.0)], abs=1e-6)


def test_vtrace_between_equal_policies_is_leave_one_out():
    groups = [plain_group(0, [1.0, 0.0, 0.25], [2, 3, 1])]
    found = assign_advantages(groups, ObjectiveConfig(advantage="vtrace"), annotations=annotations(groups, -1.0))
    right = advantages.rloo([1.0, 0.0, 0.25])
    assert [row.advantages[0] for row in found] == pytest.approx(right.tolist(), abs=1e-6)
    assert all((row.advantages == row.advantages[0]).all() for row in found)


def with_values(groups, values) -> Annotations:
    """Only a critic's values, per rollout one number for all its tokens."""
    table = {
        (g.index, r.sample, k): np.where(s.mask, values[g.index, r.sample], np.nan)
        for g in groups
        for r in g.rollouts
        for k, s in enumerate(r.segments)
    }
    return Annotations(proximal_logprobs={}, reference_logprobs={}, reference_kl={}, values=table)


def test_gae_goes_on_through_segments_and_over_observations():
    groups = [group_of(0, [1.0, 0.0], [[segment([5, 6], [1, 0]), segment([7, 8], [1, 1])], [segment([9])]])]
    known = with_values(groups, {(0, 0): 0.5, (0, 1): 0.25})
    config = ObjectiveConfig(advantage="gae", gamma=0.9, gae_lambda=0.5, scale_rewards="none")
    assert needs_annotations(config) and not needs_logprobs(config)
    rows = assign_advantages(groups, config, annotations=known)
    last = 1.0 - 0.5
    between = 0.9 * 0.5 - 0.5
    middle = between + 0.45 * last
    assert rows[1].advantages.tolist() == pytest.approx([middle, last], abs=1e-7)
    assert rows[0].advantages.tolist() == pytest.approx([between + 0.45 * middle, 0.0], abs=1e-7)
    assert rows[2].advantages.tolist() == pytest.approx([-0.25], abs=1e-7)
    targets = value_targets(groups, config, known, gae_lambda=1.0)
    assert {place: row.tolist() for place, row in targets.items()} == {
        (0, 0, 0): pytest.approx([0.81, 0.0]),
        (0, 0, 1): pytest.approx([0.9, 1.0]),
        (0, 1, 0): pytest.approx([0.0]),
    }


def test_whitened_advantages_have_mean_0_and_spread_1_over_the_tokens_of_the_step():
    groups = [plain_group(0, [1.0, 0.0, None], LENGTHS[:3]), plain_group(1, [2.0, -1.0], LENGTHS[:2])]
    known = with_values(groups, dict.fromkeys([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], 0.3))
    rows = assign_advantages(groups, ObjectiveConfig(advantage="gae"), annotations=known)
    values = np.concatenate([row.advantages[row.trained] for row in rows])
    assert len(values) == 10  # the completion that nobody scored takes no part
    assert values.mean() == pytest.approx(0.0, abs=1e-6)
    assert values.std(ddof=1) == pytest.approx(1.0, rel=1e-6)
    plain = assign_advantages(groups, ObjectiveConfig(advantage="gae", scale_rewards="none"), annotations=known)
    raw = np.concatenate([row.advantages[row.trained] for row in plain])
    assert values == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=1e-6)


def test_advantages_that_are_all_equal_are_whitened_to_nothing():
    groups = [plain_group(0, [1.0, 1.0])]
    known = with_values(groups, {(0, 0): 0.0, (0, 1): 0.0})
    assert not any(
        row.advantages.any() for row in assign_advantages(groups, ObjectiveConfig(advantage="gae"), annotations=known)
    )


def test_a_teacher_gives_every_token_the_difference_of_log_probabilities():
    groups = [group_of(0, [1.0, 1.0], [[segment([5, 6], [1, 0])], [segment([7])]])]
    config = ObjectiveConfig(loss="opd", reference="random:llama")
    rows = assign_advantages(groups, config, annotations=annotations(groups, -1.0, -0.25))
    assert [row.advantages.tolist() for row in rows] == [[0.75, 0.0], [0.75]]


def test_equal_token_returns_have_no_advantage():
    groups = [plain_group(0, [1.0, 1.0])]
    config = ObjectiveConfig(advantage="reinforce_plus_plus", gamma=0.5, kl_coef=0.0)
    rows = assign_advantages([plain_group(0, [0.0, 0.0])], config)
    assert not any(row.advantages.any() for row in rows)
    assert any(row.advantages.any() for row in assign_advantages(groups, config))  # discounted: first tokens get less


def test_remax_compares_each_sample_with_the_greedy_completion_of_its_prompt_which_gives_no_row():
    groups = [
        with_baseline(plain_group(0, [1.0, 0.0, None, 0.25], LENGTHS), 0.5),
        with_baseline(plain_group(1, [1.0]), 1.0),
        with_baseline(plain_group(2, [1.0, 1.0]), -0.5),
    ]
    rows = assign_advantages(groups, ObjectiveConfig(advantage="remax"))
    assert [(row.group, row.sample, row.advantages[0]) for row in rows] == [
        (0, 0, 0.5),
        (0, 1, -0.5),
        (0, 2, 0.0),
        (0, 3, -0.25),
        (1, 0, 0.0),
        (2, 0, 1.5),
        (2, 1, 1.5),
    ]
    assert [bool(row.trained.any()) for row in rows] == [True, True, False, True, True, True, True]


def test_the_greedy_completion_pays_the_same_price_of_length_and_no_kl():
    group = with_baseline(plain_group(0, [1.0, 1.0], [80, 90]), 1.0, length=100)
    config = ObjectiveConfig(advantage="remax", overlong_buffer=20, length_cost=0.01)
    rows = assign_advantages([group], config, max_completion_length=100)
    greedy = 1.0 - 1.0 - 1.0
    assert [row.advantages[0] for row in rows] == pytest.approx([1.0 - 0.8 - greedy, 1.0 - 0.5 - 0.9 - greedy])
    config = ObjectiveConfig(advantage="remax", kl_coef=0.5, kl_in="reward")
    group = with_baseline(plain_group(0, [1.0, 0.0], [2, 4]), 0.75)
    rows = assign_advantages([group], config, annotations=annotations([group], -1.0, -1.2))
    assert [row.advantages[0] for row in rows] == pytest.approx([1.0 - 0.2 - 0.75, 0.0 - 0.4 - 0.75])


@pytest.mark.parametrize("group", [plain_group(0, [1.0, 0.0]), with_baseline(plain_group(0, [1.0, 0.0]), None)])
def test_remax_without_a_greedy_reward_is_an_error_and_never_a_baseline_of_zero(group):
    with pytest.raises(ValueError, match="greedy completion is unscored"):
        assign_advantages([group], ObjectiveConfig(advantage="remax"))


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name not in ("remax", "teacher")])
def test_a_baseline_changes_nothing_for_estimators_that_do_not_ask_for_one(advantage):
    groups = [plain_group(0, REWARDS, LENGTHS), plain_group(1, [1.0, 0.0, 0.0, 0.0], LENGTHS)]
    config = ObjectiveConfig(advantage=advantage)
    plain = assign_advantages(groups, config)
    beside = assign_advantages([with_baseline(group, 7.0) for group in groups], config)
    assert by_sample(beside) == by_sample(plain)


@pytest.mark.parametrize("advantage", ["rloo", "vtrace", "reinforce_baseline", "opo", "grpo", "grpo_passk"])
def test_a_batch_with_one_scored_sample_has_nothing_to_compare(advantage):
    group = plain_group(0, [None, 1.0])
    config = ObjectiveConfig(advantage=advantage, **({"gamma": 0.5} if advantage == "vtrace" else {}))
    rows = assign_advantages([group], config, annotations=annotations([group], -0.5))
    assert not any(row.advantages.any() for row in rows)
