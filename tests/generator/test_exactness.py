"""Engine and learner agree on every sampled token, bit for bit, whatever else the engine does meanwhile."""

from __future__ import annotations

import functools

import families
import numpy as np
import pytest
import torch
from driving import Outcome, assert_same_bits, learner_logprobs, make_engine, make_request, run

from nearpolicy.generator.engine import Engine
from nearpolicy.models.attention import PAGE
from nearpolicy.models.policy import log_softmax
from nearpolicy.roles import Request

PROMPTS = (5, 40, PAGE - 1, PAGE, PAGE + 1, 100, 2 * PAGE + 2, 12)
"""Shorter than a page, at its borders, longer; with the lengths below, some completions cross a border."""
TEMPERATURES = (0.5, 1.0, 1.3)


def groups() -> list[Request]:
    return [
        make_request(
            length, id=f"g{i}", n=4, admission=i, temperature=TEMPERATURES[i % 3], max_tokens=(9, 1, 30, 14)[i % 4]
        )
        for i, length in enumerate(PROMPTS)
    ]


def run_with_late_arrivals(engine: Engine) -> Outcome:
    """Three groups arrive while the others decode."""
    late = groups()[5:]
    return run(engine, groups()[:5], between=lambda step: [engine.submit(r) for r in late] if step == 4 else None)


@functools.lru_cache(maxsize=None)
def sampled(family: str, threads: int) -> Outcome:
    torch.set_num_threads(threads)
    policy = families.shared(family)
    numerics = families.exact_numerics(policy, threads)
    return run_with_late_arrivals(make_engine(policy, numerics, threads=threads, prefill_chunk=48))


@torch.no_grad()
def gap_to_the_learner(family: str, threads: int) -> tuple[int, float]:
    """(sampled tokens, largest absolute difference)"""
    outcome = sampled(family, threads)
    torch.set_num_threads(threads)
    policy, gaps = families.shared(family), []
    numerics = families.exact_numerics(policy, threads)
    for request in groups():
        completions = [outcome[request.id, i] for i in range(request.n)]
        expected = torch.from_numpy(np.concatenate([c.logprobs for c in completions]))
        gaps.append((learner_logprobs(policy, numerics, threads, request, completions) - expected).abs())
    return sum(map(len, gaps)), float(torch.cat(gaps).max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", families.DENSE)
def test_engine_and_learner_agree_bit_for_bit_on_every_sampled_token(family, threads):
    tokens, gap = gap_to_the_learner(family, threads)
    assert (tokens, gap) == (432, 0.0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", families.MIXTURES)
def test_engine_and_learner_of_a_mixture_of_experts_agree_to_1e_5(family, threads):
    tokens, gap = gap_to_the_learner(family, threads)
    assert tokens == 432
    assert gap <= 1e-5
