"""Token-level credit against the sums of the papers, against small problems that can be enumerated, and at limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.objectives.advantages import grpo
from nearpolicy.objectives.credit import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    process_min,
    process_sum,
    softmin_rewards,
    trajectory_credit,
    turn_and_trajectory_credit,
    turn_credit,
    turn_grpo,
    turn_indices,
    turn_returns,
    vtrace,
)

NAN = math.nan
NUMBER = st.integers(-40, 40).map(lambda n: n / 8)
SHARE = st.sampled_from([0.0, 0.3, 0.9, 1.0])


def close(found, right) -> None:
    np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9)


@st.composite
def rows(draw) -> dict[str, list]:
    """A ragged row: trained tokens, observations between them and padding, on which values are not even numbers."""
    mask = draw(st.lists(st.booleans(), max_size=12))
    first = mask.index(True) if any(mask) else len(mask)
    columns = {"rewards": [], "values": [], "log_rhos": []}
    for position, trained in enumerate(mask):
        columns["rewards"].append(draw(NUMBER) if position >= first else 0.0)
        columns["values"].append(draw(NUMBER) if trained else NAN)
        columns["log_rhos"].append(draw(NUMBER) / 2 if trained else NAN)
    return columns | {"mask": mask}


def tokens_of(row) -> list[dict[str, float]]:
    """The trained tokens of a row, one after the other, with the rewards up to the next one."""
    tokens = []
    for position, trained in enumerate(row["mask"]):
        if trained:
            tokens.append({"position": position, "reward": 0.0})
            tokens[-1] |= {name: row[name][position] for name in ("values", "log_rhos")}
        if tokens:
            tokens[-1]["reward"] += row["rewards"][position]
    return tokens


def spread_out(row, numbers) -> list[float]:
    out = [0.0] * len(row["mask"])
    for token, number in zip(tokens_of(row), numbers, strict=True):
        out[token["position"]] = number
    return out


# Each function is the sum in its paper.


@given(rows(), SHARE, NUMBER)
def test_returns_are_the_discounted_sum_of_what_is_still_to_come(row, gamma, bootstrap):
    tokens = tokens_of(row)
    right = [
        sum(gamma ** (u - t) * tokens[u]["reward"] for u in range(t, len(tokens)))
        + gamma ** (len(tokens) - t) * bootstrap
        for t in range(len(tokens))
    ]
    close(discounted_returns(row["rewards"], row["mask"], gamma=gamma, bootstrap=bootstrap), spread_out(row, right))


@given(rows(), SHARE, SHARE, NUMBER)
def test_gae_is_the_weighted_sum_of_the_errors_still_to_come(row, gamma, lam, bootstrap):
    tokens = tokens_of(row)
    values = [token["values"] for token in tokens] + [bootstrap]
    deltas = [token["reward"] + gamma * values[t + 1] - values[t] for t, token in enumerate(tokens)]
    right = [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]
    found, returns = gae(row["rewards"], row["values"], row["mask"], gamma=gamma, lam=lam, bootstrap=bootstrap)
    close(found, spread_out(row, right))
    close(returns, spread_out(row, [a + v for a, v in zip(right, values[:-1], strict=True)]))


@given(rows(), SHARE, SHARE, NUMBER, st.sampled_from([(1.0, 1.0), (2.5, 1.0), (0.5, 0.25), (1.5, 1.5), (0.0, 0.0)]))
def test_vtrace_is_the_sum_of_equation_one_with_the_advantage_of_section_four_two(row, gamma, lam, bootstrap, caps):
    rho_bar, c_bar = caps
    tokens = tokens_of(row)
    values = [token["values"] for token in tokens] + [bootstrap]
    ratios = [math.exp(token["log_rhos"]) for token in tokens]
    rhos, cs = [min(rho_bar, x) for x in ratios], [lam * min(c_bar, x) for x in ratios]
    deltas = [rhos[t] * (token["reward"] + gamma * values[t + 1] - values[t]) for t, token in enumerate(tokens)]
    targets = [
        values[s] + sum(gamma ** (t - s) * math.prod(cs[s:t]) * deltas[t] for t in range(s, len(tokens)))
        for s in range(len(tokens))
    ] + [bootstrap]
    right = [rhos[s] * (t["reward"] + gamma * targets[s + 1] - values[s]) for s, t in enumerate(tokens)]
    found, advantages = vtrace(
        row["rewards"],
        row["values"],
        row["log_rhos"],
        row["mask"],
        gamma=gamma,
        rho_bar=rho_bar,
        c_bar=c_bar,
        lam=lam,
        bootstrap=bootstrap,
    )
    close(found, spread_out(row, targets[:-1]))
    close(advantages, spread_out(row, right))


@given(rows(), SHARE, NUMBER)
def test_equal_policies_make_vtrace_the_return_minus_the_value(row, gamma, bootstrap):
    same = [0.0] * len(row["mask"])
    targets, advantages = vtrace(
        row["rewards"], row["values"], same, row["mask"], gamma=gamma, rho_bar=1.0, c_bar=1.0, bootstrap=bootstrap
    )
    returns = discounted_returns(row["rewards"], row["mask"], gamma=gamma, bootstrap=bootstrap)
    close(targets, returns)
    close(advantages, returns - np.where(row["mask"], row["values"], 0.0))
    close(advantages, gae(row["rewards"], row["values"], row["mask"], gamma=gamma, lam=1.0, bootstrap=bootstrap)[0])


def test_the_length_adaptive_lambda_spreads_the_errors_over_a_share_of_the_length():
    assert length_adaptive_lambda(1000, alpha=0.05) == pytest.approx(0.98)
    for length in (21, 400, 30_000):
        lam = length_adaptive_lambda(length, alpha=0.05)
        assert 1 / (1 - lam) == pytest.approx(0.05 * length)
    # 1 - 1/(0.05 x 10) = -1 would alternate signs; it cannot be meant.
    assert [length_adaptive_lambda(length, alpha=0.05) for length in (0, 1, 10, 20)] == [0.0] * 4
    for bad in ({"num_tokens": -1, "alpha": 1.0}, {"num_tokens": 5, "alpha": 0.0}, {"num_tokens": 5, "alpha": NAN}):
        with pytest.raises(ValueError, match="alpha above 0"):
            length_adaptive_lambda(**bad)


# The known faults, and their kind.


def test_gae_and_returns_run_over_trained_tokens_only():
    """K11 (a)."""
    for padding in (99.0, NAN, math.inf):
        found = gae([0, 0, 2, 0], [0.5, 0.5, 0.5, padding], [True, True, True, False], gamma=1.0, lam=0.9)
        close(found[0], [1.215, 1.35, 1.5, 0.0])
        close(found[1], [1.715, 1.85, 2.0, 0.0])


def test_observations_between_actions_cost_no_decay():
    """K11 (b)."""
    found, returns = gae([0, 0, 0, 1], [0, 7, 7, 0], [True, False, False, True], gamma=1.0, lam=0.5)
    assert found.tolist() == [0.5, 0.0, 0.0, 1.0]
    assert returns.tolist() == [0.5, 0.0, 0.0, 1.0]
    close(discounted_returns([0, 0, 0, 1], [True, False, False, True], gamma=0.5), [0.5, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("place", [3, 4, 6])
def test_a_final_reward_on_an_observation_reaches_the_last_action_undiminished(place):
    """K11 (c)."""
    rewards = [0.0] * 7
    rewards[place] = 1.0
    mask = [True, False, False, True, False, False, False]
    assert gae(rewards, [0, 7, 7, 0, 7, 7, 7], mask, gamma=1.0, lam=0.5)[0].tolist() == [0.5, 0, 0, 1.0, 0, 0, 0]
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [0.5, 0, 0, 1.0, 0, 0, 0]


@given(rows(), st.integers(0, 12), st.integers(1, 3))
def test_positions_outside_the_mask_can_be_put_in_anywhere_without_any_effect(row, place, how_many):
    """K11."""
    place = min(place, len(row["mask"]))
    longer = {
        name: column[:place] + [filler] * how_many + column[place:]
        for (name, column), filler in zip(row.items(), (0.0, NAN, math.inf, False), strict=True)
    }
    caps = {"rho_bar": 1.5, "c_bar": 1.0}

    def everything(r):
        args = r["rewards"], r["values"]
        return [
            discounted_returns(r["rewards"], r["mask"], gamma=0.9),
            *gae(*args, r["mask"], gamma=0.9, lam=0.8),
            *vtrace(*args, r["log_rhos"], r["mask"], gamma=0.9, **caps),
            trajectory_credit(2.0, r["mask"]),
        ]

    for before, after in zip(everything(row), everything(longer), strict=True):
        assert after.tolist() == before[:place].tolist() + [0.0] * how_many + before[place:].tolist()


@pytest.mark.parametrize("length", [0, 1, 5])
def test_rows_without_a_trained_token_give_zeros(length):
    """K11."""
    zeros, mask = [0.0] * length, [False] * length
    nothing = [NAN] * length
    for found in (
        discounted_returns(zeros, mask, gamma=1.0, bootstrap=5.0),
        *gae(zeros, nothing, mask, gamma=1.0, lam=1.0, bootstrap=5.0),
        *vtrace(zeros, nothing, nothing, mask, gamma=1.0, rho_bar=1.0, c_bar=1.0, bootstrap=5.0),
        trajectory_credit(3.0, mask),
        turn_credit([], mask),
        turn_and_trajectory_credit([], 3.0, mask, weight=1.0),
        process_sum([], [], mask),
        process_min([], [], mask, temperature=0.0),
    ):
        assert found.tolist() == zeros
        assert found.dtype == np.float64
    assert turn_indices(mask).tolist() == [-1] * length


def test_a_reward_before_the_first_trained_token_is_refused_and_a_zero_there_is_not():
    """K11."""
    late = [False, False, True]
    assert discounted_returns([0.0, -0.0, 1.0], late, gamma=0.5).tolist() == [0.0, 0.0, 1.0]
    calls = [
        lambda rewards, mask: discounted_returns(rewards, mask, gamma=1.0),
        lambda rewards, mask: gae(rewards, [0.0] * 3, mask, gamma=1.0, lam=1.0),
        lambda rewards, mask: vtrace(rewards, [0.0] * 3, [0.0] * 3, mask, gamma=1.0, rho_bar=1.0, c_bar=1.0),
        lambda rewards, mask: process_sum([rewards[1]], [1], mask),
    ]
    for call in calls:
        for mask in (late, [False] * 3):
            with pytest.raises(ValueError, match=r"rewards_T\[1\] is 1.0, before the first trained token"):
                call([0.0, 1.0, 0.0], mask)


def test_numbers_that_are_no_numbers_are_refused_where_they_are_read():
    """K11."""
    mask = [True, False, True]
    fine = [0.0, 0.0, 0.0]
    caps = {"rho_bar": 1.0, "c_bar": 1.0}
    with pytest.raises(ValueError, match=r"rewards_T\[1\] is nan"):  # read: it would go to the token before
        discounted_returns([0.0, NAN, 0.0], mask, gamma=1.0)
    with pytest.raises(ValueError, match=r"values_T\[2\] is nan; it must be finite"):
        gae(fine, [0.0, NAN, NAN], mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"log_rhos_T\[2\] is inf; it must be a log-ratio below inf"):
        vtrace(fine, fine, [0.0, NAN, math.inf], mask, gamma=1.0, **caps)
    with pytest.raises(ValueError, match=r"log_rhos_T\[0\] is nan"):
        vtrace(fine, fine, [NAN, 0.0, 0.0], mask, gamma=1.0, **caps)
    with pytest.raises(ValueError, match="bootstrap is nan"):
        gae(fine, fine, mask, gamma=1.0, lam=1.0, bootstrap=NAN)
    with pytest.raises(ValueError, match=r"values_T has shape \(2,\) and mask_T has 3"):
        gae(fine, [0.0, 0.0], mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"mask_T is float64 of shape \(3,\)"):
        discounted_returns(fine, [1.0, 0.5, 0.0], gamma=1.0)
    with pytest.raises(ValueError, match=r"gamma is 1\.1; it must lie between 0 and 1"):
        discounted_returns(fine, mask, gamma=1.1)
    with pytest.raises(ValueError, match="lam is nan"):
        gae(fine, fine, mask, gamma=1.0, lam=NAN)
    with pytest.raises(ValueError, match=r"c_bar is 2\.0; it must lie between 0 and 1"):
        vtrace(fine, fine, fine, mask, gamma=1.0, rho_bar=1.0, c_bar=2.0)


# Turns and steps.


def test_turns_are_the_runs_of_the_mask_and_each_has_its_value():
    mask = [False, True, True, False, False, True, False, True, True]
    assert turn_indices(mask).tolist() == [-1, 0, 0, -1, -1, 1, -1, 2, 2]
    assert turn_credit([5.0, -1.0, 0.5], mask).tolist() == [0, 5, 5, 0, 0, -1, 0, 0.5, 0.5]
    both = turn_and_trajectory_credit([5.0, -1.0, 0.0], 2.0, mask, weight=0.5)
    assert both.tolist() == [0, 6, 6, 0, 0, 0, 0, 1, 1]
    assert turn_returns([1.0, 0.0, 4.0], gamma=0.5).tolist() == [2.0, 2.0, 4.0]
    assert trajectory_credit(-3.0, mask).tolist() == [0, -3, -3, 0, 0, -3, 0, -3, -3]
    with pytest.raises(ValueError, match="values_K has 2 entries and mask_T has 3 turns"):
        turn_credit([1.0, 2.0], mask)
    with pytest.raises(ValueError, match=r"values_K\[1\] is nan"):
        turn_credit([1.0, NAN, 2.0], mask)


@given(st.lists(st.booleans(), max_size=20))
def test_turn_numbers_count_the_beginnings_of_runs(mask):
    right, turn = [], -1
    for position, trained in enumerate(mask):
        turn += trained and (position == 0 or not mask[position - 1])
        right.append(turn if trained else -1)
    assert turn_indices(mask).tolist() == right


def test_each_turn_is_compared_with_the_same_turn_of_the_others():
    rewards = [[1.0, 0.0, 7.0], [0.0], [0.0, 1.0], [None, None]]
    found = turn_grpo(rewards)
    assert [len(values) for values in found] == [3, 1, 2, 2]
    for rollout, turn in ((0, 0), (1, 0), (2, 0)):
        assert found[rollout][turn] == grpo([1.0, 0.0, 0.0])[rollout]
    assert (found[0][1], found[2][1]) == tuple(grpo([0.0, 1.0]))
    assert found[0][2] == 0.0  # only one rollout came so far
    assert found[3].tolist() == [0.0, 0.0]
    assert turn_grpo([[1.0], [0.0]], scale=False)[0].tolist() == [0.5]
    assert turn_grpo([]) == []
    with pytest.raises(ValueError, match=r"rewards_G_K\[1\]\[1\] is nan"):
        turn_grpo([[1.0], [0.0, NAN]])


STEPS = st.lists(st.none() | NUMBER, min_size=1, max_size=6)


@given(STEPS, st.data())
def test_process_rewards_are_summed_over_the_steps_that_end_at_the_token_or_later(steps, data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=len(steps), max_size=len(steps)))
    ends = (np.cumsum(sizes) - 1).tolist()
    mask = [True, *data.draw(st.lists(st.booleans(), min_size=sum(sizes) + 1, max_size=sum(sizes) + 1))]
    found = process_sum(steps, ends, mask)
    for position, trained in enumerate(mask):
        # A step whose end is no trained token ends at the one before, which is at this position or later as well.
        right = sum(r for r, end in zip(steps, ends, strict=True) if r is not None and end >= position)
        assert found[position] == pytest.approx(right if trained else 0.0, abs=1e-12)


def test_tokens_after_the_last_step_end_are_credited_with_nothing():
    assert process_sum([1.0, 10.0], [1, 3], [True] * 6).tolist() == [11, 11, 10, 10, 0, 0]
    # A step that consists of an observation belongs to the token before it.
    assert process_sum([1.0, 10.0], [0, 1], [True, False, True]).tolist() == [11, 0, 0]


@given(STEPS, st.sampled_from([0.0, 1e-320, 1e-3, 0.1, 1.0, 1e6]))
def test_softmin_weights_step_rewards_towards_their_minimum(steps, temperature):
    scored = [r for r in steps if r is not None]
    found = softmin_rewards(steps, temperature=temperature)
    assert np.isfinite(found).all()
    assert all(value == 0.0 for value, reward in zip(found, steps, strict=True) if reward is None)
    if not scored:
        return
    low, mean = min(scored), sum(scored) / len(scored)
    assert low - 1e-9 <= found.sum() <= mean + 1e-9
    if temperature >= 0.1:
        weights = [0.0 if r is None else math.exp(-(r - low) / temperature) for r in steps]
        close(found, [w * (r or 0.0) / sum(weights) for w, r in zip(weights, steps, strict=True)])
    if temperature < 1e-2:  # rewards differ by 1/8 or not at all
        close(found, [low / scored.count(low) if r == low else 0.0 for r in steps])


def test_credit_by_the_worst_step_gives_its_reward_to_it_and_to_what_led_there_and_nothing_after():
    steps, ends, mask = [0.9, -0.5, 0.8], [1, 2, 4], [True, True, True, True, True, True]
    assert process_min(steps, ends, mask, temperature=0.0).tolist() == [-0.5, -0.5, -0.5, 0, 0, 0]
    close(process_min(steps, ends, mask, temperature=0.01), [-0.5, -0.5, -0.5, 0, 0, 0])
    assert process_sum(steps, ends, mask).tolist() == pytest.approx([1.2, 1.2, 0.3, 0.8, 0.8, 0.0])
    # Adding good steps raises the sum, and can never raise the minimum: what PURE is for.
    more, more_ends = [0.9, -0.5, 0.8, 0.9, 0.9], [1, 2, 3, 4, 5]
    assert process_min(more, more_ends, mask, temperature=0.0)[0] == -0.5
    assert process_sum(more, more_ends, mask)[0] > process_sum(steps, ends, mask)[0]


def test_bad_steps_are_refused_by_their_place():
    mask = [True] * 4
    for ends, place in (([1, 1], 1), ([2, 1], 1), ([-1, 2], 0), ([1, 4], 1)):
        with pytest.raises(ValueError, match=rf"step_ends_K\[{place}\]"):
            process_sum([1.0, 1.0], ends, mask)
    for ends in ([1], [1, 2, 3], [0.5, 1.5]):
        with pytest.raises(ValueError, match="give one position per step reward"):
            process_sum([1.0, 1.0], ends, mask)
    with pytest.raises(ValueError, match=r"step_rewards_K\[1\] is nan"):
        process_sum([1.0, NAN], [0, 1], mask)
    for temperature in (-1.0, NAN, math.inf):
        with pytest.raises(ValueError, match="temperature is"):
            softmin_rewards([1.0], temperature=temperature)


# Against the truth: three tokens of a binary vocabulary, a policy with its own logits for each of the seven prefixes,
# a reward after each token, and observations in between. Every rollout can be listed.

RNG = np.random.default_rng(7)
TREE_LOGITS = RNG.normal(size=(7, 2))
TREE_POLICY = np.exp(TREE_LOGITS) / np.exp(TREE_LOGITS).sum(axis=1, keepdims=True)
TREE_REWARDS = RNG.normal(size=(7, 2))  # after each choice
MASK = [True, False, True, True, False]
PLACES = [0, 2, 3]


def paths():
    """(probability, nodes, actions) of all eight rollouts; the children of node n are 2n + 1 and 2n + 2."""
    for actions in itertools.product(range(2), repeat=3):
        nodes = [0]
        for action in actions[:2]:
            nodes.append(2 * nodes[-1] + 1 + action)
        yield math.prod(TREE_POLICY[n, a] for n, a in zip(nodes, actions, strict=True)), nodes, actions


def gradient_of_expected(total_of_rewards) -> np.ndarray:
    """[7, 2] true gradient: sum over rollouts of grad P(rollout) x what it is worth."""
    gradient = np.zeros((7, 2))
    for probability, nodes, actions in paths():
        worth = total_of_rewards([TREE_REWARDS[n, a] for n, a in zip(nodes, actions, strict=True)])
        for node, action in zip(nodes, actions, strict=True):
            gradient[node] += probability * worth * (np.eye(2)[action] - TREE_POLICY[node])
    return gradient


def expected_policy_gradient(credit_of) -> np.ndarray:
    """[7, 2] expectation of sum over tokens of credit x grad log pi."""
    gradient = np.zeros((7, 2))
    for probability, nodes, actions in paths():
        rewards = np.zeros(5)
        rewards[[0, 2, 4]] = [TREE_REWARDS[n, a] for n, a in zip(nodes, actions, strict=True)]  # the last on padding
        credit = credit_of(rewards, nodes)[PLACES]
        for node, action, value in zip(nodes, actions, credit, strict=True):
            gradient[node] += probability * value * (np.eye(2)[action] - TREE_POLICY[node])
    return gradient


def values_at(table, nodes) -> np.ndarray:
    values = np.full(5, NAN)
    values[PLACES] = table[nodes]
    return values


def true_values() -> np.ndarray:
    values = np.zeros(15)
    for node in reversed(range(7)):
        children = values[[2 * node + 1, 2 * node + 2]] if node < 3 else 0.0
        values[node] = TREE_POLICY[node] @ (TREE_REWARDS[node] + children)
    return values


def test_every_way_of_crediting_the_sum_of_rewards_follows_the_true_gradient():
    true = gradient_of_expected(sum)
    arbitrary = RNG.normal(size=7) * 10

    def gae_of(table, lam):
        return lambda rewards, nodes: gae(rewards, values_at(table, nodes), MASK, gamma=1.0, lam=lam)[0]

    for credit in (
        lambda rewards, nodes: discounted_returns(rewards, MASK, gamma=1.0),
        lambda rewards, nodes: trajectory_credit(rewards.sum(), MASK),
        lambda rewards, nodes: turn_credit(turn_returns([rewards[0], rewards[2] + rewards[4]], gamma=1.0), MASK),
        lambda rewards, nodes: process_sum(rewards[[0, 2, 4]].tolist(), [0, 2, 4], MASK),
        gae_of(arbitrary, 1.0),
        gae_of(true_values(), 0.0),
        gae_of(true_values(), 0.6),
        lambda rewards, nodes: vtrace(
            rewards, values_at(arbitrary, nodes), np.zeros(5), MASK, gamma=1.0, rho_bar=1.0, c_bar=1.0
        )[1],
    ):
        np.testing.assert_allclose(expected_policy_gradient(credit), true, atol=1e-12)
    biased = expected_policy_gradient(gae_of(arbitrary, 0.6))
    assert np.abs(biased - true).max() > 0.1  # the price of lambda below 1 with a wrong critic


def test_a_cut_episode_with_the_true_value_as_bootstrap_follows_the_true_gradient():
    # The last token is not sampled any more: its value stands in for it.
    true, values = gradient_of_expected(sum), true_values()
    gradient = np.zeros((7, 2))
    for actions in itertools.product(range(2), repeat=2):
        nodes = [0, 1 + actions[0]]
        left = 2 * nodes[1] + 1 + actions[1]
        probability = math.prod(TREE_POLICY[n, a] for n, a in zip(nodes, actions, strict=True))
        rewards = [TREE_REWARDS[n, a] for n, a in zip(nodes, actions, strict=True)]
        credit, _ = gae(rewards, [3.0, -3.0], [True, True], gamma=1.0, lam=1.0, bootstrap=values[left])
        for node, action, value in zip(nodes, actions, credit, strict=True):
            gradient[node] += probability * value * (np.eye(2)[action] - TREE_POLICY[node])
    np.testing.assert_allclose(gradient[:3], true[:3], atol=1e-12)


def test_credit_by_the_worst_step_is_not_the_gradient_of_the_expected_minimum_but_trajectory_credit_of_it_is():
    # Whether an early step is the worst depends on later ones, and tokens after the worst step are not told of it.
    true = gradient_of_expected(min)
    whole = expected_policy_gradient(lambda rewards, nodes: trajectory_credit(min(rewards[[0, 2, 4]]), MASK))
    np.testing.assert_allclose(whole, true, atol=1e-12)
    by_step = expected_policy_gradient(
        lambda rewards, nodes: process_min(rewards[[0, 2, 4]].tolist(), [0, 2, 4], MASK, temperature=0.0)
    )
    assert np.abs(by_step - true).max() > 1e-3


def test_vtrace_advantages_of_one_token_answers_follow_the_true_gradient_from_another_policy():
    policy, behavior = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.2, 0.6])
    rewards, value = np.array([1.0, -2.0, 5.0]), 0.7
    found = np.zeros(3)
    for arm in range(3):
        log_ratio = math.log(policy[arm] / behavior[arm])
        _, [advantage] = vtrace([rewards[arm]], [value], [log_ratio], [True], gamma=1.0, rho_bar=10.0, c_bar=1.0)
        found += behavior[arm] * advantage * (np.eye(3)[arm] - policy)
    np.testing.assert_allclose(found, (policy * rewards) @ (np.eye(3) - policy), atol=1e-12)


@pytest.mark.parametrize(
    ("rho_bar", "c_bar", "lam"), [(1.0, 1.0, 1.0), (0.7, 0.4, 1.0), (1.6, 1.0, 0.9), (1e6, 1e6, 1.0), (1.0, 0.0, 1.0)]
)
def test_vtrace_targets_have_the_value_of_the_clipped_policy_as_fixed_point(rho_bar, c_bar, lam):
    # Two states, two actions, three steps of data, an observation after each: the expectation over all 64 stretches.
    moves = np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.7, 0.3]]])  # [state, action, next state]
    rewards = np.array([[1.0, -0.5], [0.3, 2.0]])
    policy, behavior = np.array([[0.8, 0.2], [0.35, 0.65]]), np.array([[0.4, 0.6], [0.5, 0.5]])
    gamma = 0.8
    clipped = np.minimum(rho_bar * behavior, policy)
    clipped /= clipped.sum(axis=1, keepdims=True)
    right = np.linalg.solve(
        np.eye(2) - gamma * np.einsum("xa,xay->xy", clipped, moves), np.einsum("xa,xa->x", clipped, rewards)
    )

    def expected_targets(values: np.ndarray) -> np.ndarray:
        out = np.zeros(2)
        for start in range(2):
            for stretch in itertools.product(itertools.product(range(2), repeat=2), repeat=3):
                state, probability = start, 1.0
                columns = {"rewards": [], "values": [], "log_rhos": [], "mask": []}
                for action, after in stretch:
                    probability *= behavior[state, action] * moves[state, action, after]
                    columns["rewards"] += [0.0, rewards[state, action]]  # paid on the observation
                    columns["values"] += [values[state], NAN]
                    columns["log_rhos"] += [math.log(policy[state, action] / behavior[state, action]), NAN]
                    columns["mask"] += [True, False]
                    state = after
                caps = {"rho_bar": rho_bar, "c_bar": c_bar, "lam": lam}
                targets, _ = vtrace(*columns.values(), gamma=gamma, bootstrap=values[state], **caps)
                out[start] += probability * targets[0]
        return out

    # The operator is affine: three evaluations give it, and its fixed point, exactly.
    constant = expected_targets(np.zeros(2))
    linear = np.stack([expected_targets(unit) - constant for unit in np.eye(2)], axis=1)
    assert np.abs(np.linalg.eigvals(linear)).max() < 1.0  # theorem 1: a contraction, so iterating leads there
    np.testing.assert_allclose(np.linalg.solve(np.eye(2) - linear, constant), right, atol=1e-9)
    values = np.zeros(2)
    for _ in range(300):
        values = constant + linear @ values
    np.testing.assert_allclose(values, right, atol=1e-6)
    np.testing.assert_allclose(expected_targets(right), right, atol=1e-9)


# Limits.


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
def test_vtrace_is_finite_and_right_for_log_ratios_of_any_size_over_four_thousand_tokens(size):
    rng = np.random.default_rng(0)
    length = 4000
    log_rhos = size * rng.choice([-1.0, 0.0, 1.0], length)
    rewards, values = rng.normal(size=length), rng.normal(size=length)
    mask = np.ones(length, bool)
    targets, advantages = vtrace(rewards, values, log_rhos, mask, gamma=1.0, rho_bar=2.0, c_bar=1.0, bootstrap=0.5)
    assert np.isfinite(targets).all() and np.isfinite(advantages).all()
    rhos, cs = np.exp(np.minimum(log_rhos, math.log(2.0))), np.exp(np.minimum(log_rhos, 0.0))
    deltas = rhos * (rewards + np.append(values[1:], 0.5) - values)
    for start in (0, 1234, 3998):
        weights = np.cumprod(np.append(1.0, cs[start:-1]))
        assert targets[start] == pytest.approx(values[start] + math.fsum(weights * deltas[start:]), rel=1e-9)


def test_ratios_of_zero_keep_the_critic_and_unbounded_ratios_are_capped():
    rewards, values, mask = [1.0, 2.0], [0.3, -0.4], [True, True]
    for nothing in (-1000.0, -math.inf):
        targets, advantages = vtrace(rewards, values, [nothing] * 2, mask, gamma=1.0, rho_bar=1.0, c_bar=1.0)
        assert (targets.tolist(), advantages.tolist()) == (values, [0.0, 0.0])
    with np.errstate(over="raise"):
        capped = vtrace(rewards, values, [1e308] * 2, mask, gamma=1.0, rho_bar=1.0, c_bar=1.0)
    same = vtrace(rewards, values, [0.0] * 2, mask, gamma=1.0, rho_bar=1.0, c_bar=1.0)
    for found, right in zip(capped, same, strict=True):
        assert found.tolist() == right.tolist()
    huge = vtrace(rewards, values, [1e308] * 2, mask, gamma=1.0, rho_bar=1e20, c_bar=1.0)
    assert huge[1][1] == pytest.approx(2.4e20)


def test_a_product_of_ratios_that_overflows_is_refused_and_not_returned_as_nan():
    length = 4000
    args = [1.0] * length, [0.0] * length, [100.0] * length, [True] * length
    with pytest.raises(ValueError, match=r"c_bar is 2\.0 and its product over 4000 tokens overflows"):
        vtrace(*args, gamma=1.0, rho_bar=2.0, c_bar=2.0)
    assert np.isfinite(vtrace(*args, gamma=1.0, rho_bar=2.0, c_bar=1.0)[0]).all()


def test_inputs_are_left_as_they_are_and_results_are_float64():
    rewards, values = np.ones(3, np.float32), np.ones(3, np.float32)
    mask = np.array([True, False, True])
    for array in (rewards, values, mask):
        array.setflags(write=False)
    for found in (*gae(rewards, values, mask, gamma=0.9, lam=0.9), discounted_returns(rewards, mask, gamma=0.9)):
        assert found.dtype == np.float64
        assert found.flags.writeable
        assert found[1] == 0.0


@settings(max_examples=20)
@given(st.integers(0, 3000))
def test_long_rows_lose_no_precision_to_the_recursion(length):
    rewards, mask = np.full(length, 0.1), np.ones(length, bool)
    found = discounted_returns(rewards, mask, gamma=0.999)
    if length:
        assert found[0] == pytest.approx(0.1 * (1 - 0.999**length) / 0.001, rel=1e-11)
