"""The losses of verl 0.9.1 on the same tensors. Where they differ, a test shows both and says who has the paper.

What differs everywhere: verl keeps padding and masks it, so its functions want one row per sequence; its means add up
in float32 there; ours see trained tokens alone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peers import (
    process_of,
    verl_advantages,
    verl_kept,
    verl_kl,
    verl_policy_loss,
    verl_value_loss,
    verl_weights,
)
from ragged import Ragged, ragged

from nearpolicy.objectives import advantages as estimators
from nearpolicy.objectives import aggregation, corrections, losses, regularisers
from nearpolicy.objectives.credit import discounted_returns, gae

few = settings(max_examples=15, deadline=None)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
THEIRS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
LENGTH = 10
batches = ragged(smallest=1)
one_advantage = ragged(smallest=1, by_sequence=True)


@pytest.fixture(scope="module")
def verl():
    with process_of("verl") as call:
        yield call


def near(b: Ragged, largest: float = 2.0) -> Ragged:
    """The same batch with log-ratios within which no implementation clamps for safety."""
    held = {
        name: [x + min(max(y - x, -largest), largest) for x, y in zip(b.now, getattr(b, name), strict=True)]
        for name in ("proximal", "behavior")
    }
    return Ragged(**{**vars(b), **held, "weights": [1.0] * len(b.now)})


def ours(b: Ragged, loss, loss_agg: str) -> tuple[float, np.ndarray]:
    """(aggregated loss, gradient [N]) of a function of the current log-probabilities."""
    now = b.tensor("now").requires_grad_()
    kept = torch.ones(len(b.now), dtype=torch.bool)
    shares = aggregation.shares(kept, b.sequences, loss_agg, LENGTH)
    total = (shares * loss(now)).sum() / aggregation.divisor(kept, b.sequences, loss_agg)
    total.backward()
    return float(total.detach()), now.grad.numpy()


def theirs(verl, b: Ragged, name: str, loss_agg: str, *, old: str = "proximal", weights=None, settings=None, **policy):
    found, gradient = verl(
        verl_policy_loss,
        name,
        *(b.padded(getattr(b, x)) for x in ("now", old, "advantages")),
        b.mask,
        loss_agg=MODES[loss_agg],
        weights=None if weights is None else b.padded(weights),
        settings={**THEIRS, "global_batch_info": {"loss_scale_factor": LENGTH}, **(settings or {})},
        policy_loss=policy,
    )
    return found, b.flat(gradient)


def agree(mine, other, *, value: bool = True) -> None:
    if value:
        assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(mine[1], other[1], rtol=1e-5, atol=1e-6)


def of(b: Ragged, *names: str) -> list[torch.Tensor]:
    return [b.tensor(name) for name in names]


# Losses that are the same.


@pytest.mark.parametrize("loss_agg", MODES)
@few
@given(b=batches)
def test_clipped_losses_agree_with_dual_clip_and_weights_in_every_aggregation(verl, loss_agg, b):
    mine = ours(
        b,
        lambda now: losses.ppo_clip(now, *of(b, "proximal", "advantages", "weights"), **CLIP, dual_clip=3.0),
        loss_agg,
    )
    agree(mine, theirs(verl, b, "vanilla", loss_agg, weights=b.weights, settings={"clip_ratio_c": 3.0}))


@few
@given(batches)
def test_policy_gradient_is_their_gpg(verl, b):
    mine = ours(b, lambda now: losses.policy_gradient(now, *of(b, "advantages", "weights")), "token_mean")
    agree(mine, theirs(verl, b, "gpg", "token_mean", weights=b.weights))


@few
@given(one_advantage)
def test_gspo_agrees_in_both_forms(verl, b):
    """verl computes GSPO-token (and holds log-ratios below 10); with one advantage per sequence that is GSPO."""
    b = near(b)
    for loss in (losses.gspo, losses.gspo_token):
        mine = ours(
            b,
            lambda now, loss=loss: loss(now, *of(b, "proximal", "advantages", "weights"), b.sequences, **CLIP),
            "seq_mean_token_mean",
        )
        agree(mine, theirs(verl, b, "gspo", "seq_mean_token_mean"))


@few
@given(batches)
def test_gspo_by_token_agrees_where_advantages_differ_within_a_sequence(verl, b):
    b = near(b)
    mine = ours(
        b,
        lambda now: losses.gspo_token(now, *of(b, "proximal", "advantages", "weights"), b.sequences, **CLIP),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(verl, b, "gspo", "seq_mean_token_mean"))


@few
@given(one_advantage)
def test_geometric_mean_losses_agree(verl, b):
    """verl averages over all rows, ours over rows with a trained token: here all rows have one."""
    b = near(b)
    if not all(b.tokens_of):
        return
    mine = ours(
        b,
        lambda now: losses.gmpo(now, *of(b, "proximal", "advantages", "weights"), b.sequences, **CLIP),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(verl, b, "geo_mean", "seq_mean_token_mean"))


@few
@given(batches)
def test_cispo_agrees(verl, b):
    mine = ours(b, lambda now: losses.cispo(now, *of(b, "behavior", "advantages"), **CLIP), "token_mean")
    agree(mine, theirs(verl, b, "cispo", "token_mean", old="behavior"))


@few
@given(batches)
def test_sapo_agrees(verl, b):
    """verl always takes the mean of sequence means, whatever mode it is told."""
    mine = ours(
        b,
        lambda now: losses.sapo(
            now,
            *of(b, "proximal", "advantages", "weights"),
            temperature_positive=1.0,
            temperature_negative=1.05,
        ),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(verl, b, "sapo", "token_mean", weights=b.weights))


@few
@given(batches)
def test_kl_cov_agrees_without_weights(verl, b):
    """With weights, verl multiplies the penalty with them too; here they correct the policy term alone."""
    b = near(b)
    covariance = losses.covariances(*of(b, "now", "advantages"))
    chosen = losses.kl_cov_penalised(covariance, share=0.3)
    if len(b.now) > 1:
        # Two tokens have the same covariance but for rounding: which of them is the larger, each decides for itself.
        assume(bool(covariance[chosen].min() - covariance[~chosen].max() > 1e-9))
        mine = ours(
            b,
            lambda now: losses.kl_cov(now, *of(b, "proximal", "advantages", "weights"), chosen, coefficient=0.7),
            "token_mean",
        )
        agree(mine, theirs(verl, b, "kl_cov", "token_mean", kl_cov_ratio=0.3, ppo_kl_coef=0.7))


# Losses with a difference.


@few
@given(batches)
def test_clip_cov_agrees_in_gradient_where_all_of_the_band_is_taken(verl, b):
    """verl draws among tokens that the clipped ratio has not stopped already, over a micro-batch and with open ends of
    the band; ours over the update and as the paper writes it, with closed ends. With all of the band taken the gradient
    is the same; the value is not, for verl keeps the constant of a token that is clipped and in the band."""
    b = near(b)
    covariance = losses.covariances(*of(b, "now", "advantages"))
    chosen = (covariance > 0.1) & (covariance < 5.0)
    mine = ours(
        b, lambda now: losses.clip_cov(now, *of(b, "proximal", "advantages", "weights"), chosen, **CLIP), "token_mean"
    )
    found = theirs(verl, b, "clip_cov", "token_mean", clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0)
    agree(mine, found, value=False)


@few
@given(batches)
def test_dppo_agrees_in_gradient_and_region(verl, b):
    """The paper's loss is -r A inside the region. verl writes the surrogate -sg(min(r, c)) A log pi, which has the same
    gradient below c (20 unless set), another value, and a truncation that the paper discusses and ours does not have.
    """
    b = near(b)
    mine = ours(b, lambda now: losses.dppo(now, *of(b, "behavior", "advantages"), **CLIP), "token_mean")
    found = theirs(verl, b, "dppo_tv", "token_mean", old="behavior", settings={"clip_ratio_c": 1e9})
    agree(mine, found, value=False)


@few
@given(ragged(smallest=1, largest=4))
def test_kimi_is_their_dro_for_single_tokens(verl, b):
    """DRO squares each token's log-ratio, Kimi k1.5 that of the whole answer: the same for answers of one token."""
    alone = Ragged(**{**vars(near(b)), "index": list(range(len(b.now))), "count": len(b.now)})
    for batch, same in ((alone, True), (near(b), all(len(tokens) < 2 for tokens in b.tokens_of))):
        mine = ours(
            batch,
            lambda now, x=batch: losses.kimi(now, *of(x, "proximal", "advantages", "weights"), x.sequences, tau=0.3),
            "seq_mean_token_sum",
        )
        if same:
            agree(mine, theirs(verl, batch, "dro", "seq_mean_token_sum", dro_beta=0.3))


@few
@given(batches)
def test_kl_estimators_agree_within_their_clamp(verl, b):
    """verl holds log-ratios within 20 and the value of k3 within 10, with no gradient beyond: a policy that is far from
    the reference is not pulled back. Ours goes on in a straight line."""
    b = near(b)
    for name in ("k1", "k2", "k3"):
        now = b.tensor("now").requires_grad_()
        found = getattr(regularisers, name)(now, b.tensor("behavior"))
        found.sum().backward()
        value, gradient = verl(verl_kl, name, b.now, b.behavior)
        np.testing.assert_allclose(found.detach(), value, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(now.grad, gradient, rtol=1e-9, atol=1e-12)


def test_far_from_the_reference_their_k3_stops_pulling_and_ours_does_not(verl):
    now = torch.tensor([-9.0], dtype=torch.float64, requires_grad=True)
    regularisers.k3(now, torch.tensor([-1.0], dtype=torch.float64)).sum().backward()
    value, gradient = verl(verl_kl, "k3", [-9.0], [-1.0])
    assert (value.tolist(), gradient.tolist()) == ([10.0], [0.0])
    assert float(now.grad) == pytest.approx(-math.expm1(8.0))


def test_their_straight_through_k3_has_the_gradient_of_k2(verl):
    _, gradient = verl(verl_kl, "k3+", [-1.0, -2.0], [-1.5, -1.0])
    now = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    regularisers.k2(now, torch.tensor([-1.5, -1.0], dtype=torch.float64)).sum().backward()
    np.testing.assert_allclose(gradient, now.grad)


@pytest.mark.parametrize("loss_agg", MODES)
@few
@given(b=batches)
def test_clipped_value_losses_agree(verl, loss_agg, b):
    if loss_agg == "seq_mean_token_sum_norm":
        return  # theirs divides by the width of the padded batch here, ours by the largest length
    mine = ours(
        b,
        lambda now: losses.clipped_value_loss(now, *of(b, "proximal", "behavior"), clip=0.2),
        loss_agg,
    )
    found = verl(
        verl_value_loss,
        *(b.padded(getattr(b, name)) for name in ("now", "proximal", "behavior")),
        b.mask,
        clip=0.2,
        loss_agg=MODES[loss_agg],
    )
    assert mine[0] == pytest.approx(found, rel=1e-5, abs=1e-6)


# Corrections.


def log_ratios(b: Ragged) -> np.ndarray:
    return b.padded([p - q for p, q in zip(b.proximal, b.behavior, strict=True)])


@few
@given(batches)
def test_truncated_weights_agree_by_token_and_by_sequence(verl, b):
    policies = of(b, "proximal", "behavior")
    for level, found in (
        ("token", corrections.token_truncate(*policies, cap=2.0)),
        ("sequence", corrections.sequence_truncate(*policies, b.sequences, cap=2.0)),
    ):
        weights = b.flat(verl(verl_weights, log_ratios(b), b.mask, level=level, threshold=2.0))
        np.testing.assert_allclose(found.weights, weights, rtol=1e-9)


@few
@given(batches)
def test_icepop_weights_agree_but_theirs_leave_the_rejected_in_the_divisor(verl, b):
    """verl sets the weight of a token outside the band to 0 and divides by all tokens; ours leave both halves. Where
    all are outside, its statistics of the weights divide by zero."""
    policies = of(b, "proximal", "behavior")
    for level, found in (
        ("token", corrections.token_mask(*policies, cap=2.0, floor=0.5, weighted=True)),
        ("sequence", corrections.sequence_mask(*policies, b.sequences, cap=2.0, floor=0.5, weighted=True)),
    ):
        if not found.kept.any():
            continue
        weights = b.flat(verl(verl_weights, log_ratios(b), b.mask, level=level, threshold="0.5_2.0"))
        np.testing.assert_allclose(torch.where(found.kept, found.weights, 0.0), weights, rtol=1e-9)


@few
@given(batches)
def test_rejections_agree_with_their_band_turned_round(verl, b):
    """verl bounds behaviour / proximal (its k1 is minus the log-ratio), ours proximal / behaviour."""
    policies = of(b, "proximal", "behavior")
    low, high = 0.8, 1.6
    band = {"cap": 1 / low, "floor": 1 / high}
    for rule, found in (
        ("token_k1", corrections.token_mask(*policies, **band, weighted=False)),
        ("seq_sum_k1", corrections.sequence_mask(*policies, b.sequences, **band, weighted=False)),
        ("seq_mean_k1", corrections.geometric_mask(*policies, b.sequences, **band)),
    ):
        kept = b.flat(verl(verl_kept, log_ratios(b), b.mask, rule=rule, threshold=f"{low}_{high}"))
        assert found.kept.tolist() == (kept > 0).tolist()


# Advantages.

GROUPS = st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=5), min_size=1, max_size=3)


def asked_for_advantages(verl, name: str, groups, lengths=None, **arguments) -> list[np.ndarray]:
    """[G] per group; rewards stand on the last token."""
    rewards = [reward for group in groups for reward in group]
    lengths = lengths or [1] * len(rewards)
    mask = np.array([[t < length for t in range(max(lengths))] for length in lengths])
    at_end = np.zeros(mask.shape)
    at_end[np.arange(len(rewards)), np.array(lengths) - 1] = rewards
    index = [g for g, group in enumerate(groups) for _ in group]
    found, _ = verl(verl_advantages, name, at_end, mask, index=index, **arguments)
    return np.split(found[:, 0], np.cumsum([len(group) for group in groups])[:-1])


@few
@given(GROUPS)
def test_group_advantages_agree(verl, groups):
    """verl adds 1e-6 to the spread; ours has no epsilon."""
    for scale in (True, False):
        found = asked_for_advantages(verl, "grpo", groups, norm_adv_by_std_in_grpo=scale)
        for group, theirs in zip(groups, found, strict=True):
            np.testing.assert_allclose(estimators.grpo(group, scale=scale), theirs, rtol=1e-5, atol=1e-7)
    for group, theirs in zip(groups, asked_for_advantages(verl, "rloo", groups), strict=True):
        np.testing.assert_allclose(estimators.rloo(group), theirs, rtol=1e-9, atol=1e-9)


def test_a_group_of_one_gets_its_bare_reward_from_them_and_zero_or_a_refusal_from_us(verl):
    """K04: mean 0 and spread 1 are made up for a group of one."""
    for name in ("grpo", "rloo", "opo"):
        [found] = asked_for_advantages(verl, name, [[0.7]])
        assert found.tolist() == pytest.approx([0.7], rel=1e-5)
    assert estimators.grpo([0.7]).tolist() == estimators.opo([0.7], [1]).tolist() == [0.0]
    with pytest.raises(ValueError, match="group of one"):
        estimators.rloo([0.7])


@few
@given(GROUPS, st.data())
def test_length_weighted_baselines_agree(verl, groups, data):
    total = sum(map(len, groups))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=total, max_size=total))
    split = np.split(np.array(lengths), np.cumsum([len(group) for group in groups])[:-1])
    found = asked_for_advantages(verl, "opo", groups, lengths)
    for group, of_group, theirs in zip(groups, split, found, strict=True):
        np.testing.assert_allclose(estimators.opo(group, of_group.tolist()), theirs, rtol=1e-9, atol=1e-9)


@few
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=5), st.integers(-3, 3))
def test_greedy_baselines_agree(verl, rewards, greedy):
    [found] = asked_for_advantages(verl, "remax", [rewards], reward_baselines=[float(greedy)] * len(rewards))
    np.testing.assert_allclose(estimators.remax(rewards, float(greedy)), found, rtol=1e-9, atol=1e-9)


@few
@given(GROUPS)
def test_batch_normalised_advantages_agree_for_answers_of_one_length(verl, groups):
    """verl whitens over tokens, as the paper says, with 1e-8 inside the root; ours counts rollouts alike, so that a
    long answer has no more say in the mean than a short one. With one token each they are the same."""
    if len({reward for group in groups for reward in group}) < 2:
        return
    found = asked_for_advantages(verl, "reinforce_plus_plus", groups, config={"gamma": 1.0})
    for mine, theirs in zip(estimators.reinforce_plus_plus(groups), found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)
    if all(len(set(group)) < 2 for group in groups):
        return
    # With a baseline they subtract the mean of what is left again; it is 0 but for rounding.
    found = asked_for_advantages(verl, "reinforce_plus_plus_baseline", groups)
    for mine, theirs in zip(estimators.reinforce_plus_plus_baseline(groups), found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@few
@given(ragged(smallest=2), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_returns_of_gae_agree_across_observations_and_only_theirs_are_whitened(verl, b, gamma, lam):
    mask = np.array([[m > -0.5 for m in b.mixing]])
    if mask.sum() < 2:
        return  # theirs raises
    rewards = np.where(mask[0], b.advantages, 0.0)
    arguments = {"gamma": gamma, "lam": lam}
    found, returns = verl(verl_advantages, "gae", [rewards], mask, values=[b.now], **arguments)
    advantages, mine = gae(rewards, b.now, mask[0], **arguments)
    np.testing.assert_allclose(mine[mask[0]], returns[0][mask[0]], rtol=1e-6, atol=1e-6)
    kept = advantages[mask[0]]
    if np.ptp(kept) > 1e-3:
        np.testing.assert_allclose(
            (kept - kept.mean()) / math.sqrt(kept.var(ddof=1) + 1e-8), found[0][mask[0]], rtol=1e-4, atol=1e-4
        )


@few
@given(ragged(smallest=2), st.floats(0.5, 1.0))
def test_discounted_returns_agree_across_observations(verl, b, gamma):
    mask = np.array([[m > -0.5 for m in b.mixing]])
    if mask.sum() < 2:
        return  # theirs raises
    rewards = np.where(mask[0], b.advantages, 0.0)
    _, returns = verl(verl_advantages, "reinforce_plus_plus", [rewards], mask, config={"gamma": gamma})
    np.testing.assert_allclose(discounted_returns(rewards, mask[0], gamma=gamma), returns[0], rtol=1e-6, atol=1e-6)
