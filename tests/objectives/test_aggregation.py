"""Shares and divisors: the loss of an update is that of its samples, however they are cut, packed or ordered."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, ragged

from nearpolicy.objectives.aggregation import LossAggregation, divisor, shares
from nearpolicy.objectives.sequences import Sequences

few = settings(max_examples=60, deadline=None)
many = settings(max_examples=3000, deadline=None)
MODES = get_args(LossAggregation)
each = pytest.mark.parametrize("loss_agg", MODES)
MAX_LENGTH = 10


def mean_by_definition(b: Ragged, kept: list[bool], loss_agg: str) -> float:
    """Of the batch's `advantages` as token losses: DAPO, GRPO and Dr. GRPO as their papers say, over what is kept."""
    losses = [[b.advantages[t] for t in tokens if kept[t]] for tokens in b.tokens_of]
    losses = [of for of in losses if of]
    if not losses:
        return 0.0
    match loss_agg:
        case "token_mean":
            return sum(map(sum, losses)) / sum(map(len, losses))
        case "seq_mean_token_sum":
            return sum(map(sum, losses)) / len(losses)
        case "seq_mean_token_mean":
            return sum(sum(of) / len(of) for of in losses) / len(losses)
        case "seq_mean_token_sum_norm":
            return sum(sum(of) / MAX_LENGTH for of in losses) / len(losses)
    raise AssertionError(loss_agg)


def part(b: Ragged, kept: list[bool], tokens: list[int], loss_agg: str) -> tuple[float, float]:
    """(sum of share x loss, divisor) of some tokens seen alone."""
    of = torch.tensor([kept[t] for t in tokens], dtype=torch.bool)
    sequences = Sequences(torch.tensor([b.index[t] for t in tokens], dtype=torch.int64), b.count)
    found = shares(of, sequences, loss_agg, MAX_LENGTH)
    assert found.dtype == torch.float32
    losses = torch.tensor([b.advantages[t] for t in tokens], dtype=torch.float64)
    return float(found.double() @ losses), divisor(of, sequences, loss_agg)


def added(parts: list[tuple[float, float]]) -> float:
    total, below = (sum(column) for column in zip(*parts, strict=True))
    return total / below if below else total


def check(loss_agg: str, b: Ragged, data) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(b.index), max_size=len(b.index)))
    right = pytest.approx(mean_by_definition(b, kept, loss_agg), abs=1e-5)
    assert added([part(b, kept, list(range(len(b.index))), loss_agg)]) == right
    # Whole sequences in any order and any number of micro-batches; single tokens where only they count.
    order = data.draw(st.permutations(b.tokens_of))
    cuts = sorted(data.draw(st.lists(st.integers(0, b.count), max_size=3)))
    pieces = [order[low:high] for low, high in itertools.pairwise([0, *cuts, b.count])]
    micro_batches = [[t for tokens in piece for t in tokens] for piece in pieces]
    assert added([part(b, kept, tokens, loss_agg) for tokens in micro_batches]) == right
    if loss_agg == "token_mean":
        assert added([part(b, kept, [t], loss_agg) for t in range(len(b.index))] or [(0.0, 0.0)]) == right


@each
@few
@given(b=ragged(), data=st.data())
def test_however_an_update_is_cut_its_loss_is_the_documented_mean_of_what_is_kept(loss_agg, b, data):
    check(loss_agg, b, data)


@pytest.mark.large
@each
@many
@given(b=ragged(largest=30), data=st.data())
def test_however_many_updates_are_cut_their_losses_are_the_documented_means(loss_agg, b, data):
    check(loss_agg, b, data)


def batch(lengths: list[int], losses: list[float]) -> Ragged:
    index = [s for s, length in enumerate(lengths) for _ in range(length)]
    rest = {name: [0.0] * len(index) for name in ("now", "proximal", "behavior", "weights", "mixing")}
    return Ragged(index=index, count=len(lengths), advantages=[losses[s] for s in index], **rest)


@pytest.mark.parametrize(
    ("loss_agg", "right"),
    [
        ("token_mean", 1.75),
        ("seq_mean_token_mean", 2.5),
        ("seq_mean_token_sum_norm", 0.70),
        ("seq_mean_token_sum", 7.0),
    ],
)
def test_the_loss_of_a_step_does_not_depend_on_micro_batches_order_or_processes(loss_agg, right):
    """K01."""
    b = batch([6, 2], [1.0, 4.0])
    kept = [True] * 8
    first, second = list(range(6)), [6, 7]
    for layout in ([first + second], [first, second], [second, first], [second + first]):
        assert added([part(b, kept, tokens, loss_agg) for tokens in layout]) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_gradient_accumulation_never_changes_the_gradient(accumulation):
    """K02: 0.75 is an extra division by 4, 2.5 a mean of micro-batch means."""
    w = torch.tensor(1.0, requires_grad=True)
    below = 0.0
    for of in np.array_split([1, 2, 3, 4], accumulation):
        sequences = Sequences.of_lengths(of.tolist())
        kept = torch.ones_like(sequences.index, dtype=torch.bool)
        losses = sequences.spread(torch.tensor(of)) * w
        (shares(kept, sequences, "token_mean", MAX_LENGTH) * losses).sum().backward()
        below += divisor(kept, sequences, "token_mean")
    assert float(w.grad) / below == pytest.approx(3.0, abs=1e-6)


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean_token_mean"])
def test_sum_and_divisor_use_the_same_mask(loss_agg):
    """K03 (a): 0.25 would be the divisor of all sixteen tokens."""
    b = batch([4, 4, 8], [0.5] * 3)
    found = part(b, [True] * 8 + [False] * 8, list(range(16)), loss_agg)
    assert added([found]) == pytest.approx(0.5, abs=1e-6)


@each
def test_an_empty_mask_gives_loss_and_gradient_zero_and_divisor_zero(loss_agg):
    """K03 (b)."""
    sequences = Sequences.of_lengths([4, 4, 8])
    nothing = torch.zeros(16, dtype=torch.bool)
    losses = torch.full((16,), 0.5, requires_grad=True)
    total = (shares(nothing, sequences, loss_agg, MAX_LENGTH) * losses).sum()
    total.backward()
    assert (float(total.detach()), divisor(nothing, sequences, loss_agg)) == (0.0, 0.0)
    assert losses.grad.tolist() == [0.0] * 16


def test_a_masked_entropy_is_in_neither_half_of_a_mean():
    """K03 (c)."""
    kept, sequences = torch.tensor([True, True, False]), Sequences.of_lengths([3])
    total = float(shares(kept, sequences, "token_mean", MAX_LENGTH) @ torch.tensor([0.5, 1.5, 9.9]))
    assert total / divisor(kept, sequences, "token_mean") == 1.0


@each
def test_no_tokens_and_no_sequences_add_nothing(loss_agg):
    for count in (0, 3):
        sequences = Sequences(torch.zeros(0, dtype=torch.int64), count)
        nothing = torch.zeros(0, dtype=torch.bool)
        assert shares(nothing, sequences, loss_agg, MAX_LENGTH).shape == (0,)
        assert divisor(nothing, sequences, loss_agg) == 0.0


def test_long_answers_weigh_by_their_tokens_or_alike_as_the_mode_says():
    """Two answers of 1 and 9 tokens: shares of the second in the whole."""
    sequences, kept = Sequences.of_lengths([1, 9]), torch.ones(10, dtype=torch.bool)
    found = {mode: shares(kept, sequences, mode, MAX_LENGTH) / divisor(kept, sequences, mode) for mode in MODES}
    whole = {mode: pytest.approx(of, rel=1e-6) for mode, of in zip(MODES, (0.9, 4.5, 0.5, 0.45), strict=True)}
    assert {mode: float(of[1:].sum()) for mode, of in found.items()} == whole


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, seq_mean_token_sum"):
        shares(torch.ones(1, dtype=torch.bool), Sequences.of_lengths([1]), "mean", 1)
