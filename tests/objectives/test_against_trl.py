"""The losses of TRL 1.16 on the same tensors. Where they differ, a test shows both and says who has the paper.

What differs everywhere: TRL's means over sequences count rows without a trained token in the divisor, ours do not
(verl and ours agree); and its loss types bind a clip to a divisor, which are two axes here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import process_of, trl_dpo_loss, trl_grpo_loss, trl_kto_loss
from ragged import Ragged, ragged

from nearpolicy.objectives import aggregation, losses, preference, regularisers

few = settings(max_examples=15, deadline=None)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LENGTH = 10
one_advantage = ragged(smallest=1, by_sequence=True)
"""TRL has one advantage per sequence."""


@pytest.fixture(scope="module")
def trl():
    with process_of("trl") as call:
        yield call


def without_empty_rows(b: Ragged) -> Ragged:
    there = sorted(set(b.index))
    return Ragged(**{**vars(b), "index": [there.index(s) for s in b.index], "count": len(there)})


def ours(b: Ragged, loss, loss_agg: str) -> tuple[float, np.ndarray]:
    """(aggregated loss, gradient [N]) of a function of the current log-probabilities."""
    now = b.tensor("now").requires_grad_()
    kept = torch.ones(len(b.now), dtype=torch.bool)
    shares = aggregation.shares(kept, b.sequences, loss_agg, LENGTH)
    total = (shares * loss(now)).sum() / aggregation.divisor(kept, b.sequences, loss_agg)
    total.backward()
    return float(total.detach()), now.grad.numpy()


def theirs(trl, b: Ragged, loss_type: str, *, old: str = "proximal", **options) -> tuple[float, np.ndarray]:
    advantages = [b.advantages[tokens[0]] for tokens in b.tokens_of]
    found, gradient = trl(
        trl_grpo_loss,
        b.padded(b.now),
        b.padded(getattr(b, old)),
        advantages,
        b.mask,
        loss_type=loss_type,
        max_completion_length=LENGTH,
        **options,
    )
    return found, b.flat(gradient)


def agree(mine, other) -> None:
    assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(mine[1], other[1], rtol=1e-5, atol=1e-6)


def of(b: Ragged, *names: str) -> list[torch.Tensor]:
    return [b.tensor(name) for name in names]


def ones(b: Ragged) -> torch.Tensor:
    return torch.ones(len(b.now), dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_type", "loss_agg"),
    [
        ("grpo", "seq_mean_token_mean"),
        ("bnpo", "token_mean"),
        ("dapo", "token_mean"),
        ("dr_grpo", "seq_mean_token_sum_norm"),
        ("luspo", "seq_mean_token_sum"),
    ],
)
@few
@given(b=one_advantage)
def test_clipped_losses_agree_in_every_aggregation_and_with_two_sided_clipping(trl, loss_type, loss_agg, b):
    b = without_empty_rows(b)
    for dual_clip in (None, 4.0):
        mine = ours(
            b,
            lambda now, c=dual_clip: losses.ppo_clip(
                now, *of(b, "proximal", "advantages"), ones(b), **CLIP, dual_clip=c
            ),
            loss_agg,
        )
        agree(mine, theirs(trl, b, loss_type, delta=dual_clip))


@few
@given(one_advantage)
def test_sequence_level_ratios_are_gspo(trl, b):
    b = without_empty_rows(b)
    mine = ours(
        b,
        lambda now: losses.gspo(now, *of(b, "proximal", "advantages"), ones(b), b.sequences, **CLIP),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(trl, b, "grpo", level="sequence"))


@few
@given(one_advantage)
def test_cispo_agrees_with_an_upper_bound_that_is_a_ratio_there_and_a_distance_from_one_here(trl, b):
    """TRL has no lower bound, as the paper's runs; clip_low=1 is none here."""
    b = without_empty_rows(b)
    mine = ours(
        b,
        lambda now: losses.cispo(now, *of(b, "behavior", "advantages"), clip_low=1.0, clip_high=4.0),
        "token_mean",
    )
    agree(mine, theirs(trl, b, "cispo", old="behavior", high=5.0))


@few
@given(one_advantage)
def test_sapo_agrees(trl, b):
    b = without_empty_rows(b)
    mine = ours(
        b,
        lambda now: losses.sapo(
            now, *of(b, "proximal", "advantages"), ones(b), temperature_positive=1.0, temperature_negative=1.05
        ),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(trl, b, "sapo"))


@few
@given(one_advantage)
def test_geometric_mean_losses_agree(trl, b):
    b = without_empty_rows(b)
    mine = ours(
        b,
        lambda now: losses.gmpo(now, *of(b, "proximal", "advantages"), ones(b), b.sequences, **CLIP),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(trl, b, "grpo", gmpo=True))


@few
@given(one_advantage)
def test_the_penalty_to_the_reference_is_k3_beside_the_clipped_loss(trl, b):
    """Exponentials are not held back there."""
    b = without_empty_rows(b)
    mine = ours(
        b,
        lambda now: (
            losses.ppo_clip(now, *of(b, "proximal", "advantages"), ones(b), **CLIP)
            + 0.1 * regularisers.k3(now, b.tensor("behavior"))
        ),
        "seq_mean_token_mean",
    )
    agree(mine, theirs(trl, b, "grpo", reference=b.padded(b.behavior), beta=0.1))


@few
@given(one_advantage, st.floats(-0.5, 0.5))
def test_off_policy_sequences_are_masked_alike_and_stay_in_the_divisor(trl, b, threshold):
    b = without_empty_rows(b)
    arguments = of(b, "behavior", "advantages")

    def loss(now):
        kept = losses.off_policy_sequences_kept(now, *arguments, b.sequences, threshold=threshold)
        return torch.where(kept, losses.ppo_clip(now, *of(b, "proximal", "advantages"), ones(b), **CLIP), 0.0)

    found = theirs(trl, b, "grpo", sampling=b.padded(b.behavior), off_policy_threshold=threshold)
    agree(ours(b, loss, "seq_mean_token_mean"), found)


def test_rows_without_a_trained_token_are_in_their_divisor_and_not_in_ours(trl):
    """K03: two answers of which one is masked whole. The mean over what is trained is -1, not -0.5."""
    b = Ragged(
        index=[0, 0],
        count=2,
        now=[-1.0, -1.0],
        proximal=[-1.0, -1.0],
        behavior=[-1.0, -1.0],
        advantages=[1.0, 1.0],
        weights=[1.0, 1.0],
        mixing=[1.0, 1.0],
    )
    loss, _ = trl(trl_grpo_loss, b.padded(b.now), b.padded(b.proximal), [1.0, 1.0], b.mask, loss_type="grpo")
    mine, _ = ours(
        b, lambda now: losses.ppo_clip(now, *of(b, "proximal", "advantages"), ones(b), **CLIP), "seq_mean_token_mean"
    )
    assert (mine, loss) == (-1.0, -0.5)


# Preferences. A ragged batch serves as [B] answers: `now` are chosen, `proximal` rejected ones.


def mean_of(loss, b: Ragged) -> tuple[float, np.ndarray]:
    now = b.tensor("now").requires_grad_()
    found = loss(now).mean()
    found.backward()
    return float(found.detach()), now.grad.numpy()


@few
@given(ragged(smallest=1))
def test_dpo_and_ipo_agree_for_answers_of_one_token(trl, b):
    """For longer ones TRL divides IPO's log-ratios by the length, as its docstring says; here the caller does."""
    rest = ("proximal", "behavior", "weights")
    for name, loss in (("sigmoid", preference.dpo), ("ipo", preference.ipo)):
        mine = mean_of(lambda now, loss=loss: loss(now, *of(b, *rest), beta=0.3), b)
        agree(mine, trl(trl_dpo_loss, name, b.now, *(getattr(b, x) for x in rest), beta=0.3))


@few
@given(ragged(smallest=1))
def test_their_robust_dpo_is_another_loss_than_smoothed_dpo(trl, b):
    """TRL's `robust` (Chowdhury et al. 2024) weighs the flipped label with -e and divides by 1 - 2e, unbiased under
    label noise; the smoothed loss here (conservative DPO) weighs it with +e. Both are DPO at e = 0."""
    e, rest = 0.1, ("proximal", "behavior", "weights")

    def robust(now):
        clean = preference.dpo(now, *of(b, *rest), beta=0.3)
        flipped = preference.dpo(b.tensor("proximal"), now, *of(b, "weights", "behavior"), beta=0.3)
        return ((1 - e) * clean - e * flipped) / (1 - 2 * e)

    found = trl(trl_dpo_loss, "robust", b.now, *(getattr(b, x) for x in rest), beta=0.3, label_smoothing=e)
    agree(mean_of(robust, b), found)


@few
@given(ragged(smallest=1), st.floats(-2, 2))
def test_kto_agrees(trl, b, kl):
    desirable = [a > 0 for a in b.advantages]
    settings = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}
    mine = mean_of(
        lambda now: preference.kto(
            now, b.tensor("behavior"), torch.tensor(desirable), torch.tensor(kl, dtype=torch.float64), **settings
        ),
        b,
    )
    agree(mine, trl(trl_kto_loss, b.now, b.behavior, desirable, kl, **settings))
