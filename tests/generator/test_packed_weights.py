"""`generator.weights: bfloat16`: another form of the same weights, made anew at every load, its difference measured."""

from __future__ import annotations

import json

import families
import numpy as np
import pytest
import torch
from driving import assert_same_bits, learner_logprobs, make_engine, make_request, run, weights_of

from nearpolicy.errors import ConfigError
from nearpolicy.generator.packed import packed_weights
from nearpolicy.launch import cli
from nearpolicy.machine import bfloat16_products
from nearpolicy.models.numerics import FAST
from nearpolicy.models.weights import digests, named_weights

needs_products = pytest.mark.skipif(not bfloat16_products(), reason="this processor has no products in bfloat16")


def test_products_in_bfloat16_are_read_off_the_processors_flags(tmp_path):
    file = tmp_path / "cpuinfo"
    for flags, expected in (("fpu avx2 avx512f", False), ("avx512_bf16", True), ("avx2 amx_bf16 amx_tile", True)):
        file.write_text(f"processor : 0\nflags\t\t: {flags}\nbugs :\n")
        assert bfloat16_products(file) is expected
    assert not bfloat16_products(tmp_path / "none")


def test_a_processor_without_products_in_bfloat16_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"needs a processor.*slower than float32"):
        packed_weights("bfloat16", families.fresh().model, has_products=False)


@needs_products
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2 has biases
def test_packed_weights_give_nearly_the_logprobs_of_the_learner_and_not_its_bits(family):
    policy, request = families.fresh(family), make_request(20, n=4, max_tokens=12)
    engine = make_engine(policy, weights="bfloat16")
    outcome = run(engine, [request])
    completions = [outcome["r", i] for i in range(4)]
    with torch.no_grad():
        theirs = learner_logprobs(families.fresh(family), FAST, 1, request, completions).numpy()
    gaps = np.abs(np.concatenate([c.logprobs for c in completions]) - theirs)
    assert 0 < gaps.max() < 0.1
    assert engine.packed.num_bytes == sum(2 * m.weight.numel() for m in engine.policy.modules() if _is_linear(m))


def _is_linear(module):
    return isinstance(module, torch.nn.Linear)


@needs_products
def test_after_a_load_the_packed_weights_are_those_of_the_new_version():
    """K26: packed copies of an older version are served by no one."""
    other = weights_of(families.fresh(seed=1), version=1)
    engine = make_engine(families.fresh(), weights="bfloat16")
    before = run(engine, [make_request(20, n=2, max_tokens=8)])
    shown = engine.load(other)
    after = run(engine, [make_request(20, n=2, max_tokens=8)])
    fresh = run(make_engine(families.fresh(seed=1), weights="bfloat16"), [make_request(20, n=2, max_tokens=8)])
    assert_same_bits(after, fresh)
    assert any(before[key].logprobs.tobytes() != after[key].logprobs.tobytes() for key in before)
    assert shown == other.digests == digests(named_weights(engine.policy.model))


@needs_products
def test_a_run_records_fast_numerics_and_reports_the_mismatch_that_the_correction_weighs(tmp_path):
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "packed.yaml"
    recipe.write_text(f"""\
run: {{steps: 1, numerics: fast, dir: {tmp_path / "run"}}}
model: {{path: random:llama, init: {{initializer_range: 0.15}}}}
generator: {{weights: bfloat16}}
sampling: {{max_prompt_length: 16, max_completion_length: 5, num_generations: 4}}
queue: {{prompts_per_step: 2, max_staleness: 0}}
tasks:
  - name: sums
    source: {{kind: jsonl, path: {tmp_path / "rows.jsonl"}}}
    prompt_column: question
    chat: false
    rewards: [{{kind: regex, pattern: '[a-p]'}}]
""")
    with pytest.raises(SystemExit) as end:
        cli.run(["train", str(recipe)])
    assert not end.value.code
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "mismatch/logprob_diff_max" in line]
    assert 0 < step["mismatch/logprob_diff_max"] < 0.1
    assert step["mismatch/weight_p99"] != 1.0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["numerics"] == "fast"
