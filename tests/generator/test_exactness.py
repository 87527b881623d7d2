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
from nearpolicy.models.numerics import Numerics
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


@functools.cache
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


def alone(family: str, threads: int) -> Outcome:
    policy = families.shared(family)
    numerics = families.exact_numerics(policy, threads)
    outcome: Outcome = {}
    for request in groups():
        outcome |= run(make_engine(policy, numerics, threads=threads), [request])
    return outcome


def few_at_a_time(family: str, threads: int) -> Outcome:
    policy = families.shared(family)
    return run(make_engine(policy, families.exact_numerics(policy, threads), threads=threads, max_running=3), groups())


def interrupted(family: str, threads: int) -> Outcome:
    policy = families.shared(family)
    engine = make_engine(policy, families.exact_numerics(policy, threads), threads=threads, prefill_chunk=90)
    return run(engine, groups(), between=lambda step: engine.interrupt() if step % 7 == 0 else None)


def with_too_little_memory(family: str, threads: int) -> Outcome:
    policy = families.shared(family)
    engine = make_engine(policy, families.exact_numerics(policy, threads), threads=threads, num_pages=6)
    return run(engine, groups())


def in_small_chunks(family: str, threads: int) -> Outcome:
    policy = families.shared(family)
    engine = make_engine(policy, families.exact_numerics(policy, threads), threads=threads, prefill_chunk=7)
    return run(engine, groups())


@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.large)])
@pytest.mark.parametrize("how", [alone, few_at_a_time, interrupted, with_too_little_memory, in_small_chunks])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3-dense"])
def test_a_sequence_has_the_same_bits_however_it_is_scheduled(family, how, threads):
    torch.set_num_threads(threads)
    assert_same_bits(how(family, threads), sampled(family, 1))


def test_every_product_of_the_engine_has_the_rows_the_probe_asked_for():
    """Needed on machines whose kernels change below some number of rows, which this one may not be."""
    policy, rows = families.fresh(), []
    for module in policy.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].flatten(0, -2).shape[0]))
    engine = make_engine(policy, Numerics(min_rows=16, max_threads=2), threads=2)
    rows.clear()
    run(engine, [make_request(5, n=2, max_tokens=4), make_request(45, id="long", max_tokens=4)])
    assert min(rows) == 32
    assert max(rows) == 52  # 50 prompt tokens
    assert all(count % 4 == 0 for count in rows)


def test_the_model_of_these_tests_feels_every_part_of_its_context():
    """Else agreement on the context would be proved by nothing."""
    policy = families.shared("llama")
    request = make_request(100, id="g5", n=4, admission=5, temperature=1.3, max_tokens=9)
    completions = [sampled("llama", 1)["g5", i] for i in range(4)]
    ours = torch.from_numpy(np.concatenate([c.logprobs for c in completions]))
    for position in (0, 50, 99):
        ids = request.token_ids.copy()
        ids[position] = 4
        other = make_request(ids, temperature=1.3)
        with torch.no_grad():
            theirs = learner_logprobs(policy, families.exact_numerics(policy), 1, other, completions)
        assert float((theirs - ours).abs().max()) > 0.01


@pytest.mark.parametrize("family", families.FIT)
@torch.no_grad()
def test_logprobs_are_those_of_transformers_own_forward(family):
    from transformers import AutoModelForCausalLM

    policy = families.shared(family, std=0.1)
    requests = [r for r in groups() if len(r.token_ids) in (PAGE - 1, 2 * PAGE + 2)]
    outcome = run(make_engine(policy, families.exact_numerics(policy), prefill_chunk=48), requests)
    plain = AutoModelForCausalLM.from_pretrained(families.folder(family, std=0.1), attn_implementation="eager")
    for request in requests:
        for sample in range(request.n):
            completion = outcome[request.id, sample]
            tokens = torch.from_numpy(completion.token_ids.astype(np.int64))
            ids = torch.cat([torch.from_numpy(request.token_ids.astype(np.int64)), tokens])
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, len(request.token_ids) - 1 : -1]
            expected = torch.log_softmax(logits / request.sampling.temperature, dim=-1).gather(1, tokens[:, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), rtol=0, atol=1e-5)


def test_a_policy_with_dropout_agrees_with_itself_before_the_first_update():
    """K14: the learner trains in train mode; its ratio to the engine is 1 and its distance to the reference 0."""
    options = {"attention_dropout": 0.1}
    policy = families.fresh("llama", **options)
    reference = families.fresh("llama", **options)
    numerics = families.exact_numerics(policy)
    request = make_request(20, n=4, temperature=0.7, max_tokens=12)
    outcome = run(make_engine(policy, numerics), [request])
    completions = [outcome["r", i] for i in range(4)]
    behavior = torch.from_numpy(np.concatenate([c.logprobs for c in completions]))
    policy.train()
    ours = learner_logprobs(policy, numerics, 1, request, completions)
    with torch.no_grad():
        theirs = learner_logprobs(reference, numerics, 1, request, completions)
    assert float((ours.detach() - behavior).exp().sub(1).abs().max()) == 0.0
    assert float((ours.detach() - theirs).abs().max()) == 0.0
