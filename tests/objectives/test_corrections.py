"""Behaviour corrections: weights, rejections, what they hide, and the versions they compare."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, ragged

from nearpolicy.objectives import aggregation, corrections, losses
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective, Tokens
from nearpolicy.objectives.sequences import Sequences

few = settings(max_examples=40, deadline=None)
many = settings(max_examples=2000, deadline=None)

FLOORS = st.none() | st.floats(0.0, 0.99)
CAPS = st.floats(1.0, 8.0) | st.just(math.inf)


def clipped(x: float, low: float | None, high: float) -> float:
    return min(max(x, low or 0.0), high)


def inside(x: float, low: float | None, high: float) -> bool:
    return (low or 0.0) <= x <= high


def held(x: float) -> float:
    """Weights are held between exp(-20) and exp(20); bands are decided on the true ratio."""
    return min(max(x, math.exp(-20)), math.exp(20))


def token_ratios(b: Ragged) -> list[float]:
    return [math.exp(p) / math.exp(q) for p, q in zip(b.proximal, b.behavior, strict=True)]


def products(b: Ragged) -> list[float]:
    """Of each token's sequence."""
    of = [math.prod(token_ratios(b)[t] for t in tokens) for tokens in b.tokens_of]
    return [of[s] for s in b.index]


def geometric_means(b: Ragged) -> list[float]:
    sizes = [len(tokens) for tokens in b.tokens_of]
    return [product ** (1 / sizes[s]) for product, s in zip(products(b), b.index, strict=True)]


FORMULAS = {
    "none": lambda b, low, high: ([1.0] * len(b.now), [True] * len(b.now)),
    "token_truncate": lambda b, low, high: (
        [clipped(w, low, high) for w in token_ratios(b)],
        [True] * len(b.now),
    ),
    "token_mask": lambda b, low, high: (token_ratios(b), [inside(w, low, high) for w in token_ratios(b)]),
    "token_mask_unweighted": lambda b, low, high: (
        [1.0] * len(b.now),
        [inside(w, low, high) for w in token_ratios(b)],
    ),
    "sequence_truncate": lambda b, low, high: (
        [clipped(held(w), low, high) for w in products(b)],
        [True] * len(b.now),
    ),
    "sequence_mask": lambda b, low, high: (
        [held(w) for w in products(b)],
        [inside(w, low, high) for w in products(b)],
    ),
    "sequence_mask_unweighted": lambda b, low, high: (
        [1.0] * len(b.now),
        [inside(w, low, high) for w in products(b)],
    ),
    "geometric_mask": lambda b, low, high: (
        [1.0] * len(b.now),
        [inside(w, low, high) for w in geometric_means(b)],
    ),
}
"""Name -> (weights, kept) of a batch, a floor and a cap."""
each = pytest.mark.parametrize("name", FORMULAS)


def corrected(name: str, b: Ragged, floor: float | None, cap: float, dtype=torch.float64) -> corrections.Correction:
    policies = (b.tensor("proximal", dtype), b.tensor("behavior", dtype))
    band, kind = {"cap": cap, "floor": floor}, name.removesuffix("_unweighted")
    weighted = {} if not kind.endswith("_mask") or kind == "geometric_mask" else {"weighted": kind == name}
    match kind:
        case "none":
            return corrections.none(*policies)
        case "token_truncate" | "token_mask":
            return getattr(corrections, kind)(*policies, **band, **weighted)
    return getattr(corrections, kind)(*policies, b.sequences, **band, **weighted)


def check(name: str, b: Ragged, floor: float | None, cap: float) -> None:
    found = corrected(name, b, floor, cap)
    weights, kept = FORMULAS[name](b, floor, cap)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-9)
    assert found.kept.tolist() == kept
    np.testing.assert_allclose(found.raw, token_ratios(b), rtol=1e-12)
    assert not (found.weights.requires_grad or found.raw.requires_grad)


@each
@few
@given(b=ragged(), floor=FLOORS, cap=CAPS)
def test_every_correction_is_its_definition(name, b, floor, cap):
    check(name, b, floor, cap)


@pytest.mark.large
@each
@many
@given(b=ragged(largest=24), floor=FLOORS, cap=CAPS)
def test_every_correction_is_its_definition_on_many_batches(name, b, floor, cap):
    check(name, b, floor, cap)


@each
@few
@given(b=ragged(), floor=FLOORS, cap=CAPS)
def test_equal_numbers_in_engine_and_learner_give_weights_of_exactly_one(name, b, floor, cap):
    same = Ragged(**{**vars(b), "proximal": b.behavior})
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        found = corrected(name, same, floor, cap, dtype)
        assert found.weights.tolist() == found.raw.tolist() == [1.0] * len(b.now)
        assert found.kept.all()


@each
def test_no_weight_has_a_gradient(name):
    b = Ragged(
        index=[0, 0, 1],
        count=2,
        now=[-1.0] * 3,
        proximal=[-1.0, -0.9, -1.2],
        behavior=[-1.1] * 3,
        advantages=[1.0] * 3,
        weights=[1.0] * 3,
        mixing=[1.0] * 3,
    )
    policies = [b.tensor(name).requires_grad_() for name in ("proximal", "behavior")]
    found = {
        "none": lambda: corrections.none(*policies),
        "token_truncate": lambda: corrections.token_truncate(*policies, cap=2.0),
        "token_mask": lambda: corrections.token_mask(*policies, cap=2.0, weighted=True),
        "token_mask_unweighted": lambda: corrections.token_mask(*policies, cap=2.0, weighted=False),
        "sequence_truncate": lambda: corrections.sequence_truncate(*policies, b.sequences, cap=2.0),
        "sequence_mask": lambda: corrections.sequence_mask(*policies, b.sequences, cap=2.0, weighted=True),
        "sequence_mask_unweighted": lambda: corrections.sequence_mask(*policies, b.sequences, cap=2.0, weighted=False),
        "geometric_mask": lambda: corrections.geometric_mask(*policies, b.sequences, cap=2.0),
    }[name]()
    assert not any(x.requires_grad for x in (found.weights, found.kept, found.raw))


# K10 and its kind.


def tokens_of(now, proximal, behavior, advantages) -> Tokens:
    of = [torch.tensor(x, dtype=torch.float64) for x in (now, proximal, behavior, advantages)]
    return Tokens(
        logprobs=of[0],
        entropies=torch.zeros_like(of[0]),
        proximal_logprobs=of[1],
        behavior_logprobs=of[2],
        advantages=of[3],
        sequences=Sequences.of_lengths([len(now)]),
    )


def test_a_mismatch_weight_compares_engine_and_learner_at_one_version_and_not_the_current_policy():
    """K10 (a): -2.4 would be the weight of the current policy."""
    weights = corrections.token_truncate(torch.tensor([-0.7]).double(), torch.tensor([-1.0]).double(), cap=2.0).weights
    assert float(weights) == pytest.approx(1.349859, abs=1e-6)
    for loss in ("ppo_clip", "decoupled_ppo"):
        config = ObjectiveConfig(
            loss=loss, clip_low=0.2, clip_high=0.2, correction="token_truncate", correction_cap=2.0
        )
        found = Objective(config, 10).token_losses(tokens_of([-0.2], [-0.7], [-1.0], [1.0]))
        assert found.losses.tolist() == pytest.approx([-1.619831], abs=1e-6)


def test_rejected_tokens_leave_sum_and_divisor_and_raw_and_truncated_ratios_are_told_apart():
    """K10 (b): -0.75 would be the divisor 4."""
    behavior = torch.zeros(4, dtype=torch.float64)
    proximal = torch.tensor([1.0, 0.9, 6.0, 1.1], dtype=torch.float64).log()
    found = corrections.token_mask(proximal, behavior, cap=2.0, floor=0.5, weighted=False)
    sequences = Sequences.of_lengths([4])
    for loss_agg in ("token_mean", "seq_mean_token_mean"):
        shares = aggregation.shares(found.kept, sequences, loss_agg, 10)
        divisor = aggregation.divisor(found.kept, sequences, loss_agg)
        assert float((shares * -found.weights).sum()) / divisor == pytest.approx(-1.0)
    assert float(found.raw.mean()) == pytest.approx(2.25)
    assert float(corrections.token_truncate(proximal, behavior, cap=2.0).weights.mean()) == pytest.approx(1.25)
    assert float((~found.kept).float().mean()) == 0.25


def test_what_a_correction_hides_is_logged_beside_what_it_applies():
    """K10: raw ratio, applied weight and rejected share of one batch."""
    proximal = [math.log(w) for w in (1.0, 0.9, 6.0, 1.1)]
    zeros = [0.0] * 4

    def logged(**settings) -> dict[str, float]:
        found = Objective(ObjectiveConfig(loss="pg", **settings), 10).token_losses(
            tokens_of(proximal, proximal, zeros, [1.0] * 4)
        )
        return {name: float(values.double().mean()) for name, values in found.named.items()}

    truncated = logged(correction="token_truncate", correction_cap=2.0)
    assert truncated["correction/raw_mean"] == pytest.approx(2.25)
    assert truncated["correction/weight_mean"] == pytest.approx(1.25)
    masked = logged(correction="token_mask", correction_cap=2.0, correction_floor=0.5)
    assert masked["correction/raw_mean"] == pytest.approx(2.25)
    assert masked["correction/rejected_share"] == 0.25


@few
@given(ragged(), st.floats(1.0, 3.0))
def test_truncated_weights_never_exceed_raw_ratios_and_never_fall_with_the_cap(b, cap):
    for name, ratios in (("token_truncate", token_ratios(b)), ("sequence_truncate", [held(w) for w in products(b)])):
        tight, loose = (corrected(name, b, None, c).weights for c in (cap, 2 * cap))
        assert (tight <= torch.tensor(ratios, dtype=torch.float64) * (1 + 1e-12)).all()
        assert (tight <= loose).all()


@few
@given(ragged(by_sequence=True))
def test_a_sequence_is_rejected_whole_or_not_at_all(b):
    for name in ("sequence_mask", "sequence_mask_unweighted", "geometric_mask"):
        kept = corrected(name, b, 0.5, 1.5).kept
        assert all(len({bool(kept[t]) for t in tokens}) < 2 for tokens in b.tokens_of)


def test_a_geometric_band_does_not_narrow_with_length_and_a_product_band_does():
    for length in (1, 10, 1000, 4000):
        proximal, behavior = torch.full((length,), -1.0), torch.full((length,), -1.0 - 0.005)
        sequences = Sequences.of_lengths([length])
        assert corrections.geometric_mask(proximal, behavior, sequences, cap=1.01, floor=0.99).kept.all()
        product = corrections.sequence_mask(proximal, behavior, sequences, cap=2.0, floor=0.5, weighted=False)
        assert bool(product.kept.all()) == (length * 0.005 < math.log(2.0))


def test_the_narrow_band_of_geometric_masking_is_decided_in_more_bits_than_half_precision_has():
    """In bfloat16, 1.0157 and a cap of 1.0125 are the same number."""
    behavior, proximal = torch.full((2,), -2.0).bfloat16(), torch.full((2,), -1.984375).bfloat16()
    sequences = Sequences.of_lengths([2])
    mean = math.exp(1 / 64)
    assert not corrections.geometric_mask(proximal, behavior, sequences, cap=1.0125).kept.any()
    for gap in (1e-3, 1e-5, 1e-9):
        assert not corrections.geometric_mask(proximal, behavior, sequences, cap=mean - gap).kept.any()
        assert corrections.geometric_mask(proximal, behavior, sequences, cap=mean + gap).kept.all()


# Numbers that break others.


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cap", [2.0, math.inf])
def test_distant_policies_give_finite_weights(name, dtype, cap):
    n = 1000
    gap = np.concatenate([np.full(n, 100.0), np.full(n, -100.0), np.tile([100.0, -100.0], n // 2), np.zeros(n)])
    b = Ragged(
        index=np.repeat([0, 1, 2, 4], n).tolist(),
        count=5,
        now=gap.tolist(),
        proximal=(gap - 101.0).tolist(),
        behavior=[-101.0] * (4 * n),
        advantages=[1.0] * (4 * n),
        weights=[1.0] * (4 * n),
        mixing=[1.0] * (4 * n),
    )
    found = corrected(name, b, 0.5, cap, dtype)
    for x in (found.weights, found.raw):
        assert torch.isfinite(x).all()
        assert x.dtype == torch.promote_types(dtype, torch.float32)
    assert found.kept[3 * n :].all()
    if "mask" in name:
        assert not found.kept[n : 2 * n].any()
        assert bool(found.kept[:n].all()) == (cap == math.inf)
        # A sequence whose ratios cancel is near as a whole, and far token by token.
        assert bool(found.kept[2 * n : 3 * n].all()) == ("token" not in name)


@pytest.mark.parametrize(("log_ratio", "cap", "floor"), [(30.0, 1e10, None), (-30.0, 2.0, 1e-10)])
def test_a_band_wider_than_what_is_exponentiated_still_rejects_what_lies_outside(log_ratio, cap, floor):
    proximal, behavior = torch.tensor([-31.0 + log_ratio]), torch.tensor([-31.0])
    sequences = Sequences.of_lengths([1])
    for found in (
        corrections.token_mask(proximal, behavior, cap=cap, floor=floor, weighted=True),
        corrections.sequence_mask(proximal, behavior, sequences, cap=cap, floor=floor, weighted=True),
        corrections.geometric_mask(proximal, behavior, sequences, cap=cap, floor=floor),
    ):
        assert not found.kept.any()
        assert torch.isfinite(found.weights).all()


@each
def test_no_tokens_have_no_weights(name):
    b = Ragged(index=[], count=3, now=[], proximal=[], behavior=[], advantages=[], weights=[], mixing=[])
    found = corrected(name, b, 0.5, 2.0)
    assert found.weights.shape == found.kept.shape == found.raw.shape == (0,)


def test_a_batch_that_is_rejected_whole_has_loss_zero_and_gradient_zero():
    behavior, advantages = torch.zeros(6) - 50.0, torch.ones(6)
    now = torch.full((6,), -1.0, requires_grad=True)
    sequences = Sequences.of_lengths([2, 0, 4])
    for found in (
        corrections.token_mask(now.detach(), behavior, cap=2.0, weighted=True),
        corrections.sequence_mask(now.detach(), behavior, sequences, cap=2.0, weighted=True),
        corrections.geometric_mask(now.detach(), behavior, sequences, cap=1.01, floor=0.99),
    ):
        assert not found.kept.any()
        now.grad = None
        shares = aggregation.shares(found.kept, sequences, "seq_mean_token_mean", 10)
        loss = (shares * losses.policy_gradient(now, advantages, found.weights)).sum()
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert now.grad.tolist() == [0.0] * 6
        assert aggregation.divisor(found.kept, sequences, "token_mean") == 0.0
