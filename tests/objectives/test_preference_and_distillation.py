"""Losses on pairs and labels, and divergences from a teacher: formulas, bounds, the gradients they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import agrees, ragged

from nearpolicy.objectives.distillation import reverse_kl, reverse_kl_top_k, sampled_advantages
from nearpolicy.objectives.preference import best_and_worst, bradley_terry, dpo, ipo, kto, maximum_likelihood
from nearpolicy.objectives.regularisers import full_kl

few = settings(max_examples=40, deadline=None)
BETA = 0.7


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Formulas on whole answers. A ragged batch serves as [B] answers: `now` are chosen, `proximal` rejected ones.


@few
@given(ragged(), st.sampled_from([0.0, 0.1, 0.5]))
def test_dpo_is_its_published_formula(b, smoothing):
    rejected, ref_c, ref_r = b.tensor("proximal"), b.tensor("behavior"), b.tensor("weights")

    def formula(chosen, _):
        out = []
        for i, y in enumerate(chosen):
            margin = BETA * ((y - b.behavior[i]) - (b.proximal[i] - b.weights[i]))
            out.append(-(1 - smoothing) * math.log(sigmoid(margin)) - smoothing * math.log(sigmoid(-margin)))
        return out

    agrees(
        lambda chosen: dpo(chosen, rejected, ref_c, ref_r, beta=BETA, label_smoothing=smoothing),
        formula,
        b.now,
        b.mixing,
    )


@few
@given(ragged())
def test_dpo_and_ipo_depend_on_the_difference_of_log_ratios_alone_and_raise_the_chosen(b):
    for loss in (dpo, ipo):
        now, rejected = b.tensor("now").requires_grad_(), b.tensor("proximal").requires_grad_()
        reference = (b.tensor("behavior"), b.tensor("weights"))
        found = loss(now, rejected, *reference, beta=0.1)
        found.sum().backward()
        np.testing.assert_allclose(now.grad, -rejected.grad, rtol=1e-12)
        swapped = loss(now + 3.0, rejected + 3.0, *reference, beta=0.1)
        np.testing.assert_allclose(found.detach(), swapped.detach(), rtol=1e-9)
        if loss is dpo:
            assert (now.grad < 0).all()


@few
@given(ragged())
def test_ipo_is_its_published_formula(b):
    rejected, ref_c, ref_r = b.tensor("proximal"), b.tensor("behavior"), b.tensor("weights")
    agrees(
        lambda chosen: ipo(chosen, rejected, ref_c, ref_r, beta=BETA),
        lambda chosen, _: [
            ((y - b.behavior[i]) - (b.proximal[i] - b.weights[i]) - 1 / (2 * BETA)) ** 2 for i, y in enumerate(chosen)
        ],
        b.now,
        b.mixing,
    )


@few
@given(ragged(), st.floats(-2, 2))
def test_kto_is_its_published_formula_with_a_divergence_that_is_never_negative(b, kl):
    desirable = [a > 0 for a in b.advantages]

    def formula(now, _):
        z, out = max(kl, 0.0), []
        for i, y in enumerate(now):
            r = y - b.behavior[i]
            value = 1.5 * sigmoid(BETA * (r - z)) if desirable[i] else 0.8 * sigmoid(BETA * (z - r))
            out.append((1.5 if desirable[i] else 0.8) - value)
        return out

    labels, reference = torch.tensor(desirable, dtype=torch.bool), b.tensor("behavior")
    estimate = torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    settings = {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.8}
    agrees(lambda now: kto(now, reference, labels, estimate, **settings), formula, b.now, b.mixing)
    assert not kto(b.tensor("now"), reference, labels, estimate, **settings).requires_grad


@few
@given(ragged())
def test_bradley_terry_is_the_log_likelihood_of_the_labels_with_a_margin_where_given(b):
    rejected = b.tensor("proximal")
    for margins in (None, b.tensor("weights")):
        agrees(
            lambda chosen, m=margins: bradley_terry(chosen, rejected, m),
            lambda chosen, _, m=margins: [
                math.log(1 + math.exp(b.proximal[i] - y + (0.0 if m is None else b.weights[i])))
                for i, y in enumerate(chosen)
            ],
            b.now,
            b.mixing,
        )


@few
@given(ragged())
def test_maximum_likelihood_is_minus_the_log_probability(b):
    agrees(maximum_likelihood, lambda now, _: [-x for x in now], b.now, b.mixing)


def test_equal_answers_cost_log_two_and_pull_with_half_of_beta():
    zero = torch.zeros(1, dtype=torch.float64)
    chosen = zero.clone().requires_grad_()
    loss = dpo(chosen, zero, zero, zero, beta=0.2)
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(math.log(2))
    assert float(chosen.grad) == pytest.approx(-0.1)


def test_smoothed_dpo_has_its_minimum_where_the_labels_are_as_reliable_as_the_model_says():
    """sigmoid(margin) = 1 - e: a margin beyond it is pulled back."""
    margin = torch.tensor([math.log(9.0)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    dpo(margin, zero, zero, zero, beta=1.0, label_smoothing=0.1).sum().backward()
    assert float(margin.grad) == pytest.approx(0.0, abs=1e-12)


def test_ipo_has_its_minimum_at_a_finite_margin():
    h = torch.tensor([1 / (2 * 0.25)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss = ipo(h, zero, zero, zero, beta=0.25)
    loss.sum().backward()
    assert (float(loss.detach()), float(h.grad)) == (0.0, 0.0)


def test_the_optimum_of_dpo_is_the_softmax_of_rewards_around_the_reference():
    """Rafailov et al. 2023: with labels drawn by Bradley and Terry from rewards r, the expected loss is least at
    pi = reference exp(r / beta) / Z."""
    rewards, beta = torch.tensor([0.3, -1.0, 0.9, 0.0], dtype=torch.float64), 0.5
    log_reference = torch.tensor([0.1, -0.3, 0.4, 0.0], dtype=torch.float64).log_softmax(0)
    logits = (log_reference + rewards / beta).requires_grad_()
    log_pi = logits.log_softmax(0)
    total = 0.0
    for i, j in itertools.permutations(range(4), 2):
        win = torch.sigmoid(rewards[i] - rewards[j])
        pair = (log_pi[[i]], log_pi[[j]], log_reference[[i]], log_reference[[j]])
        total = total + win * dpo(*pair, beta=beta).sum()
    total.backward()
    assert logits.grad.abs().max() < 1e-12


def losses_of(chosen, rejected, *references):
    labels = torch.arange(len(chosen)) % 2 == 0
    return {
        "dpo": dpo(chosen, rejected, *references, beta=0.1),
        "dpo_smoothed": dpo(chosen, rejected, *references, beta=0.1, label_smoothing=0.1),
        "ipo": ipo(chosen, rejected, *references, beta=0.1),
        "kto": kto(chosen, references[0], labels, chosen.detach().float().sum(), beta=0.1),
        "bradley_terry": bradley_terry(chosen, rejected, references[0].abs()),
        "maximum_likelihood": maximum_likelihood(chosen),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["dpo", "dpo_smoothed", "ipo", "kto", "bradley_terry", "maximum_likelihood"])
def test_answers_of_thousands_of_unlikely_tokens_stay_finite(name, dtype):
    """4,000 tokens of log-ratio +-100."""
    sums = torch.tensor([-4e5, 0.0, -4e5, -2e5]).to(dtype)
    chosen, rejected = sums.clone().requires_grad_(), sums.flip(0).clone().requires_grad_()
    zeros = torch.zeros_like(sums)
    found = losses_of(chosen, rejected, zeros, zeros)[name]
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(chosen.grad).all()


def test_no_pairs_have_no_losses():
    empty = torch.zeros(0)
    assert all(found.shape == (0,) for found in losses_of(empty, empty, empty, empty).values())


@given(st.lists(st.none() | st.integers(0, 4), max_size=7))
def test_the_pair_of_a_group_is_its_first_best_and_first_worst_scored_sample(rewards):
    scored = [i for i, reward in enumerate(rewards) if reward is not None]
    found = best_and_worst(rewards)
    if len({rewards[i] for i in scored}) < 2:
        assert found is None
        return
    best, worst = found
    assert all(rewards[i] < rewards[best] for i in scored if i < best)
    assert all(rewards[i] <= rewards[best] for i in scored)
    assert all(rewards[i] > rewards[worst] for i in scored if i < worst)
    assert all(rewards[i] >= rewards[worst] for i in scored)


# Distillation.


def tables(seed: int, rows: int, vocabulary: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student with gradient, log-probabilities of a teacher."""
    numbers = np.random.default_rng(seed)
    student, teacher = sharpness * numbers.normal(size=(2, rows, vocabulary))
    return torch.tensor(student, requires_grad=True), torch.tensor(teacher).log_softmax(-1)


SHARPNESS = st.sampled_from([0.1, 1.0, 5.0, 20.0])


def events_kl(student: list[float], teacher: list[float], k: int) -> float:
    """KL over the k likeliest tokens of the student and one event for the rest."""
    top = sorted(range(len(student)), key=lambda v: -student[v])[:k]
    events = [[v] for v in top] + [[v for v in range(len(student)) if v not in top]]
    out = 0.0
    for event in filter(None, events):
        p, q = (math.fsum(math.exp(row[v]) for v in event) for row in (student, teacher))
        out += p * math.log(p / q) if p > 0 else 0.0
    return out


@few
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 8), SHARPNESS, st.data())
def test_top_k_distillation_is_the_divergence_over_k_events_and_the_rest(seed, rows, vocabulary, sharpness, data):
    k = data.draw(st.integers(1, vocabulary))
    logits, teacher = tables(seed, rows, vocabulary, sharpness)
    student = logits.log_softmax(-1)
    found = reverse_kl_top_k(student, teacher, k=k)
    expected = [events_kl(p, q, k) for p, q in zip(student.tolist(), teacher.tolist(), strict=True)]
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-9, atol=1e-12)


@few
@given(st.integers(0, 2**32), SHARPNESS)
def test_top_k_distillation_is_a_lower_bound_that_rises_with_k_to_the_whole(seed, sharpness):
    logits, teacher = tables(seed, 3, 7, sharpness)
    student = logits.log_softmax(-1).detach()
    bounds = [reverse_kl_top_k(student, teacher, k=k) for k in range(1, 8)]
    whole = reverse_kl(student, teacher)
    for lower, upper in itertools.pairwise([*bounds, whole]):
        assert (lower <= upper + 1e-12).all()
    assert (bounds[0] >= -1e-12).all()
    np.testing.assert_allclose(bounds[-1], whole, rtol=1e-12, atol=1e-14)


@few
@given(st.integers(0, 2**32), st.integers(1, 6), SHARPNESS)
def test_the_gradient_of_top_k_distillation_is_that_of_its_events(seed, k, sharpness):
    """With respect to a logit: p_v (log-ratio of v's event - KL), as for any softmax over events."""
    logits, teacher = tables(seed, 2, 6, sharpness)
    student = logits.log_softmax(-1)
    found = reverse_kl_top_k(student, teacher, k=k)
    found.sum().backward()
    for row in range(2):
        p, q = student[row].detach().tolist(), teacher[row].tolist()
        top = sorted(range(6), key=lambda v: -p[v])[:k]
        rest = [v for v in range(6) if v not in top]
        rest_gap = (
            math.log(math.fsum(math.exp(p[v]) for v in rest) / math.fsum(math.exp(q[v]) for v in rest)) if rest else 0.0
        )
        kl = events_kl(p, q, k)
        expected = [math.exp(p[v]) * ((p[v] - q[v] if v in top else rest_gap) - kl) for v in range(6)]
        np.testing.assert_allclose(logits.grad[row], expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sure_student_has_a_rest_smaller_than_the_rounding_of_one(dtype):
    """The teacher leaves 1e-12 outside the student's top, the student 1e-3, then 1e-10."""
    for mass in (1e-3, 1e-10):
        student = torch.tensor([[1 - mass, mass / 2, mass / 2]], dtype=torch.float64).log().to(dtype)
        teacher = torch.tensor([[1 - 1e-12, 5e-13, 5e-13]], dtype=torch.float64).log().to(dtype)
        exact = (1 - mass) * math.log((1 - mass) / (1 - 1e-12)) + mass * math.log(mass / 1e-12)
        found = float(reverse_kl_top_k(student, teacher, k=1))
        assert found == pytest.approx(
            exact, rel=1e-4 if mass == 1e-3 else 1e-2, abs=1e-7 if dtype == torch.float32 else 0
        )


def test_reverse_kl_has_its_gradient_in_the_student_only():
    logits, teacher = tables(3, 4, 5, 1.0)
    teacher.requires_grad_()
    (
        reverse_kl(logits.log_softmax(-1), teacher) + reverse_kl_top_k(logits.log_softmax(-1), teacher, k=2)
    ).sum().backward()
    assert teacher.grad is None
    assert logits.grad.abs().max() > 0


def test_policy_gradient_on_sampled_advantages_descends_the_exact_divergence():
    """The mean over the student's own samples of -(log teacher - log student) grad log student is the gradient."""
    logits, teacher = tables(4, 5, 6, 1.0)
    student = logits.log_softmax(-1)
    advantages = sampled_advantages(student, teacher)
    assert not advantages.requires_grad
    loss = (student.detach().exp() * -advantages * student).sum()
    [sampled] = torch.autograd.grad(loss, logits)
    [exact] = torch.autograd.grad(full_kl(logits.log_softmax(-1), teacher).sum(), logits)
    np.testing.assert_allclose(sampled, exact, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("k", [0, 6])
def test_a_top_that_is_empty_or_larger_than_the_vocabulary_is_refused_by_name(k):
    with pytest.raises(ValueError, match=f"k is {k}; it must lie between 1 and the vocabulary, 5"):
        reverse_kl_top_k(torch.zeros(2, 5), torch.zeros(2, 5), k=k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tables_with_impossible_tokens_and_distant_policies_have_finite_divergences_and_gradients(k, dtype):
    inf = math.inf
    logits = torch.tensor(
        [[0.0, 1.0, -inf, -inf], [100.0, 0.0, -inf, -inf], [0.0, 100.0, -inf, -inf], [0.0, -inf, -inf, -inf]],
        dtype=dtype,
        requires_grad=True,
    )
    teacher = torch.tensor(
        [[1.0, 0.0, -inf, -inf], [0.0, 100.0, -inf, -inf], [0.0, 100.0, -inf, -inf], [0.0, 0.0, -inf, -inf]],
        dtype=dtype,
    ).log_softmax(-1)
    for found in (
        reverse_kl_top_k(logits.log_softmax(-1), teacher, k=k),
        reverse_kl(logits.log_softmax(-1), teacher),
    ):
        logits.grad = None
        found.sum().backward()
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.isfinite(found).all()
        assert torch.isfinite(logits.grad).all()
        assert float(found[1].detach()) == pytest.approx(100.0, rel=0.01)
        assert float(found[2].detach()) == pytest.approx(0.0, abs=1e-6)
