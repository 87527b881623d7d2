"""Advantage estimators against their published formulas, the true gradient, and the inputs that break others."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.errors import ObjectiveError
from nearpolicy.objectives.advantages import (
    LARGEST_REWARD,
    dr_grpo,
    grpo,
    grpo_passk,
    opo,
    reinforce,
    reinforce_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    scale_by_batch_spread,
)

CENTRED = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": lambda rewards: opo(rewards, [3 + i for i in range(len(rewards))]),
    "reinforce_baseline": lambda rewards: reinforce_baseline([rewards])[0],
    "reinforce_plus_plus": lambda rewards: reinforce_plus_plus([rewards])[0],
    "reinforce_plus_plus_baseline": lambda rewards: reinforce_plus_plus_baseline([rewards])[0],
    "batch_spread": lambda rewards: scale_by_batch_spread([dr_grpo(rewards)], [rewards])[0],
}
"""Estimators that subtract a mean, all as functions of one group."""
ALL = CENTRED | {"reinforce": reinforce, "remax": lambda rewards: remax(rewards, 0.5)}
SCALE_FREE = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "batch_spread")
each_centred = pytest.mark.parametrize("estimator", CENTRED.values(), ids=CENTRED)
each = pytest.mark.parametrize("estimator", ALL.values(), ids=ALL)

REWARD = st.integers(-100_000, 100_000).map(lambda thousandths: thousandths / 1000)
GROUP = st.lists(st.none() | REWARD, min_size=1, max_size=8)
PAIRED_GROUP = GROUP.filter(lambda group: sum(reward is not None for reward in group) > 1)
BATCH = st.lists(GROUP, min_size=1, max_size=4).filter(lambda batch: len(scored_in(batch)) > 1)
few = settings(max_examples=30)
"""For properties that many estimators are held to."""


def scored_of(rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def scored_in(batch) -> list[float]:
    return [reward for rewards in batch for reward in scored_of(rewards)]


def close(found, right) -> None:
    np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9)


# Each estimator is its published formula: loops over samples, one formula per line.


def without(batch, g: int, i: int) -> list[float]:
    return [r for h, group in enumerate(batch) for j, r in enumerate(group) if r is not None and (h, j) != (g, i)]


def by_formula(rewards, formula) -> list[float]:
    return [0.0 if reward is None else formula(i, reward) for i, reward in enumerate(rewards)]


@given(GROUP)
def test_mean_centred_advantages_are_the_reward_minus_the_mean_of_the_scored(rewards):
    scored = scored_of(rewards)
    close(dr_grpo(rewards), by_formula(rewards, lambda i, r: r - sum(scored) / len(scored)))
    close(grpo(rewards, scale=False), dr_grpo(rewards))


@given(GROUP)
def test_grpo_divides_by_the_spread_of_the_scored(rewards):
    scored = scored_of(rewards)
    spread = statistics.stdev(scored) if len(set(scored)) > 1 else math.inf
    close(grpo(rewards), by_formula(rewards, lambda i, r: (r - statistics.mean(scored)) / spread))


@given(PAIRED_GROUP)
def test_rloo_subtracts_the_mean_of_the_others(rewards):
    close(rloo(rewards), by_formula(rewards, lambda i, r: r - statistics.mean(without([rewards], 0, i))))
    n = len(scored_of(rewards))
    close(rloo(rewards), dr_grpo(rewards) * n / (n - 1))


@settings(max_examples=50)
@given(BATCH)
def test_leave_one_out_in_a_batch_subtracts_the_mean_of_all_others_of_all_prompts(batch):
    for g, found in enumerate(reinforce_baseline(batch)):
        close(found, by_formula(batch[g], lambda i, r, g=g: r - statistics.mean(without(batch, g, i))))


@settings(max_examples=50)
@given(BATCH)
def test_reinforce_plus_plus_normalises_over_the_batch(batch):
    scored = scored_in(batch)
    spread = statistics.stdev(scored) if len(set(scored)) > 1 else math.inf
    for group, found in zip(batch, reinforce_plus_plus(batch), strict=True):
        close(found, by_formula(group, lambda i, r: (r - statistics.mean(scored)) / spread))


@settings(max_examples=50)
@given(BATCH)
def test_reinforce_plus_plus_with_baseline_divides_what_the_group_mean_leaves_by_its_spread_in_the_batch(batch):
    left = [by_formula(group, lambda i, r, group=group: r - statistics.mean(scored_of(group))) for group in batch]
    counted = [
        x for group, xs in zip(batch, left, strict=True) for r, x in zip(group, xs, strict=True) if r is not None
    ]
    spread = math.sqrt(sum((x - sum(counted) / len(counted)) ** 2 for x in counted) / (len(counted) - 1))
    for group, xs, found in zip(batch, left, reinforce_plus_plus_baseline(batch), strict=True):
        flat = all(len(set(scored_of(other))) < 2 for other in batch)
        close(found, [0.0] * len(group) if flat else [x / spread for x in xs])


@settings(max_examples=50)
@given(BATCH)
def test_batch_scaling_divides_by_the_spread_of_the_rewards_themselves(batch):
    scored = scored_in(batch)
    found = scale_by_batch_spread([dr_grpo(group) for group in batch], batch)
    spread = statistics.stdev(scored) if len(set(scored)) > 1 else math.inf
    for group, values in zip(batch, found, strict=True):
        close(values, by_formula(group, lambda i, r, group=group: (r - statistics.mean(scored_of(group))) / spread))


@given(GROUP, REWARD)
def test_reinforce_subtracts_nothing_and_remax_the_greedy_reward(rewards, greedy):
    close(reinforce(rewards), by_formula(rewards, lambda i, r: r))
    close(remax(rewards, greedy), by_formula(rewards, lambda i, r: r - greedy))


@given(GROUP, st.data())
def test_opo_subtracts_the_mean_weighted_by_length(rewards, data):
    lengths = data.draw(st.lists(st.integers(1, 5000), min_size=len(rewards), max_size=len(rewards)))
    kept = [(r, length) for r, length in zip(rewards, lengths, strict=True) if r is not None]
    total = sum(length for _, length in kept)
    found = opo(rewards, lengths)
    np.testing.assert_allclose(
        found, by_formula(rewards, lambda i, r: r - sum(x * length for x, length in kept) / total), atol=1e-7
    )
    assert abs(sum(a * length for a, length in zip(found, lengths, strict=True))) < 1e-6 * (total + 1)
    close(opo(rewards, [7] * len(rewards)), dr_grpo(rewards))


@given(st.lists(st.none() | st.integers(0, 1), min_size=1, max_size=7), st.integers(1, 7))
def test_passk_advantages_are_what_all_k_subsets_of_the_group_give(rewards, k):
    scored = [i for i, reward in enumerate(rewards) if reward is not None]
    if k > len(scored):
        with pytest.raises(ValueError, match="1 <= k <= scored"):
            grpo_passk(rewards, k=k)
        return
    subsets = [(members, max(rewards[i] for i in members)) for members in itertools.combinations(scored, k)]
    mean = Fraction(sum(reward for _, reward in subsets), len(subsets))
    spread = math.sqrt(mean * (1 - mean))
    found = grpo_passk(rewards, k=k)
    for i, reward in enumerate(rewards):
        mine = [value for members, value in subsets if i in members]
        right = 0.0 if reward is None or spread == 0.0 else float(Fraction(sum(mine), len(mine)) - mean) / spread
        assert found[i] == pytest.approx(right, abs=1e-12)
    assert abs(found.sum()) < 1e-12


def test_pass_at_one_is_grpo_with_the_n_spread_and_published_form_holds_for_large_groups():
    rewards = [1, 0, 0, 1, 0]
    close(grpo_passk(rewards, k=1), (np.array(rewards) - 0.4) / math.sqrt(0.24))
    # 2,000 rollouts: C(2000, 1000) is beyond float64, and C(1990, 8) beyond its 53 bits.
    big = [1] * 10 + [0] * 1990
    for k in (8, 1000):
        share = Fraction(math.comb(1990, k), math.comb(2000, k))
        spread = math.sqrt(share * (1 - share))
        found = grpo_passk(big, k=k)
        assert found[0] == pytest.approx(float(share) / spread, rel=1e-12)
        wrong = share - Fraction(math.comb(1989, k - 1), math.comb(1999, k - 1))
        assert found[-1] == pytest.approx(float(wrong) / spread, rel=1e-12)
    # One wrong rollout fewer than k: every subset passes, nothing is left to learn.
    assert grpo_passk([1, 0, 0], k=3).tolist() == [0.0] * 3
    # Half of the subsets fail, but so small a share in float64 that it is 0: no division by it.
    assert np.isfinite(grpo_passk([1] * 1000 + [0] * 1000, k=1000)).all()


# The known faults, and their kind.


def test_groups_of_one_and_groups_with_equal_rewards_have_defined_advantages():
    """K04."""
    assert grpo([0.7]).tolist() == dr_grpo([0.7]).tolist() == opo([0.7], [5]).tolist() == [0.0]
    assert reinforce_plus_plus([[0.7]])[0].tolist() == reinforce_plus_plus_baseline([[0.7]])[0].tolist() == [0.0]
    with pytest.raises(ValueError, match="1 scored of 1 rollouts: a group of one where the estimator needs two"):
        rloo([0.7])
    with pytest.raises(ValueError, match="a batch of one where the estimator needs two"):
        reinforce_baseline([[0.7], [None]])

    assert [grpo(group).tolist() for group in ([1.0], [0, 1])] == [[0.0], pytest.approx([-0.70710678, 0.70710678])]

    flat = [[1, 1, 1, 1], [0, 0, 0, 0]]
    for batch in (
        [grpo(group) for group in flat],
        [rloo(group) for group in flat],
        reinforce_plus_plus_baseline(flat),
        scale_by_batch_spread([dr_grpo(group) for group in flat], flat),
    ):
        assert [group.tolist() for group in batch] == [[0.0] * 4] * 2
    # The batch-wide spread is 0.5345, and only estimators that compare prompts see it.
    ones, zeros = reinforce_plus_plus(flat)
    assert ones.tolist() == pytest.approx([0.5 / 0.53452248] * 4)
    assert zeros.tolist() == pytest.approx([-0.5 / 0.53452248] * 4)
    close(scale_by_batch_spread([np.ones(4), np.ones(4)], flat), np.full((2, 4), 1 / 0.5345224838))


def test_a_group_of_one_beside_another_group_keeps_its_zero_in_a_batch():
    """K04."""
    alone, pair = reinforce_plus_plus_baseline([[1.0], [0.0, 1.0]])
    assert alone.tolist() == [0.0]
    assert pair.tolist() == pytest.approx([-1.0, 1.0])  # -0.5, 0.5 and 0 have an n - 1 spread of 0.5


@each_centred
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.1, 1 / 3, -7.7, 5e-324, LARGEST_REWARD])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_equal_rewards_give_exactly_zero_in_every_centred_estimator(estimator, value, size):
    """K04. The mean of ten times 0.1 is not 0.1 in floating point; over its spread that is a full advantage."""
    assert estimator([value] * size).tolist() == [0.0] * size
    assert estimator([value, None, value]).tolist() == [0.0] * 3


def test_zeros_of_both_signs_are_equal_rewards():
    """K04."""
    for estimator in CENTRED.values():
        assert not estimator([0.0, -0.0, 0.0]).any()


@each
def test_groups_in_which_nothing_is_scored_give_zeros_or_say_what_is_missing(estimator):
    """K04, K12."""
    if estimator is rloo:
        with pytest.raises(ValueError, match="0 scored"):
            estimator([None, None])
    else:
        assert estimator([None, None]).tolist() == [0.0, 0.0]
        assert estimator([]).tolist() == []


def test_a_batch_may_hold_empty_and_unscored_groups():
    """K04, K12."""
    batch = [[], [None, None], [0.0, 2.0], [None]]
    for estimator in (reinforce_baseline, reinforce_plus_plus, reinforce_plus_plus_baseline):
        found = estimator(batch)
        assert [len(group) for group in found] == [0, 2, 2, 1]
        assert [group.any() for group in found] == [False, False, True, False]
    assert reinforce_baseline([]) == reinforce_plus_plus([]) == reinforce_plus_plus_baseline([]) == []
    assert scale_by_batch_spread([], []) == []


@pytest.mark.parametrize("name", SCALE_FREE)
@pytest.mark.parametrize("tiny", [1e-200, 5e-324, LARGEST_REWARD])
def test_tiny_and_huge_rewards_keep_a_finite_spread(name, tiny):
    """K04. The squares in a spread underflow below 1e-160, and others then divide 0 by 0."""
    if name == "batch_spread" and tiny < 1e-300:
        assert np.isfinite(CENTRED[name]([0.0, tiny])).all()  # the advantages it is given are rounded already
        return
    close(CENTRED[name]([0.0, tiny]), [-0.70710678118, 0.70710678118])
    close(CENTRED[name]([-tiny, tiny, None]), [-0.70710678118, 0.70710678118, 0.0])


@each
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e31])
def test_a_reward_that_is_no_number_is_refused_by_its_place(estimator, bad):
    """K04."""
    with pytest.raises(
        ValueError, match=r"rewards_(G|B_G\[0\])\[2\] is (nan|-?inf|1e\+31); a reward is a finite number"
    ):
        estimator([0.0, None, bad, 1.0])


def test_a_batch_names_the_group_of_a_reward_that_is_no_number():
    """K04."""
    with pytest.raises(ValueError, match=r"rewards_B_G\[1\]\[0\] is nan"):
        reinforce_plus_plus([[0.0, 1.0], [math.nan, 1.0]])
    with pytest.raises(ValueError, match="greedy_reward is inf"):
        remax([1.0], math.inf)
    with pytest.raises(ValueError, match="greedy_reward is None"):
        remax([1.0], None)


def test_completions_are_compared_with_those_of_their_own_prompt_whatever_the_order_of_arrival():
    """K05."""
    arrivals = [("A", 0, 1.0), ("B", 0, 0.0), ("A", 1, 0.0), ("B", 1, 0.0)]
    for order in itertools.permutations(arrivals):
        groups = {"A": [None, None], "B": [None, None]}
        for prompt, sample, reward in order:
            groups[prompt][sample] = reward
        assert {prompt: dr_grpo(rewards).tolist() for prompt, rewards in groups.items()} == {
            "A": [0.5, -0.5],
            "B": [0.0, 0.0],
        }


@each_centred
@few
@given(rewards=PAIRED_GROUP, data=st.data())
def test_advantages_follow_their_samples_through_any_order(estimator, rewards, data):
    """K05."""
    if estimator is CENTRED["opo"]:
        lengths = data.draw(st.lists(st.integers(1, 99), min_size=len(rewards), max_size=len(rewards)))
        order = data.draw(st.permutations(range(len(rewards))))
        close(opo([rewards[i] for i in order], [lengths[i] for i in order]), opo(rewards, lengths)[list(order)])
        return
    order = data.draw(st.permutations(range(len(rewards))))
    close(estimator([rewards[i] for i in order]), estimator(rewards)[list(order)])


@few
@given(BATCH, st.data())
def test_the_order_of_groups_in_a_batch_changes_no_advantage(batch, data):
    """K05."""
    order = data.draw(st.permutations(range(len(batch))))
    for estimator in (reinforce_baseline, reinforce_plus_plus, reinforce_plus_plus_baseline):
        for place, found in zip(order, estimator([batch[i] for i in order]), strict=True):
            close(found, estimator(batch)[place])


@each_centred
@few
@given(rewards=PAIRED_GROUP, shift=st.integers(-1000, 1000), factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_constant_added_to_all_rewards_changes_nothing_and_a_factor_scales_or_cancels(
    estimator, rewards, shift, factor
):
    moved = [None if reward is None else reward + shift for reward in rewards]
    if len(set(scored_of(rewards))) > 1:
        # Rewards differ by at least 0.001, and a shift by 1000 costs each 1e-13.
        np.testing.assert_allclose(estimator(moved), estimator(rewards), atol=1e-8)
    scaled = [None if reward is None else reward * factor for reward in rewards]
    cancels = estimator in [CENTRED[name] for name in SCALE_FREE]
    close(estimator(scaled), estimator(rewards) * (1.0 if cancels else factor))


def test_a_sample_nobody_scored_is_not_a_sample_with_score_zero():
    """K12."""
    scores = {"A": (1.0, None), "B": (None, 0.4), "C": (None, None)}
    totals = []
    for of_sample in scores.values():
        parts = [w * score for w, score in zip((1.0, 0.5), of_sample, strict=True) if score is not None]
        totals.append(sum(parts) if parts else None)
    assert totals == [1.0, 0.2, None]
    assert dr_grpo(totals).tolist() == pytest.approx([0.4, -0.4, 0.0])
    assert dr_grpo([1.0, 0.2, 0.0]).tolist() == pytest.approx([0.6, -0.2, -0.4])  # what a 0 would have made of it


@each
@few
@given(rewards=PAIRED_GROUP)
def test_unscored_rollouts_change_nobody_elses_advantage(estimator, rewards):
    """K12."""
    present = [i for i, reward in enumerate(rewards) if reward is not None]
    alone = estimator(scored_of(rewards))
    if estimator is CENTRED["opo"]:
        alone = opo(scored_of(rewards), [3 + i for i in present])
    close(estimator(rewards)[present], alone)
    assert all(value == 0.0 for i, value in enumerate(estimator(rewards)) if i not in present)


def test_numpy_arrays_tuples_and_booleans_are_rewards_too():
    for rewards in ((1, 0), np.array([1.0, 0.0]), [True, False], np.array([1, 0]), np.array([True, False])):
        assert rloo(rewards).tolist() == [1.0, -1.0]
        assert grpo_passk(rewards, k=1).tolist() == [1.0, -1.0]


def test_bad_arguments_say_what_to_do():
    with pytest.raises(ObjectiveError, match=r"rewards_G\[1\] is 0.5; pass@k needs rewards of 0 or 1"):
        grpo_passk([1, 0.5], k=1)
    with pytest.raises(ValueError, match="k is 0"):
        grpo_passk([1, 0], k=0)
    with pytest.raises(ValueError, match="k is 1 and 0 rollouts"):
        grpo_passk([None], k=1)
    with pytest.raises(ValueError, match=r"lengths_G\[1\] is -1"):
        opo([1, 0], [1, -1])
    with pytest.raises(ValueError, match="lengths_G has 1 entries for 2"):
        opo([1, 0], [1])
    with pytest.raises(ValueError, match="lengths_G is 0 for every scored rollout"):
        opo([1, 0, None], [0, 0, 5])
    with pytest.raises(ValueError, match=r"groups of \[1\] for rewards of \[2\]"):
        scale_by_batch_spread([np.zeros(1)], [[1.0, 0.0]])
    assert opo([1, 0, None], [1, 1, -5]).tolist() == [0.5, -0.5, 0.0]  # lengths of unscored rollouts are not read


# Against the truth: a bandit with a softmax policy, every possible group with its probability.

LOGITS = np.array([0.3, -0.9, 0.5])
ARM_REWARDS = np.array([1.0, -0.4, 0.25])
ARM_LENGTHS = [2, 9, 5]
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum()
SCORE = np.eye(3) - POLICY  # row a: gradient of log pi(a) with respect to the logits
TRUE = (POLICY * ARM_REWARDS) @ SCORE
SAME = {"rtol": 0.0, "atol": 1e-12}


def expected_gradient(size: int, advantages_of) -> np.ndarray:
    """Sum over all groups of their probability times (1/G) sum of A_i grad log pi(a_i)."""
    total = np.zeros(3)
    for arms in itertools.product(range(3), repeat=size):
        total += math.prod(POLICY[a] for a in arms) * (advantages_of(arms) @ SCORE[list(arms)]) / size
    return total


def rewards_of(arms) -> list[float]:
    return [ARM_REWARDS[a] for a in arms]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reinforce_and_remax_follow_the_true_gradient(size):
    np.testing.assert_allclose(expected_gradient(size, lambda arms: reinforce(rewards_of(arms))), TRUE, **SAME)
    greedy = ARM_REWARDS[LOGITS.argmax()]
    np.testing.assert_allclose(expected_gradient(size, lambda arms: remax(rewards_of(arms), greedy)), TRUE, **SAME)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rloo_follows_the_true_gradient_and_mean_centring_shrinks_it_by_one_gth(size):
    np.testing.assert_allclose(expected_gradient(size, lambda arms: rloo(rewards_of(arms))), TRUE, **SAME)
    shrunk = expected_gradient(size, lambda arms: dr_grpo(rewards_of(arms)))
    np.testing.assert_allclose(shrunk, TRUE * (size - 1) / size, **SAME)
    equal = expected_gradient(size, lambda arms: opo(rewards_of(arms), [6] * size))
    np.testing.assert_allclose(equal, shrunk, **SAME)


@pytest.mark.parametrize("size", [2, 3])
def test_dividing_by_the_spread_and_weighing_by_length_bias_the_gradient_exactly_as_their_formulas_say(size):
    def grpo_by_hand(arms):
        rewards = rewards_of(arms)
        spread = statistics.stdev(rewards) if len(set(rewards)) > 1 else math.inf
        return np.array([(r - statistics.mean(rewards)) / spread for r in rewards])

    def opo_by_hand(arms):
        weighted = sum(ARM_LENGTHS[a] * ARM_REWARDS[a] for a in arms) / sum(ARM_LENGTHS[a] for a in arms)
        return np.array([ARM_REWARDS[a] - weighted for a in arms])

    for ours, by_hand in (
        (lambda arms: grpo(rewards_of(arms)), grpo_by_hand),
        (lambda arms: opo(rewards_of(arms), [ARM_LENGTHS[a] for a in arms]), opo_by_hand),
    ):
        found = expected_gradient(size, ours)
        np.testing.assert_allclose(found, expected_gradient(size, by_hand), **SAME)
        cosine = found @ TRUE / np.linalg.norm(found) / np.linalg.norm(TRUE)
        assert 0 < cosine < 1 - 1e-6


def test_leave_one_out_in_a_batch_follows_the_true_gradient_of_all_prompts_together():
    # Two prompts with policies and rewards of their own, groups of two; and groups of one, where rloo is undefined.
    logits = np.array([LOGITS, [1.0, 0.0, -0.5]])
    policies = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rewards = np.array([ARM_REWARDS, [3.0, 2.0, 2.5]])
    true = np.array([(policies[b] * rewards[b]) @ (np.eye(3) - policies[b]) for b in range(2)]) / 2
    for size in (1, 2):
        total = {"baseline": np.zeros((2, 3)), "none": np.zeros((2, 3))}
        for arms in itertools.product(range(3), repeat=2 * size):
            groups = arms[:size], arms[size:]
            batch = [[rewards[b, a] for a in groups[b]] for b in range(2)]
            probability = math.prod(policies[b, a] for b in range(2) for a in groups[b])
            for name, advantages in (("baseline", reinforce_baseline(batch)), ("none", map(reinforce, batch))):
                for b, values in enumerate(advantages):
                    score = (np.eye(3) - policies[b])[list(groups[b])]
                    total[name][b] += probability * (values @ score) / (2 * size)
        np.testing.assert_allclose(total["baseline"], true, **SAME)
        np.testing.assert_allclose(total["none"], true, **SAME)


def test_the_baseline_of_least_variance_has_less_variance_than_none_and_than_the_plain_mean():
    # OPO's claim, in its own world: the squared score norm grows with length. One sample, ideal baselines.
    lengths, rewards, policy = np.array([1.0, 4.0, 16.0]), np.array([0.0, 1.0, 0.2]), np.array([0.5, 0.3, 0.2])

    def second_moment(baseline: float) -> float:
        return float(policy @ (lengths * (rewards - baseline) ** 2))

    many = np.repeat([0, 1, 2], [50, 30, 20])
    baseline = rewards[0] - opo(rewards[many], lengths[many])[0]
    assert second_moment(baseline) < min(second_moment(0.0), second_moment(float(policy @ rewards)))
    assert second_moment(baseline) <= min(second_moment(baseline + 1e-3), second_moment(baseline - 1e-3))


def test_normalising_over_a_large_batch_approaches_the_gradient_divided_by_the_spread():
    # A batch in which every arm appears as often as the policy chooses it: mean and spread are those of the policy.
    policy = np.array([0.5, 0.3, 0.2])
    arms = np.repeat([0, 1, 2], [5000, 3000, 2000])
    mean = policy @ ARM_REWARDS
    spread = math.sqrt(policy @ (ARM_REWARDS - mean) ** 2)
    [found] = reinforce_plus_plus([ARM_REWARDS[arms]])
    gradient = found @ (np.eye(3) - policy)[arms] / len(arms)
    np.testing.assert_allclose(gradient, (policy * ARM_REWARDS) @ (np.eye(3) - policy) / spread, rtol=1e-4)
    [as_groups] = reinforce_plus_plus_baseline([ARM_REWARDS[arms]])
    np.testing.assert_allclose(as_groups, found, atol=1e-12)
