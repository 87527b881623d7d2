"""Drawing is a pure function of logits and counters, and the log-probability kept is the one drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from driving import make_request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nearpolicy.generator.config import SamplingConfig
from nearpolicy.generator.sampling import draw, kept_tokens, sampled_logprobs, sequence_key, uniforms
from nearpolicy.models.policy import log_softmax
from nearpolicy.roles import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
P = LOGITS.softmax(-1)[0].double().tolist()  # 0.6439, 0.2369, 0.0871, 0.0321


def probabilities(logits: torch.Tensor = LOGITS, **sampling: float) -> list[float]:
    return sampled_logprobs(logits, Sampling(**sampling)).exp()[0].tolist()


def numbers_of(seed: int, count: int, **request) -> np.ndarray:
    key = sequence_key(make_request(seed=seed, **request), 0)
    return uniforms([key] * count, list(range(count)))


# What is drawn from


def test_logprobs_are_of_the_tempered_distribution_in_engine_and_learner():
    """K15: -0.407606 would ignore the temperature."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    engine = sampled_logprobs(logits, Sampling(temperature=0.5))[0, 0]
    learner = log_softmax(logits, 0.5)[0, 0]
    assert float(engine) == pytest.approx(-0.142932, abs=1e-6)
    assert float(engine) == float(learner)


def test_top_k_renormalises_over_the_k_most_likely():
    total = P[0] + P[1]
    assert probabilities(top_k=2) == pytest.approx([P[0] / total, P[1] / total, 0, 0], abs=1e-6)


def test_top_p_keeps_the_token_that_crosses_it():
    total = P[0] + P[1]
    assert probabilities(top_p=0.7) == pytest.approx([P[0] / total, P[1] / total, 0, 0], abs=1e-6)
    assert probabilities(top_p=0.64) == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_top_p_below_the_largest_probability_leaves_one_token():
    assert probabilities(top_p=1e-9) == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_min_p_is_a_share_of_the_largest_probability():
    total = P[0] + P[1]  # P[1] / P[0] = 0.368, P[2] / P[0] = 0.135
    assert probabilities(min_p=0.3) == pytest.approx([P[0] / total, P[1] / total, 0, 0], abs=1e-6)
    assert probabilities(min_p=0.13)[3] == 0
    assert probabilities(min_p=0.13)[2] == pytest.approx(P[2] / (1 - P[3]), abs=1e-6)


def test_top_p_is_taken_of_what_top_k_left():
    """Of the two tokens top-k leaves, the first has 0.731: alone it reaches 0.7. Of all four it would not."""
    assert probabilities(top_p=0.7, top_k=2) == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_the_filters_see_the_tempered_distribution():
    cold = (LOGITS / 0.5).softmax(-1)[0].tolist()  # 0.865 alone reaches 0.7
    assert cold[0] > 0.7 > P[0]
    assert probabilities(temperature=0.5, top_p=0.7) == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_filters_that_keep_everything_leave_the_bits_alone():
    plain = sampled_logprobs(LOGITS, Sampling())
    assert kept_tokens(plain, Sampling(top_k=4)) is None
    assert torch.equal(sampled_logprobs(LOGITS, Sampling(top_k=99)), plain)


def test_temperature_zero_takes_the_most_likely_token_with_certainty():
    logprobs = sampled_logprobs(LOGITS.roll(2), Sampling(temperature=0, top_p=0.1, top_k=3))
    assert logprobs[0].tolist() == [-math.inf, -math.inf, 0.0, -math.inf]
    assert draw(logprobs, np.array([0.999])).tolist() == [2]


@pytest.mark.parametrize("vocabulary", [5, 272, 1000])
def test_greedy_ties_go_to_the_first_token_whatever_the_row(vocabulary):
    logits = torch.zeros(9, vocabulary)
    logits[:, 3] = logits[:, vocabulary - 1] = 1.0
    logprobs = sampled_logprobs(logits, Sampling(temperature=0))
    assert draw(logprobs, np.linspace(0, 0.99, 9)).tolist() == [3] * 9


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_nan_and_still_a_valid_token_id(temperature, bad):
    logits = torch.zeros(2, 300)
    logits[0, 7] = bad
    logprobs = sampled_logprobs(logits, Sampling(temperature=temperature))
    tokens = draw(logprobs, np.array([0.5, 0.5]))
    values = logprobs.gather(1, tokens[:, None])[:, 0]
    assert math.isnan(values[0]) and math.isfinite(values[1])
    assert all(0 <= token < 512 for token in tokens.tolist())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 40),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0, 0.99),
)
def test_what_is_kept_sums_to_one_and_holds_the_most_likely_tokens(seed, vocabulary, temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(vocabulary, generator=generator) * 0.3 for _ in range(3)])  # without ties
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logprobs = sampled_logprobs(logits, sampling)
    plain = log_softmax(logits, temperature)
    for kept, before in zip(logprobs, plain, strict=True):
        inside = kept > -math.inf
        assert float(kept.exp().sum()) == pytest.approx(1, abs=1e-5)
        if (~inside).any():
            assert before[inside].min() > before[~inside].max()
        if top_k:
            assert int(inside.sum()) <= top_k
        # Renormalising moves every kept token by the same amount.
        moved = (kept - before)[inside]
        assert float(moved.max() - moved.min()) < 1e-4


# Inverting the cumulative distribution


@pytest.mark.parametrize("vocabulary", [4, 256, 257, 700])
def test_drawn_tokens_have_the_frequencies_of_the_distribution(vocabulary):
    """Chi-square over 40,000 draws; the bound is six standard deviations above the mean."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logprobs = log_softmax(logits, 0.8)
    count = 40_000
    tokens = draw(logprobs.expand(count, -1), numbers_of(3, count)).numpy()
    expected = logprobs[0].double().exp().numpy() * count
    seen = np.bincount(tokens, minlength=vocabulary)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    degrees = vocabulary - 1
    assert chi_square < degrees + 6 * math.sqrt(2 * degrees) + 12


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(1, 800),
    alive=st.floats(0, 1),
    numbers=st.lists(
        st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 0.5])), min_size=1, max_size=8
    ),
)
def test_a_token_of_probability_zero_is_never_drawn(seed, vocabulary, alive, numbers):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(numbers), vocabulary, generator=generator) * 4
    dead = torch.rand(len(numbers), vocabulary, generator=generator) > alive
    dead[torch.arange(len(numbers)), torch.randint(vocabulary, (len(numbers),), generator=generator)] = False
    logprobs = torch.log_softmax(logits.masked_fill(dead, -math.inf), dim=-1)
    tokens = draw(logprobs, np.array(numbers))
    assert bool((tokens < vocabulary).all())
    assert bool(logprobs.exp().gather(1, tokens[:, None]).gt(0).all())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), vocabulary=st.integers(1, 600), number=st.floats(0, 1, exclude_max=True))
def test_draw_takes_the_first_token_whose_cumulative_probability_exceeds_the_number(seed, vocabulary, number):
    logprobs = log_softmax(torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2, 1.0)
    cumulative = logprobs[0].exp().double().cumsum(0).numpy()
    target = number * cumulative[-1]
    assume(np.abs(cumulative - target).min() > 1e-9)
    assert draw(logprobs, np.array([number])).item() == int((cumulative <= target).sum())


def test_a_number_between_the_rounding_of_the_two_levels_takes_the_last_token_of_the_block():
    """Sums of numbers of very different size end a bit apart; between a block and its tokens lies no token."""
    found = 0
    for seed in range(200):
        logprobs = log_softmax(torch.randn(1, 512, generator=torch.Generator().manual_seed(seed)) * 12, 1.0)
        logprobs[0, 250:256] = -math.inf  # the last token of the first block that can be drawn is 249
        probabilities = logprobs.exp().numpy().reshape(2, 256)
        ends = probabilities.sum(axis=1, dtype=np.float64)
        running = probabilities[0].astype(np.float64).cumsum()[-1]
        number = np.nextafter(ends[0], 0) / ends.sum()
        if running <= number * ends.sum() < ends[0]:
            found += 1
            assert draw(logprobs, np.array([number])).item() == 249
    assert found


def test_a_row_is_drawn_alike_alone_and_among_others():
    logprobs = log_softmax(torch.randn(50, 272, generator=torch.Generator().manual_seed(0)), 1.0)
    numbers = numbers_of(0, 50)
    together = draw(logprobs, numbers).tolist()
    assert together == [draw(logprobs[i : i + 1], numbers[i : i + 1]).item() for i in range(50)]


# Random numbers


def test_numbers_are_uniform_and_independent_of_their_neighbours_in_position():
    numbers = numbers_of(11, 40_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    seen = np.bincount((numbers * 50).astype(int), minlength=50)
    assert ((seen - 800) ** 2 / 800).sum() < 49 + 6 * math.sqrt(98)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


KEYS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63),
        "admission": st.integers(0, 2**40),
        "sample": st.integers(0, 64),
        "turn": st.integers(0, 100),
        "position": st.integers(0, 4096),
        "purpose": st.sampled_from(["rollout", "evaluation", "evaluation.t.greedy"]),
    }
)


@settings(max_examples=200, deadline=None)
@given(key=KEYS)
def test_a_number_depends_on_nothing_but_its_key(key):
    sample, position = key.pop("sample"), key.pop("position")
    first = make_request(3, id="first", temperature=0.5, **key)
    again = make_request([9, 8, 7], id="again", n=64, top_k=3, max_tokens=99, version=4, **key)
    (number,) = uniforms([sequence_key(first, sample)], [position])
    # Whatever stands beside it in the batch:
    assert uniforms([5, sequence_key(again, sample)], [0, position])[1] == number


@settings(max_examples=300, deadline=None)
@given(key=KEYS, other=KEYS, part=st.sampled_from(["seed", "admission", "sample", "turn", "position", "purpose"]))
def test_a_number_changes_with_every_part_of_its_key(key, other, part):
    assume(key[part] != other[part])
    numbers = []
    for parts in (key, key | {part: other[part]}):
        sample, position = parts.pop("sample"), parts.pop("position")
        numbers += uniforms([sequence_key(make_request(3, **parts), sample)], [position]).tolist()
    assert numbers[0] != numbers[1]


def test_swapping_two_parts_of_the_key_gives_other_numbers():
    keys = {
        sequence_key(make_request(seed=s, admission=a, turn=t), i)
        for s in range(4)
        for a in range(4)
        for t in range(4)
        for i in range(4)
    }
    assert len(keys) == 256


# Settings


def test_training_at_temperature_zero_is_refused_with_the_reason():
    """K51."""
    with pytest.raises(ValueError, match=r"sampling\.temperature is 0.*evaluation\.temperature may be 0"):
        SamplingConfig(temperature=0)
