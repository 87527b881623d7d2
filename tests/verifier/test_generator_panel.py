"""A judge behind the `Generator` protocol says what the model itself would, and never makes a failure a number."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from nearpolicy.records import Finish, Outcome
from nearpolicy.roles import Completion
from nearpolicy.verifier.config import JudgeReward
from nearpolicy.verifier.learned.generator_panel import GeneratorPanel
from nearpolicy.verifier.learned.judge import Judge
from nearpolicy.verifier.rewards import Sample

REWARD = JudgeReward(models=("engine",), scale=(1, 10))


class Drawing:
    """Draws from a fixed distribution after prompts with these endings."""

    def __init__(self, by_ending, finish=Finish.LENGTH):
        self.by_ending, self.finish = by_ending, finish

    async def submit(self, request):
        shares = self.by_ending[chr(request.token_ids[-1])]
        tokens, weights = list(shares), np.array(list(shares.values()))
        drawn = np.random.default_rng(request.seed).choice(tokens, size=request.n, p=weights / weights.sum())
        for sample, token in enumerate(drawn):
            yield Completion(
                request=request.id,
                sample=sample,
                token_ids=np.array([token], dtype=np.int32),
                logprobs=np.array([math.log(shares[int(token)])], dtype=np.float32),
                versions=np.zeros(1, dtype=np.int32),
                finish=self.finish,
            )


def verdict(generator, text="4", **more):
    panel = GeneratorPanel(
        generator,
        render=lambda chat: "".join(message["content"] for message in chat).encode() + b">",
        tokenize=lambda label: label.encode(),
        end=0,
        **more,
    )
    sample = Sample(text=text, columns={}, prompt="2 + 2?", completion_ids=[], task="t")
    return asyncio.run(Judge(REWARD, panel).score(sample))


def test_the_value_is_the_expectation_over_the_allowed_answers():
    shares = {">": {ord("1"): 0.3, ord("9"): 0.1, ord("x"): 0.6}, "1": {0: 0.25, ord("0"): 0.75}}
    found = verdict(Drawing(shares))
    assert found.value == pytest.approx(0.75 * (0.25 * 0 + 0.75 * 1) + 0.25 * 8 / 9, abs=1e-6)
    assert verdict(Drawing(shares)).value == found.value


def test_a_generator_that_says_something_else_or_fails_gives_no_number():
    found = verdict(Drawing({">": {ord("x"): 1.0}, "1": {0: 1.0}}))
    assert (found.outcome, found.value) == (Outcome.FAILED, None) and "none of 64 draws" in found.reason
    found = verdict(Drawing({">": {ord("1"): 1.0}, "1": {0: 1.0}}, finish=Finish.FAILED))
    assert found.outcome is Outcome.FAILED and "gave no token" in found.reason


def test_the_embedded_engine_agrees_with_the_model_computed_directly():
    from nearpolicy.generator.engine import Engine, EngineLimits
    from nearpolicy.generator.runner import EngineRunner
    from nearpolicy.models.choices import ChoiceModel
    from nearpolicy.models.label_tree import LabelTree
    from nearpolicy.models.loading import load_policy, resolve
    from nearpolicy.models.numerics import FAST
    from nearpolicy.verifier.learned import asking

    policy = load_policy(resolve("random:llama", {"max_position_embeddings": 4096}), known_to_fit=True)
    limits = EngineLimits.sized(policy, max_running=1024, prefill_chunk=512, max_length=2048, kv_memory_mb=64)
    runner = EngineRunner(Engine(policy, limits, FAST), numerics="fast")
    question = asking.Question(
        instructions="Judge.",
        material=(asking.Material("ANSWER", "4"),),
        choices=(asking.Choice(name="v", labels=("1", "2", "10")),),
    )

    def render(chat):
        return "".join(message["content"] for message in chat).encode()

    try:
        panel = GeneratorPanel(runner, render=render, tokenize=lambda label: label.encode(), end=257, draws=4096)
        [found] = asyncio.run(panel.ask(question))
    finally:
        runner.close()
    tree = LabelTree({label: label.encode() for label in ("1", "2", "10")}, 257)
    chat = asking.choice_messages(question, question.choices[0], (), asking.nonce_from(question))
    [expected] = ChoiceModel(policy).decide([(list(render(chat)), tree)])
    assert found["v"] == pytest.approx(expected, abs=1e-3)
