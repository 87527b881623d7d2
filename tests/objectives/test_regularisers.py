"""KL estimators and entropy control: values in fifty digits, expectations by enumeration, known faults."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import agrees, ragged

from nearpolicy.objectives.distillation import sampled_advantages
from nearpolicy.objectives.regularisers import full_kl, k1, k2, k3, next_entropy_coefficient
from nearpolicy.objectives.sequences import held_back

few = settings(max_examples=40, deadline=None)
getcontext().prec = 50

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def exact_k3(d: float) -> float:
    return float(Decimal(d).exp() - 1 - Decimal(d))


FORMULAS = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": exact_k3}
"""Schulman 2020, with d = log(reference / policy)."""


@pytest.mark.parametrize("name", ESTIMATORS)
@few
@given(ragged())
def test_every_estimator_is_its_published_formula_in_value_and_gradient(name, b):
    reference = b.tensor("behavior")
    agrees(
        lambda now: ESTIMATORS[name](now, reference),
        lambda now, _: [FORMULAS[name](y - x) for x, y in zip(now, b.behavior, strict=True)],
        at=b.now,
        mixing=b.mixing,
    )


@few
@given(st.floats(-700, 20))
def test_k3_is_exact_to_its_last_digits_at_any_distance(d):
    found = k3(torch.tensor([0.0], dtype=torch.float64), torch.tensor([d], dtype=torch.float64))
    assert float(found) == pytest.approx(exact_k3(d), rel=1e-6, abs=1e-20)


@few
@given(ragged())
def test_k2_and_k3_are_never_negative_and_zero_only_for_equal_policies(b):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        now, reference = b.tensor("now", dtype), b.tensor("behavior", dtype)
        for estimate in (k2, k3):
            found = estimate(now, reference)
            assert (found >= 0).all()
            assert ((found == 0) == (now == reference)).all()


def tables(seed: int, shape: tuple[int, ...], distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, and log-probabilities of a reference at this distance from it."""
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(size=shape)
    return torch.tensor(logits, requires_grad=True), torch.tensor(
        logits + distance * numbers.normal(size=shape)
    ).log_softmax(-1)


def exact_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> list[float]:
    """Row by row in fifty digits."""
    out = []
    for p_row, q_row in zip(log_p.tolist(), log_q.tolist(), strict=True):
        terms = [
            Decimal(p).exp() * (Decimal(p) - Decimal(q)) for p, q in zip(p_row, q_row, strict=True) if p > -math.inf
        ]
        out.append(float(sum(terms)))
    return out


DISTANCES = st.sampled_from([0.0, 1e-4, 0.1, 1.0, 5.0])


@few
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 6), DISTANCES)
def test_full_kl_is_its_definition_in_value_and_gradient(seed, rows, vocabulary, distance):
    logits, log_q = tables(seed, (rows, vocabulary), distance)
    log_p = logits.log_softmax(-1)
    found = full_kl(log_p, log_q)
    np.testing.assert_allclose(found.detach(), exact_kl(log_p, log_q), rtol=1e-9, atol=1e-15)
    found.sum().backward()
    # The gradient of KL(p || q) with respect to the logits of p, from the calculus of softmax.
    p = log_p.detach().exp()
    gap = log_p.detach() - log_q
    np.testing.assert_allclose(logits.grad, p * (gap - found.detach()[:, None]), rtol=1e-9, atol=1e-12)


def expected(estimate, logits: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[rows] mean of a token's estimate over tokens drawn from the policy; the draw itself has no gradient."""
    log_p = logits.log_softmax(-1)
    return (log_p.detach().exp() * estimate(log_p, log_q)).sum(-1)


def slope(value: torch.Tensor, logits: torch.Tensor) -> np.ndarray:
    [found] = torch.autograd.grad(value.sum(), logits)
    return found.numpy()


each_distance = pytest.mark.parametrize("distance", [0.0, 0.01, 0.3, 1.0, 3.0])


@each_distance
def test_k1_and_k3_have_the_kl_as_their_mean_and_k2_only_near_by(distance):
    logits, log_q = tables(1, (5, 7), distance)
    true = full_kl(logits.log_softmax(-1), log_q)
    for estimate in (k1, k3):
        np.testing.assert_allclose(expected(estimate, logits, log_q).detach(), true.detach(), rtol=1e-9, atol=1e-15)
    bias = float(((expected(k2, logits, log_q) - true).abs() / true.clamp(min=1e-30)).max().detach())
    assert bias < 0.05 if distance < 0.1 else bias > 0.05 * distance


@each_distance
def test_in_the_loss_k1_has_no_gradient_k2_that_of_the_kl_and_k3_that_of_the_reverse(distance):
    logits, log_q = tables(2, (5, 7), distance)
    forward = slope(full_kl(logits.log_softmax(-1), log_q), logits)
    reverse = slope(full_kl(log_q, logits.log_softmax(-1)), logits)
    np.testing.assert_allclose(slope(expected(k1, logits, log_q), logits), 0.0, atol=1e-14)
    np.testing.assert_allclose(slope(expected(k2, logits, log_q), logits), forward, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(slope(expected(k3, logits, log_q), logits), reverse, rtol=1e-9, atol=1e-14)
    if distance >= 0.3:
        assert np.abs(forward - reverse).max() > 1e-3


def test_gradients_of_k2_and_k3_agree_to_first_order_at_the_reference():
    errors = []
    for distance in (0.1, 0.01, 0.001):
        logits, log_q = tables(3, (4, 6), distance)
        two, three = (slope(expected(k, logits, log_q), logits) for k in (k2, k3))
        errors.append(np.abs(two - three).max() / np.abs(two).max())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


# K06, K07 and their kind.


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_estimators_have_the_documented_sign_and_the_penalty_pulls_towards_the_reference():
    """K06."""
    now, reference = f64(-1.0, -0.5).requires_grad_(), f64(-1.2, -0.1)
    assert k1(now, reference).tolist() == pytest.approx([0.2, -0.4])
    assert k2(now, reference).tolist() == pytest.approx([0.02, 0.08])
    assert k3(now, reference).tolist() == pytest.approx([0.018731, 0.091825], abs=1e-6)
    means = [float(k(now, reference).mean().detach()) for k in (k1, k2, k3)]
    assert means == pytest.approx([-0.1, 0.05, 0.055278], abs=1e-6)
    loss = 0.1 * k3(now, reference).mean()
    assert float(loss.detach()) == pytest.approx(0.0055278, abs=1e-7)
    loss.backward()
    after = (now - now.grad).detach()
    assert after[0] < now[0]
    assert after[1] > now[1]


@pytest.mark.parametrize("estimate", [k2, k3])
@few
@given(st.floats(-100, 100).filter(lambda d: abs(d) > 1e-3))
def test_a_descent_step_of_the_penalty_goes_towards_the_reference_from_either_side(estimate, d):
    """K06, also where exponentials are held back."""
    for dtype in (torch.bfloat16, torch.float32):
        now = torch.tensor([-101.0], dtype=dtype, requires_grad=True)
        estimate(now, torch.tensor([-101.0 + d])).sum().backward()
        assert torch.isfinite(now.grad).all()
        assert float(-now.grad) * d > 0


def test_k3_is_accurate_for_close_policies():
    """K07: the naive form gives -6e-8 in float32."""
    found = k3(torch.tensor([0.0]), torch.tensor([5e-5]))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(1.25e-9, rel=0.01)
    for d in (1e-3, 1e-4, 1e-6, 1e-7, -1e-7, -5e-5):
        assert float(k3(torch.tensor([0.0]), torch.tensor([d]))) == pytest.approx(d * d / 2, rel=1e-3)


def test_k3_is_finite_for_distant_policies_and_what_is_held_back_is_counted():
    """K07."""
    for dtype in (torch.float32, torch.bfloat16):
        now = torch.tensor([-120.0, -1.0], dtype=dtype, requires_grad=True)
        reference = torch.tensor([0.0, -1.0], dtype=dtype)
        found = k3(now, reference)
        found.sum().backward()
        assert torch.isfinite(found).all()
        assert torch.isfinite(now.grad).all()
        assert float(now.grad[0]) == pytest.approx(-math.expm1(20.0), rel=0.01)
        assert held_back(reference - now).tolist() == [True, False]


def test_k3_goes_on_without_a_jump_or_a_kink_where_it_becomes_a_line():
    x = torch.linspace(19.9, 20.1, 201, dtype=torch.float64)
    values = k3(torch.zeros_like(x), x)
    slopes = values.diff() / x.diff()
    assert (slopes.diff() >= -1e-3).all()
    assert float(slopes.diff().max() / slopes.max()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_extreme_log_ratios_are_finite_in_value_and_gradient(name, dtype):
    now = torch.full((4000,), -101.0, dtype=dtype, requires_grad=True)
    gap = torch.tensor([100.0, -100.0, 0.0, 1e-3]).repeat(1000)
    found = ESTIMATORS[name](now, (-101.0 + gap).to(dtype))
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(now.grad).all()


def test_equal_policies_have_no_divergence_and_no_pull():
    """K14, for the functions here."""
    now = torch.randn(20, 5).log_softmax(-1).requires_grad_()
    for estimate in (k1, k2, k3):
        assert not estimate(now, now.detach()).any()
    assert not full_kl(now, now.detach()).any()
    (k2(now, now.detach()) + k3(now, now.detach())).sum().backward()
    assert not now.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_full_kl_survives_tokens_that_neither_policy_can_produce(dtype):
    """As under top-k and top-p, where the rest of the vocabulary has probability 0."""
    logits = torch.tensor([[0.0, 1.0, -math.inf], [50.0, -50.0, -math.inf]], dtype=dtype, requires_grad=True)
    log_q = torch.tensor([[1.0, 0.0, -math.inf], [-50.0, 50.0, -math.inf]], dtype=dtype).log_softmax(-1)
    found = full_kl(logits.log_softmax(-1), log_q)
    found.sum().backward()
    assert found.tolist() == pytest.approx([0.4621, 100.0], rel=0.02 if dtype == torch.bfloat16 else 1e-4)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:, 2].tolist() == [0.0, 0.0]


def test_full_kl_of_a_large_vocabulary_in_half_precision_is_added_in_float32():
    numbers = torch.randn(2, 3, 20_000, generator=torch.Generator().manual_seed(0)).log_softmax(-1).bfloat16()
    found = full_kl(numbers[0], numbers[1])
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, full_kl(numbers[0].double(), numbers[1].double()), rtol=1e-4)


def test_no_tokens_have_no_penalty():
    empty = torch.zeros(0, requires_grad=True)
    for estimate in (k1, k2, k3):
        assert estimate(empty, empty.detach()).shape == (0,)
    assert full_kl(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)
    assert sampled_advantages(empty, empty).shape == (0,)


# Entropy.


@few
@given(st.floats(0, 1), st.floats(0, 3), st.floats(0.1, 2), st.floats(1e-4, 0.1))
def test_the_coefficient_rises_below_the_target_falls_above_it_and_is_never_negative(
    coefficient, entropy, target, step
):
    found = next_entropy_coefficient(coefficient, entropy, target=target, step=step)
    assert found == pytest.approx(coefficient + step if entropy < target else max(0.0, coefficient - step))
    assert found >= 0


def test_the_coefficient_settles_where_entropy_meets_its_target():
    """A policy whose entropy is 0.2 + 10 times the coefficient."""
    coefficient = 0.0
    for _ in range(200):
        coefficient = next_entropy_coefficient(coefficient, 0.2 + 10 * coefficient, target=0.7, step=0.005)
    assert coefficient == pytest.approx(0.05, abs=0.0051)
