"""Policy losses: published formulas, limits, known faults and numbers that break others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, agrees, ragged

from nearpolicy.objectives import aggregation, corrections, losses
from nearpolicy.objectives.sequences import LARGEST_LOG_RATIO, Sequences, held_back, ratio

few = settings(max_examples=40, deadline=None)
many = settings(max_examples=1000, deadline=None)

LOW, HIGH = 0.2, 0.28
CLIP = {"clip_low": LOW, "clip_high": HIGH}
NARROW = {"clip_low": 3e-4, "clip_high": 4e-4}
LOG_CLIP = {"clip_low": 0.4, "clip_high": 0.3}


# Formulas, token by token, as the papers print them. `now` moves, `then` stands under a stop-gradient.


def clipped(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def pg_formula(b: Ragged, now, then) -> list[float]:
    """Williams 1992, with a fixed weight."""
    return [-w * a * x for w, a, x in zip(b.weights, b.advantages, now, strict=True)]


def ppo_formula(b: Ragged, now, then, *, low=LOW, high=HIGH, dual=None) -> list[float]:
    """L_CLIP of Schulman et al. 2017; where A < 0, not below c A (Ye et al. 2020)."""
    out = []
    for t in range(len(now)):
        r, a = math.exp(now[t] - b.proximal[t]), b.advantages[t]
        value = min(r * a, clipped(r, 1 - low, 1 + high) * a)
        if dual is not None and a < 0:
            value = max(value, dual * a)
        out.append(-b.weights[t] * value)
    return out


def sequence_ratio(b: Ragged, now, tokens: Sequence[int]) -> float:
    """(pi(y) / proximal(y))^(1 / |y|), as a root of a product and not as a mean of logarithms."""
    return math.prod(math.exp(now[t]) / math.exp(b.proximal[t]) for t in tokens) ** (1 / len(tokens))


def gspo_formula(b: Ragged, now, then, *, low=LOW, high=HIGH) -> list[float]:
    out = [0.0] * len(now)
    for tokens in filter(None, b.tokens_of):
        s = sequence_ratio(b, now, tokens)
        for t in tokens:
            a = b.advantages[t]
            out[t] = -b.weights[t] * min(s * a, clipped(s, 1 - low, 1 + high) * a)
    return out


def gspo_token_formula(b: Ragged, now, then, *, low=LOW, high=HIGH) -> list[float]:
    out = [0.0] * len(now)
    for tokens in filter(None, b.tokens_of):
        s = sequence_ratio(b, then, tokens)
        for t in tokens:
            a, s_t = b.advantages[t], s * math.exp(now[t]) / math.exp(then[t])
            out[t] = -b.weights[t] * min(s_t * a, clipped(s_t, 1 - low, 1 + high) * a)
    return out


def gmpo_formula(b: Ragged, now, then) -> list[float]:
    """The |y|-th root of the product over tokens of min(r^s, clip(r, e^-low, e^high)^s)^s, s the sign of A, times A."""
    out = [0.0] * len(now)
    low, high = math.exp(-LOG_CLIP["clip_low"]), math.exp(LOG_CLIP["clip_high"])
    for tokens in filter(None, b.tokens_of):
        product = 1.0
        for t in tokens:
            sign = 1 if b.advantages[t] > 0 else -1
            r = math.exp(now[t] - b.proximal[t])
            product *= min(r**sign, clipped(r, low, high) ** sign) ** sign
        for t in tokens:
            out[t] = -b.weights[t] * b.advantages[t] * product ** (1 / len(tokens))
    return out


def cispo_formula(b: Ragged, now, then) -> list[float]:
    return [
        -clipped(math.exp(then[t] - b.behavior[t]), 1 - LOW, 1 + HIGH) * b.advantages[t] * now[t]
        for t in range(len(now))
    ]


def sapo_formula(b: Ragged, now, then) -> list[float]:
    out = []
    for t in range(len(now)):
        a, r = b.advantages[t], math.exp(now[t] - b.proximal[t])
        tau = 1.0 if a > 0 else 1.05
        out.append(-b.weights[t] * a * 4 / tau / (1 + math.exp(-tau * (r - 1))))
    return out


def aipo_formula(b: Ragged, now, then) -> list[float]:
    return [-min(math.exp(then[t] - b.behavior[t]), 2.0) * b.advantages[t] * now[t] for t in range(len(now))]


def kimi_formula(b: Ragged, now, then) -> list[float]:
    """-A log pi(y) + tau / 2 (log pi(y) / proximal(y))^2 for each sequence; its second half in equal parts."""
    out = [-b.weights[t] * b.advantages[t] * now[t] for t in range(len(now))]
    for tokens in filter(None, b.tokens_of):
        log_ratio = sum(now[t] for t in tokens) - sum(b.proximal[t] for t in tokens)
        for t in tokens:
            out[t] += 0.5 * 0.3 * log_ratio**2 / len(tokens)
    return out


def dppo_formula(b: Ragged, now, then) -> list[float]:
    out = []
    for t in range(len(now)):
        p, q, a = math.exp(then[t]), math.exp(b.behavior[t]), b.advantages[t]
        out_of_region = (a > 0 and p > q and abs(p - q) > HIGH) or (a < 0 and p < q and abs(p - q) > LOW)
        out.append(0.0 if out_of_region else -a * math.exp(now[t]) / q)
    return out


def picked(b: Ragged) -> list[bool]:
    return [m > 0 for m in b.mixing]


def clip_cov_formula(b: Ragged, now, then) -> list[float]:
    return [0.0 if out else loss for out, loss in zip(picked(b), ppo_formula(b, now, then), strict=True)]


def kl_cov_formula(b: Ragged, now, then) -> list[float]:
    return [
        -b.weights[t] * b.advantages[t] * math.exp(now[t] - b.proximal[t])
        + (0.7 * abs(now[t] - b.proximal[t]) if of else 0.0)
        for t, of in enumerate(picked(b))
    ]


def replay_formula(b: Ragged, now, then) -> list[float]:
    return [-min(math.exp(then[t] - b.behavior[t]), 1.5) * max(b.advantages[t], 0.0) * now[t] for t in range(len(now))]


def tensors(b: Ragged, *names: str, dtype=torch.float64):
    """Log-probabilities may be stored in half precision; advantages and weights never are."""
    wide = torch.promote_types(dtype, torch.float32)
    return [b.tensor(name, wide if name in ("advantages", "weights") else dtype) for name in names]


def decoupled(loss, **settings):
    """A loss of (logprobs, proximal_logprobs, advantages, weights)."""
    return lambda b, now, dtype: loss(now, *tensors(b, "proximal", "advantages", "weights", dtype=dtype), **settings)


def whole(loss, **settings):
    """A loss that also needs the sequences."""
    return lambda b, now, dtype: loss(
        now, *tensors(b, "proximal", "advantages", "weights", dtype=dtype), b.sequences, **settings
    )


def against_behavior(loss, **settings):
    """A loss of (logprobs, behavior_logprobs, advantages)."""
    return lambda b, now, dtype: loss(now, *tensors(b, "behavior", "advantages", dtype=dtype), **settings)


def on_picked(loss, **settings):
    return lambda b, now, dtype: loss(
        now,
        *tensors(b, "proximal", "advantages", "weights", dtype=dtype),
        torch.tensor(picked(b), dtype=torch.bool),
        **settings,
    )


LOSSES = {
    "policy_gradient": (
        lambda b, now, dtype: losses.policy_gradient(now, *tensors(b, "advantages", "weights", dtype=dtype)),
        pg_formula,
    ),
    "ppo_clip": (decoupled(losses.ppo_clip, **CLIP), ppo_formula),
    "ppo_dual_clip": (
        decoupled(losses.ppo_clip, **CLIP, dual_clip=3.0),
        lambda b, now, then: ppo_formula(b, now, then, dual=3.0),
    ),
    "gspo": (whole(losses.gspo, **CLIP), gspo_formula),
    "gspo_narrow": (
        whole(losses.gspo, **NARROW),
        lambda b, now, then: gspo_formula(b, now, then, low=3e-4, high=4e-4),
    ),
    "gspo_token": (whole(losses.gspo_token, **CLIP), gspo_token_formula),
    "gmpo": (whole(losses.gmpo, **LOG_CLIP), gmpo_formula),
    "cispo": (against_behavior(losses.cispo, **CLIP), cispo_formula),
    "sapo": (decoupled(losses.sapo, temperature_positive=1.0, temperature_negative=1.05), sapo_formula),
    "aipo": (against_behavior(losses.aipo, cap=2.0), aipo_formula),
    "kimi": (whole(losses.kimi, tau=0.3), kimi_formula),
    "dppo": (against_behavior(losses.dppo, **CLIP), dppo_formula),
    "clip_cov": (on_picked(losses.clip_cov, **CLIP), clip_cov_formula),
    "kl_cov": (on_picked(losses.kl_cov, coefficient=0.7), kl_cov_formula),
    "replayed_success": (against_behavior(losses.replayed_success, cap=1.5), replay_formula),
}
"""Name -> (ours, the published formula)."""
each = pytest.mark.parametrize("name", LOSSES)


def check(name: str, b: Ragged) -> None:
    ours, formula = LOSSES[name]
    agrees(lambda now: ours(b, now, torch.float64), lambda now, then: formula(b, now, then), at=b.now, mixing=b.mixing)


@each
@few
@given(data=st.data())
def test_every_loss_is_its_published_formula_in_value_and_gradient(name, data):
    check(name, data.draw(ragged(by_sequence=name == "gmpo")))


@pytest.mark.large
@each
@many
@given(data=st.data())
def test_every_loss_is_its_published_formula_on_many_batches(name, data):
    check(name, data.draw(ragged(largest=24, by_sequence=name == "gmpo")))


@few
@given(ragged())
def test_a_clipped_value_loss_is_the_larger_of_two_squares(b):
    old, returns = b.proximal, b.behavior

    def formula(now, _):
        return [
            0.5 * max((v - r) ** 2, (o + clipped(v - o, -0.2, 0.2) - r) ** 2)
            for v, o, r in zip(now, old, returns, strict=True)
        ]

    olds, wanted = b.tensor("proximal"), b.tensor("behavior")
    agrees(lambda now: losses.clipped_value_loss(now, olds, wanted, clip=0.2), formula, b.now, b.mixing)
    plain = losses.clipped_value_loss(b.tensor("now"), olds, wanted, clip=None)
    np.testing.assert_allclose(plain, [0.5 * (v - r) ** 2 for v, r in zip(b.now, returns, strict=True)])
    assert (losses.clipped_value_loss(b.tensor("now"), olds, wanted, clip=0.2) >= plain - 1e-15).all()


# Limits that follow from the definitions.


REINFORCE = ("policy_gradient", "ppo_clip", "ppo_dual_clip", "cispo", "sapo", "aipo", "kimi", "dppo", "kl_cov")
"""Losses whose gradient at equal policies is that of REINFORCE, token by token."""


def gradient(name: str, b: Ragged, shares: torch.Tensor | None = None) -> torch.Tensor:
    now = b.tensor("now").requires_grad_()
    found = LOSSES[name][0](b, now, torch.float64)
    (found if shares is None else found * shares).sum().backward()
    return now.grad


def equal(b: Ragged) -> Ragged:
    return Ragged(**{**vars(b), "proximal": b.now, "behavior": b.now, "weights": [1.0] * len(b.now)})


@pytest.mark.parametrize("name", REINFORCE)
@few
@given(b=ragged())
def test_equal_policies_give_reinforce(name, b):
    np.testing.assert_allclose(gradient(name, equal(b)), [-a for a in b.advantages], rtol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gspo_narrow", "gspo_token", "gmpo"])
@few
@given(b=ragged(by_sequence=True))
def test_equal_policies_give_reinforce_by_mean_of_sequence_means(name, b):
    kept = torch.ones(len(b.now), dtype=torch.bool)
    shares = aggregation.shares(kept, b.sequences, "seq_mean_token_mean", 1).double()
    np.testing.assert_allclose(gradient(name, equal(b), shares), -b.tensor("advantages") * shares, rtol=1e-12)


@few
@given(ragged(by_sequence=True))
def test_gspo_by_token_is_gspo_where_a_sequence_has_one_advantage(b):
    b = Ragged(**{**vars(b), "weights": [1.0] * len(b.now)})
    kept = torch.ones(len(b.now), dtype=torch.bool)
    shares = aggregation.shares(kept, b.sequences, "seq_mean_token_mean", 1).double()
    values = [LOSSES[name][0](b, b.tensor("now"), torch.float64) for name in ("gspo", "gspo_token")]
    np.testing.assert_allclose(*values, rtol=1e-12)
    np.testing.assert_allclose(gradient("gspo", b, shares), gradient("gspo_token", b, shares), rtol=1e-9, atol=1e-12)


@few
@given(ragged())
def test_without_bounds_every_capped_ratio_is_full_importance_sampling(b):
    now = b.tensor("now")
    behavior, advantages, ones = b.tensor("behavior"), b.tensor("advantages"), torch.ones_like(now)
    wide = {"clip_low": 1.0, "clip_high": math.inf}
    full = [a * math.exp(x - y) for a, x, y in zip(b.advantages, b.now, b.behavior, strict=True)]

    def slopes(loss, *arguments, **settings):
        moving = now.clone().requires_grad_()
        loss(moving, *arguments, **settings).sum().backward()
        return -moving.grad

    for found in (
        slopes(losses.ppo_clip, behavior, advantages, ones, **wide),
        slopes(losses.cispo, behavior, advantages, **wide),
        slopes(losses.aipo, behavior, advantages, cap=math.inf),
        slopes(losses.dppo, behavior, advantages, clip_low=1.0, clip_high=1.0),
        slopes(losses.policy_gradient, advantages, corrections.token_truncate(now, behavior, cap=math.inf).weights),
        slopes(losses.kl_cov, behavior, advantages, ones, torch.zeros_like(ones, dtype=torch.bool), coefficient=1.0),
    ):
        np.testing.assert_allclose(found, full, rtol=1e-9)


def test_aipo_and_cispo_truncate_at_their_bounds_and_keep_the_gradient_there():
    now = torch.tensor([math.log(7.0), math.log(0.01)], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    losses.aipo(now, zeros, ones, cap=2.0).sum().backward()
    assert now.grad.tolist() == pytest.approx([-2.0, -0.01])
    now.grad = None
    losses.cispo(now, zeros, ones, clip_low=0.5, clip_high=4.0).sum().backward()
    assert now.grad.tolist() == pytest.approx([-5.0, -0.5])


def test_sapo_fades_on_both_sides_and_faster_where_the_advantage_is_negative():
    x = torch.linspace(-3.0, 1.5, 200, dtype=torch.float64)

    def gain(sign: float) -> np.ndarray:
        """Gradient per |A|, divided by that of an unclipped ratio."""
        now = x.clone().requires_grad_()
        a = torch.full_like(x, sign)
        losses.sapo(
            now, torch.zeros_like(x), a, torch.ones_like(x), temperature_positive=1.0, temperature_negative=1.05
        ).sum().backward()
        return (-now.grad * sign / x.exp()).numpy()

    r = x.exp().numpy()
    for sign, tau in ((1.0, 1.0), (-1.0, 1.05)):
        np.testing.assert_allclose(gain(sign), 1 / np.cosh(tau / 2 * (r - 1)) ** 2, rtol=1e-9)
    assert (gain(-1.0) <= gain(1.0) + 1e-12).all()


# Choosing tokens by their covariance.


@few
@given(ragged(largest=30))
def test_covariances_are_products_of_deviations_and_sum_to_the_covariance(b):
    found = losses.covariances(b.tensor("now"), b.tensor("advantages"))
    n = len(b.now)
    if not n:
        assert found.shape == (0,)
        return
    x, a = sum(b.now) / n, sum(b.advantages) / n
    np.testing.assert_allclose(found, [(p - x) * (q - a) for p, q in zip(b.now, b.advantages, strict=True)], atol=1e-12)


COVARIANCES = st.lists(st.floats(-6, 6), max_size=40)
SHARES = st.sampled_from([2e-4, 2e-3, 0.05, 0.29, 0.5, 1.0])


@few
@given(COVARIANCES, SHARES, st.integers(0, 2**32))
def test_clip_cov_draws_its_share_among_tokens_inside_the_band_only(covariances, share, seed):
    chances = np.random.default_rng(seed).random(len(covariances))
    found = losses.clip_cov_detached(
        torch.tensor(covariances, dtype=torch.float64), torch.tensor(chances), low=1.0, high=5.0, share=share
    )
    inside = [i for i, c in enumerate(covariances) if 1.0 <= c <= 5.0]
    number = min(len(inside), max(1, math.floor(share * len(covariances) + 1e-9)))
    assert set(np.flatnonzero(found)) == set(sorted(inside, key=lambda i: chances[i])[:number])


@few
@given(COVARIANCES, SHARES)
def test_kl_cov_picks_the_largest_covariances(covariances, share):
    found = losses.kl_cov_penalised(torch.tensor(covariances, dtype=torch.float64), share=share)
    number = min(len(covariances), max(1, math.floor(share * len(covariances) + 1e-9)))
    ranked = sorted(range(len(covariances)), key=lambda i: -covariances[i])
    assert set(np.flatnonzero(found)) == set(ranked[:number])


@pytest.mark.parametrize("share", [2e-4, 2e-3, 0.01, 0.07, 0.29])
def test_a_share_of_a_whole_number_of_tokens_is_that_number(share):
    wanted = [(n, round(share * n)) for n in range(1, 30_001) if abs(share * n - round(share * n)) < 1e-9]
    for n, number in wanted[:: max(1, len(wanted) // 40)]:
        penalised = losses.kl_cov_penalised(torch.zeros(n), share=share)
        detached = losses.clip_cov_detached(torch.ones(n), torch.linspace(0, 1, n), low=1.0, high=5.0, share=share)
        assert int(penalised.sum()) == int(detached.sum()) == max(1, number)


# The proximal policy without a forward pass, and the masks of trust regions.


def test_the_interpolated_proximal_policy_moves_from_the_sampling_to_the_current_one_with_age():
    now, behavior = torch.tensor([-1.0] * 5).requires_grad_(), torch.tensor([-3.0] * 5)
    for dtype in (torch.int64, torch.float32):
        found = losses.interpolated_proximal(now, behavior, torch.tensor([0, 1, 2, 4, 8], dtype=dtype))
        assert found.tolist() == [-1.0, -3.0, -2.0, -1.5, -1.25]
        assert not found.requires_grad


@few
@given(ragged(by_sequence=True), st.floats(-1.0, 1.0))
def test_off_policy_masking_drops_whole_bad_sequences_that_became_unlikely(b, threshold):
    found = losses.off_policy_sequences_kept(
        b.tensor("now"), b.tensor("behavior"), b.tensor("advantages"), b.sequences, threshold=threshold
    )
    for tokens in filter(None, b.tokens_of):
        drift = sum(b.behavior[t] - b.now[t] for t in tokens) / len(tokens)
        drop = b.advantages[tokens[0]] < 0 and drift > threshold
        assert [bool(found[t]) for t in tokens] == [not drop] * len(tokens)


@few
@given(ragged())
def test_the_trust_region_of_dppo_measures_probabilities_and_lets_tokens_come_back(b):
    found = losses.dppo_kept(b.tensor("now"), b.tensor("behavior"), b.tensor("advantages"), **CLIP)
    for t, kept in enumerate(found.tolist()):
        moved = math.exp(b.now[t]) - math.exp(b.behavior[t])
        assert kept == (moved <= HIGH if b.advantages[t] > 0 else moved >= -LOW)
    # A rare token may double its probability, a common one may not: the reverse of what a ratio would say.
    now, behavior = torch.tensor([2e-4, 0.9]).log(), torch.tensor([1e-4, 0.6]).log()
    assert losses.dppo_kept(now, behavior, torch.ones(2), **CLIP).tolist() == [True, False]


@few
@given(ragged())
def test_clip_shares_count_the_tokens_whose_gradient_a_bound_stops(b):
    ones = torch.ones(len(b.now), dtype=torch.float64)
    now, advantages, proximal = b.tensor("now").requires_grad_(), b.tensor("advantages"), b.tensor("proximal")
    losses.ppo_clip(now, proximal, advantages, ones, **CLIP).sum().backward()
    low, high = losses.clip_shares(now - proximal, advantages, **CLIP)
    assert ((low | high) == (now.grad == 0)).all()
    assert not (low & high).any()
    below, above = losses.outside(now - proximal, **CLIP)
    assert (low == (below & (advantages < 0))).all()
    assert (high == (above & (advantages > 0))).all()


def test_a_ratio_just_within_a_bound_is_not_clipped_and_one_just_beyond_is():
    ratios = torch.tensor([0.799, 0.801, 1.279, 1.281], dtype=torch.float64)
    for sign, stopped in (
        (-1.0, ([True, False, False, False], [False] * 4)),
        (1.0, ([False] * 4, [False] * 3 + [True])),
    ):
        low, high = losses.clip_shares(ratios.log(), torch.full((4,), sign), **CLIP)
        assert (low.tolist(), high.tolist()) == stopped
    below, above = losses.outside(ratios.log(), **CLIP)
    assert (below.tolist(), above.tolist()) == ([True, False, False, False], [False, False, False, True])


# The known faults, and their kind.


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_clipping_follows_the_sign_of_the_advantage_with_separate_bounds():
    """K08."""
    advantages, ratios = f64(1, -1, 1, -1, -1, 2), f64(1.5, 0.5, 0.5, 1.5, 5, 1.5)
    zeros, ones = torch.zeros_like(ratios), torch.ones_like(ratios)

    def found(dual_clip=None):
        return losses.ppo_clip(ratios.log(), zeros, advantages, ones, **CLIP, dual_clip=dual_clip).tolist()

    assert found(3.0) == pytest.approx([-1.28, 0.8, -0.5, 1.5, 3.0, -2.56])
    assert found() == pytest.approx([-1.28, 0.8, -0.5, 1.5, 5.0, -2.56])


@few
@given(ragged(), st.floats(1.3, 5.0))
def test_dual_clip_bounds_losses_of_negative_advantages_and_touches_no_other(b, c):
    arguments = (b.tensor("now"), b.tensor("proximal"), b.tensor("advantages"), torch.ones(len(b.now)))
    plain, dual = losses.ppo_clip(*arguments, **CLIP), losses.ppo_clip(*arguments, **CLIP, dual_clip=c)
    negative = arguments[2] < 0
    assert (plain[~negative] == dual[~negative]).all()
    np.testing.assert_allclose(dual[negative], torch.minimum(plain, c * arguments[2].abs())[negative])


def test_a_sequence_ratio_is_made_of_trained_tokens_only():
    """K09."""
    for padding in (5.0, -9.0):
        padded = torch.tensor([[0.3, -0.1, 0.1, padding]], dtype=torch.float64)
        mask = torch.tensor([[True, True, True, False]])
        now = padded[mask].requires_grad_()
        zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        sequences = Sequences(mask.nonzero()[:, 0], 1)
        for loss, bounds in (
            (losses.gspo, {"clip_low": 0.2, "clip_high": 0.28}),
            (losses.gspo_token, {"clip_low": 0.2, "clip_high": 0.28}),
            (losses.gmpo, {"clip_low": 0.4, "clip_high": 0.4}),
        ):
            now.grad = None
            found = loss(now, zeros, ones, ones, sequences, **bounds)
            assert found.tolist() == pytest.approx([-1.105171] * 3, abs=1e-6)
            (found.sum() / 3).backward()
            assert now.grad.tolist() == pytest.approx([-1.105171 / 3] * 3, abs=1e-6)
        assert float(corrections.sequence_truncate(now, zeros, sequences, cap=9.0).weights[0]) == pytest.approx(
            math.exp(0.3)
        )


@few
@given(ragged(by_sequence=True), st.integers(0, 2**32))
def test_neither_other_sequences_nor_their_order_change_a_sequences_losses(b, seed):
    """K09, for every loss that speaks of sequences."""
    order = np.random.default_rng(seed).permutation(len(b.now)).tolist()
    lists = ("index", "now", "proximal", "behavior", "advantages", "weights", "mixing")
    shuffled = Ragged(**{**vars(b), **{name: [getattr(b, name)[t] for t in order] for name in lists}})
    for name in ("gspo", "gspo_token", "gmpo", "kimi"):
        ours = LOSSES[name][0]
        whole = ours(b, b.tensor("now"), torch.float64)
        np.testing.assert_allclose(ours(shuffled, shuffled.tensor("now"), torch.float64), whole[order], rtol=1e-9)
        for s, tokens in enumerate(b.tokens_of):
            alone = Ragged(
                **{
                    **vars(b),
                    "count": 1,
                    **{n: [getattr(b, n)[t] for t in tokens] for n in lists},
                    "index": [0] * len(tokens),
                }
            )
            np.testing.assert_allclose(ours(alone, alone.tensor("now"), torch.float64), whole[b.sequences.index == s])


def test_the_policy_agrees_with_itself_before_the_first_update():
    """K14, for the functions here."""
    now = torch.randn(50).neg().sub(2.0)
    assert ratio(now - now).tolist() == [1.0] * 50
    assert not any(share.any() for share in losses.clip_shares(now - now, torch.randn(50), **CLIP))
    assert losses.dppo_kept(now, now, torch.randn(50), **CLIP).all()


# Numbers that break others: distant policies, long sequences, few bits, nothing at all.


def extreme() -> Ragged:
    """4,000 tokens in sequences of one kind of log-ratio each: all +100, all -100, mixed, zero; a fifth is empty."""
    n = 1000
    rng = np.random.default_rng(3)
    gap = np.concatenate([np.full(n, 100.0), np.full(n, -100.0), rng.choice([-100.0, 100.0], n), np.zeros(n)])
    now = np.full(4 * n, -101.0)
    return Ragged(
        index=np.repeat([0, 1, 2, 4], n).tolist(),
        count=5,
        now=now.tolist(),
        proximal=(now - gap).tolist(),
        behavior=(now - gap).tolist(),
        advantages=np.where(rng.random(4 * n) < 0.5, 1.0, -1.0).tolist(),
        weights=np.ones(4 * n).tolist(),
        mixing=np.ones(4 * n).tolist(),
    )


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_distant_policies_give_finite_losses_and_gradients(name, dtype):
    b = extreme()
    now = b.tensor("now", dtype).requires_grad_()
    found = LOSSES[name][0](b, now, dtype)
    assert torch.isfinite(found).all()
    found.sum().backward()
    assert torch.isfinite(now.grad).all()


@each
def test_rejected_tokens_leave_neither_loss_nor_gradient_however_wild_they_are(name):
    b = extreme()
    now = b.tensor("now", torch.float32).requires_grad_()
    nothing = torch.zeros(len(b.now), dtype=torch.bool)
    total = (aggregation.shares(nothing, b.sequences, "token_mean", 1) * LOSSES[name][0](b, now, torch.float32)).sum()
    total.backward()
    assert float(total.detach()) == 0.0
    assert now.grad.abs().sum() == 0.0


@each
def test_no_tokens_give_no_losses(name):
    b = Ragged(index=[], count=2, now=[], proximal=[], behavior=[], advantages=[], weights=[], mixing=[])
    now = b.tensor("now", torch.float32).requires_grad_()
    found = LOSSES[name][0](b, now, torch.float32)
    assert found.shape == (0,)
    found.sum().backward()
    assert now.grad.shape == (0,)


@each
def test_half_precision_is_widened_before_it_is_subtracted(name):
    """The loss of numbers stored as bfloat16 is that of the same numbers stored as float64."""
    rng = np.random.default_rng(5)
    n = 64

    def round_trip(x: np.ndarray) -> list[float]:
        return torch.tensor(x).bfloat16().double().tolist()

    now = -rng.exponential(3.0, n)
    index = rng.integers(0, 4, n).tolist()
    b = Ragged(
        index=index,
        count=4,
        now=round_trip(now),
        proximal=round_trip(now + rng.normal(size=n)),
        behavior=round_trip(now + rng.normal(size=n)),
        advantages=round_trip(rng.normal(size=4)[index]),
        weights=[1.0] * n,
        mixing=rng.normal(size=n).tolist(),
    )
    ours = LOSSES[name][0]
    half = ours(b, b.tensor("now", torch.bfloat16), torch.bfloat16)
    assert half.dtype == torch.float32
    np.testing.assert_allclose(half.double(), ours(b, b.tensor("now"), torch.float64), rtol=1e-5, atol=1e-6)


def test_ratios_are_exact_up_to_where_they_are_held_and_count_what_is_held():
    x = torch.tensor([0.0, 1e-7, -19.0, 20.0, 20.5, -1e30, 1e30], dtype=torch.float64)
    assert ratio(x).tolist() == pytest.approx([math.exp(min(max(v, -20), 20)) for v in x.tolist()], rel=1e-15)
    assert held_back(x).tolist() == [abs(v) > LARGEST_LOG_RATIO for v in x.tolist()]
    assert ratio(torch.tensor([1.0, -30.0], dtype=torch.bfloat16)).dtype == torch.float32


@few
@given(ragged(largest=20))
def test_sums_means_and_sizes_of_sequences_are_those_of_loops(b):
    now, sequences = b.tensor("now"), b.sequences
    sums = [sum(b.now[t] for t in tokens) for tokens in b.tokens_of]
    np.testing.assert_allclose(sequences.sum(now), sums, atol=1e-12)
    np.testing.assert_allclose(
        sequences.mean(now), [x / len(t) if t else 0.0 for x, t in zip(sums, b.tokens_of, strict=True)], atol=1e-12
    )
    assert sequences.sizes().tolist() == [len(tokens) for tokens in b.tokens_of]
    assert sequences.spread(torch.arange(b.count)).tolist() == b.index


@few
@given(st.lists(st.integers(0, 5), max_size=6))
def test_sequences_of_lengths_lie_one_after_another(lengths):
    found = Sequences.of_lengths(lengths)
    assert found.index.tolist() == [s for s, length in enumerate(lengths) for _ in range(length)]
    assert found.count == len(lengths)
    assert found.sizes().tolist() == lengths


def test_a_mean_over_thousands_of_float32_tokens_keeps_its_digits():
    """The clip range of GSPO is 3e-4: a mean that is wrong by 1e-5 would decide wrongly."""
    x = torch.full((16_384,), 3.0001e-4, dtype=torch.float32)
    x[0] += 1000.0
    x[1] -= 1000.0
    exact = sum(float(v) for v in x) / len(x)
    assert float(Sequences.of_lengths([len(x)]).mean(x)) == pytest.approx(exact, rel=1e-9)
