"""Penalties, bonuses and filters: the numbers of the papers, and what must never change a reward."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.objectives.shaping import (
    diversity_bonus,
    kimi_length_reward,
    ngram_similarity,
    overlong_penalty,
    pass_rate_reason,
    token_cost,
    zero_variance_reason,
)

LENGTHS = st.lists(st.integers(0, 5000), max_size=8)


def test_the_overlong_penalty_grows_linearly_inside_the_last_buffer_tokens():
    """K13."""
    found = overlong_penalty([80, 81, 90, 100, 101], max_length=100, buffer=20)
    assert found.tolist() == [0.0, -0.05, -0.5, -1.0, -1.0]
    assert not np.signbit(found[0])


def test_the_overlong_penalty_at_its_edges():
    """K13."""
    assert overlong_penalty([0, 1, 10**9], max_length=100, buffer=20).tolist() == [0.0, 0.0, -1.0]
    # The buffer may be the whole answer; DAPO itself: 20,480 = 16,384 + 4,096 with factor 1.
    assert overlong_penalty([0, 25, 50], max_length=50, buffer=50, factor=2.0).tolist() == [0.0, -1.0, -2.0]
    dapo = overlong_penalty([16384, 16385, 18432, 20480], max_length=20480, buffer=4096)
    assert dapo.tolist() == [0.0, -1 / 4096, -0.5, -1.0]
    assert overlong_penalty([200], max_length=100, buffer=20, factor=0.0).tolist() == [0.0]
    assert overlong_penalty([], max_length=100, buffer=20).tolist() == []


@given(LENGTHS, st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([0.5, 1.0, 3.0]))
def test_the_overlong_penalty_is_the_piecewise_formula_of_dapo(lengths, max_length, buffer, factor):
    """K13."""
    buffer = min(buffer, max_length)
    right = []
    for length in lengths:
        if length <= max_length - buffer:
            right.append(0.0)
        elif length <= max_length:
            right.append(factor * ((max_length - buffer) - length) / buffer)
        else:
            right.append(-factor)
    found = overlong_penalty(lengths, max_length=max_length, buffer=buffer, factor=factor)
    np.testing.assert_allclose(found, right, atol=1e-12)


def test_the_overlong_penalty_refuses_what_has_no_meaning():
    """K13. A buffer of 0 would divide by it; one beyond the limit would punish the empty answer."""
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match="the buffer is 1"):
            overlong_penalty([5], max_length=100, buffer=buffer)
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="factor is"):
            overlong_penalty([5], max_length=100, buffer=20, factor=factor)
    for bad in (-1, math.nan, None):
        with pytest.raises(ValueError, match=r"lengths_G\[1\] is"):
            overlong_penalty([5, bad], max_length=100, buffer=20)


def test_the_kimi_length_reward_prefers_short_right_answers_and_never_pays_a_wrong_one():
    # Lengths 100 .. 300: lambda is 0.5, 0.25, 0, -0.5.
    lengths = [100, 150, 200, 300]
    assert kimi_length_reward(lengths, [True] * 4).tolist() == [0.5, 0.25, 0.0, -0.5]
    assert kimi_length_reward(lengths, [False] * 4).tolist() == [0.0, 0.0, 0.0, -0.5]
    # Equal lengths, one answer, nothing scored: no length to prefer.
    assert kimi_length_reward([7, 7], [True, False]).tolist() == [0.0, 0.0]
    assert kimi_length_reward([7], [True]).tolist() == [0.0]
    assert kimi_length_reward([7, 9], [None, None]).tolist() == [0.0, 0.0]
    assert kimi_length_reward([], []).tolist() == []
    with pytest.raises(ValueError, match="correct_G has 1 entries for 2 lengths"):
        kimi_length_reward([1, 2], [True])


def test_an_unscored_answer_sets_neither_the_shortest_nor_the_longest_length():
    """K12."""
    found = kimi_length_reward([1, 100, 200, 9999], [None, True, False, None])
    assert found.tolist() == [0.0, 0.5, -0.5, 0.0]


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from([True, False, None])), max_size=8))
def test_the_kimi_length_reward_is_its_formula(samples):
    scored = [length for length, correct in samples if correct is not None]
    found = kimi_length_reward([length for length, _ in samples], [correct for _, correct in samples])
    for (length, correct), value in zip(samples, found, strict=True):
        if correct is None or min(scored) == max(scored):
            assert value == 0.0
        else:
            lam = 0.5 - (length - min(scored)) / (max(scored) - min(scored))
            assert value == pytest.approx(lam if correct else min(0.0, lam), abs=1e-12)
            assert -0.5 <= value <= 0.5


def test_the_plain_cost_of_a_token_is_the_same_for_all():
    assert token_cost([0, 1, 1000], per_token=0.001).tolist() == [0.0, -0.001, -1.0]
    assert not np.signbit(token_cost([0], per_token=0.001)[0])
    with pytest.raises(ValueError, match="per_token is -1"):
        token_cost([1], per_token=-1.0)


def test_similarity_is_the_share_of_common_ngrams():
    tokens = [[1, 2, 3, 4], [1, 2, 3, 9], [7, 7, 7, 7], [1, 2, 3, 4]]
    found = ngram_similarity(tokens, n=2)
    # {12, 23, 34} and {12, 23, 39}: 2 of 4.
    assert found[0].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert found[2].tolist() == [0.0, 0.0, 1.0, 0.0]  # 77 three times is one gram
    assert (found == found.T).all()
    assert ngram_similarity([np.array([1, 2, 3]), [3, 2, 1]], n=1).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert ngram_similarity([], n=1).shape == (0, 0)
    with pytest.raises(ValueError, match="n is 0"):
        ngram_similarity([[1]], n=0)


def test_completions_shorter_than_an_ngram_are_alike_only_if_equal():
    found = ngram_similarity([[5], [6], [5], [], [], [1, 2, 3]], n=3)
    assert found[0].tolist() == [1, 0, 1, 0, 0, 0]
    assert found[3].tolist() == [0, 0, 0, 1, 1, 0]


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=5), st.integers(1, 3))
def test_similarity_counts_every_ngram_once(tokens, n):
    found = ngram_similarity(tokens, n=n)
    grams = []
    for sequence in tokens:
        seen = []
        for start in range(max(1, len(sequence) - n + 1)):
            gram = sequence[start : start + n]
            if gram not in seen:
                seen.append(gram)
        grams.append(seen)
    for i, mine in enumerate(grams):
        for j, other in enumerate(grams):
            shared = sum(gram in other for gram in mine)
            assert found[i, j] == shared / (len(mine) + len(other) - shared)


def test_the_diversity_bonus_is_the_mean_dissimilarity_to_the_others():
    similarity = [[1.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 1.0]]
    assert diversity_bonus(similarity, weight=2.0).tolist() == [1.5, 1.25, 1.75]
    # The diagonal is not read, and a group of copies earns nothing.
    assert diversity_bonus(np.ones((4, 4)), weight=1.0).tolist() == [0.0] * 4
    assert diversity_bonus(np.full((2, 2), 0.0), weight=0.5).tolist() == [0.5, 0.5]
    assert diversity_bonus([[9.0, 0.0], [0.0, math.nan]], weight=1.0).tolist() == [1.0, 1.0]


def test_only_those_who_take_part_are_compared():
    """K12."""
    similarity = [[1.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 1.0]]
    assert diversity_bonus(similarity, weight=1.0, takes_part_G=[True, True, False]).tolist() == [0.5, 0.5, 0.0]
    for nobody in ([True, False, False], [False] * 3):
        assert diversity_bonus(similarity, weight=1.0, takes_part_G=nobody).tolist() == [0.0] * 3
    assert diversity_bonus([[1.0]], weight=1.0).tolist() == [0.0]
    assert diversity_bonus(np.zeros((0, 0)), weight=1.0).tolist() == []


def test_a_matrix_that_is_no_similarity_is_refused_by_its_place():
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"similarity_G_G\[1, 0\] is"):
            diversity_bonus([[1.0, 0.5], [bad, 1.0]], weight=1.0)
    with pytest.raises(ValueError, match=r"similarity_G_G has shape \(1, 2\)"):
        diversity_bonus([[1.0, 0.5]], weight=1.0)
    with pytest.raises(ValueError, match=r"takes_part_G has shape \(1,\) for 2 rollouts"):
        diversity_bonus(np.ones((2, 2)), weight=1.0, takes_part_G=[True])
    with pytest.raises(ValueError, match="weight is nan"):
        diversity_bonus(np.ones((2, 2)), weight=math.nan)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5), st.data())
def test_bonuses_follow_their_completions_through_any_order(tokens, data):
    """K05."""
    order = data.draw(st.permutations(range(len(tokens))))
    bonus = diversity_bonus(ngram_similarity(tokens, n=2), weight=1.0)
    moved = diversity_bonus(ngram_similarity([tokens[i] for i in order], n=2), weight=1.0)
    np.testing.assert_allclose(moved, bonus[list(order)], atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0, 1.0, 1.0], "zero_variance"),
        ([0.0, -0.0], "zero_variance"),
        ([0.0, None, 0.0], "zero_variance"),
        ([0.0, 1.0], None),
        ([0.0, 5e-324], None),
        ([None, 1.0, None, 0.0], None),
        ([1.0, None], "too_few_scored"),
        ([0.7], "too_few_scored"),
        ([None, None], "too_few_scored"),
        ([], "too_few_scored"),
    ],
)
def test_groups_without_signal_are_named(rewards, reason):
    """K04, K12, K50."""
    assert zero_variance_reason(rewards) == reason


@pytest.mark.parametrize(
    ("rewards", "baseline", "reason"),
    [
        ([1.0, 1.0], 0.0, None),
        ([1.0, 1.0], 1.0, "zero_variance"),
        ([1.0], 0.5, None),
        ([1.0, None], 1.0, "zero_variance"),
        ([1.0, 0.0], 1.0, None),
        ([None, None], 1.0, "too_few_scored"),
    ],
)
def test_beside_a_baseline_a_sample_that_differs_from_it_is_a_signal(rewards, baseline, reason):
    assert zero_variance_reason(rewards, baseline) == reason


def test_five_of_eight_groups_carry_signal():
    """K50."""
    groups = [[0.0, 0.0]] * 2 + [[1.0, 0.0]] * 5 + [[1.0, 1.0]]
    assert sum(zero_variance_reason(group) is None for group in groups) == 5
    assert [zero_variance_reason([0.0] * 8) for _ in range(3)] == ["zero_variance"] * 3


def test_prompts_that_are_too_easy_or_too_hard_are_named_and_bounds_belong_to_what_is_dropped():
    def reason(right: int, of: int, **bounds) -> str | None:
        return pass_rate_reason([1.0] * right + [0.0] * (of - right), **bounds)

    assert [reason(n, 10, too_easy_from=0.9) for n in (8, 9, 10)] == [None, "too_easy", "too_easy"]
    assert [reason(n, 20, too_easy_from=0.9) for n in (17, 18)] == [None, "too_easy"]
    assert [reason(n, 30, too_easy_from=0.9) for n in (26, 27)] == [None, "too_easy"]
    assert [reason(n, 4, too_hard_to=0.0, too_easy_from=1.0) for n in range(5)] == [
        "too_hard",
        None,
        None,
        None,
        "too_easy",
    ]
    assert reason(4, 4) is None
    # Unscored rollouts are not failures, and partial credit passes where the caller says so.
    assert pass_rate_reason([1.0, None, None, None], too_easy_from=0.9) == "too_easy"
    assert pass_rate_reason([0.5, 0.4, 0.6], passing=0.5, too_easy_from=0.9) is None
    assert pass_rate_reason([0.5, 0.6], passing=0.5, too_easy_from=0.9) == "too_easy"
    assert pass_rate_reason([None, None], too_easy_from=0.9) == pass_rate_reason([]) == "unscored"


def test_filters_refuse_what_is_no_number_and_bounds_that_leave_nothing():
    for call in (zero_variance_reason, pass_rate_reason):
        for bad in (math.nan, math.inf):
            with pytest.raises(ValueError, match=r"rewards_G\[1\] is"):
                call([0.0, bad])
    with pytest.raises(ValueError, match=r"too_easy_from is 90"):
        pass_rate_reason([1.0], too_easy_from=90)
    with pytest.raises(ValueError, match="no group would be left"):
        pass_rate_reason([1.0], too_easy_from=0.5, too_hard_to=0.5)


def test_nothing_is_changed_in_place():
    lengths, similarity = np.array([1, 95, 200]), np.ones((3, 3))
    for array in (lengths, similarity):
        array.setflags(write=False)
    for found in (
        overlong_penalty(lengths, max_length=100, buffer=20),
        kimi_length_reward(lengths, np.array([True, False, True])),
        token_cost(lengths, per_token=1.0),
        diversity_bonus(similarity, weight=1.0),
    ):
        assert found.dtype == np.float64 and found.shape == (3,)
