"""An evaluation asks every held-out question under its own settings and random keys, and judges by the first source."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nearpolicy.evaluate.config import EvaluationConfig
from nearpolicy.evaluate.evaluator import Evaluator, HeldOut, NotJudgedError, score_metrics, summary_of
from nearpolicy.evaluate.metrics import held_out_scores
from nearpolicy.records import Finish, Prompt, Verdict
from nearpolicy.roles import Completion, Sampling


class Generator:
    """Answers with the prompt's first token; every completion comes in reverse order of samples."""

    def __init__(self, failing=()) -> None:
        self.requests = []
        self.failing = failing

    def capabilities(self):
        return SimpleNamespace(numerics="exact")

    async def submit(self, request):
        self.requests.append(request)
        for sample in reversed(range(request.n)):
            await asyncio.sleep(0)
            failed = (request.admission, sample) in self.failing
            tokens = np.array([] if failed else [request.token_ids[0] + sample], dtype=np.int32)
            yield Completion(
                request=request.id,
                sample=sample,
                token_ids=tokens,
                logprobs=np.zeros(len(tokens), dtype=np.float32),
                versions=np.full(len(tokens), 4, dtype=np.int32),
                finish=Finish.FAILED if failed else Finish.LENGTH,
            )


class Verifier:
    """Right is the answer "A"; a shaped value besides; the prompt "abstain" cannot be judged."""

    async def score(self, prompt, rollout, *, admission=None):
        if prompt.text == "abstain":
            return {"number": Verdict.abstained("no answer"), "format": Verdict.scored(1.0)}
        right = float(rollout.text == "A")
        return {"number": Verdict.scored(0.3 + 0.7 * right, correct=right), "format": Verdict.scored(1.0)}


def prompts(task: str, *texts: str) -> HeldOut:
    return HeldOut(task=task, prompts=[Prompt(id=t, task=task, text=t) for t in texts], judge="number")


TRAINING = Sampling(temperature=1.2, top_p=0.5, top_k=7, min_p=0.1, max_tokens=9, stop=("\n",), stop_token_ids=(3,))
TASKS = [prompts("sums", "A1", "B1", "abstain"), prompts("words", "A2")]


def evaluate(config: EvaluationConfig, *, tasks=TASKS, with_pass=True, generator=None, verifier=None):
    generator = generator or Generator()
    return asyncio.run(make(config, tasks, generator, verifier).run(4, with_pass=with_pass)), generator


def make(config: EvaluationConfig, tasks=TASKS, generator=None, verifier=None) -> Evaluator:
    generator = generator or Generator()
    return Evaluator(
        generator,
        verifier or Verifier(),
        tasks,
        config,
        sampling=Sampling(
            temperature=1.2, top_p=0.5, top_k=7, min_p=0.1, max_tokens=9, stop=("\n",), stop_token_ids=(3,)
        ),
        seed=11,
        render=lambda prompt: np.frombuffer(prompt.text.encode(), dtype=np.uint8).astype(np.int32),
        decode=lambda ids: "".join(map(chr, ids)),
    )


@pytest.mark.parametrize(
    ("counts", "found", "reasons"),
    [
        (True, [True, False, None], {"no answer": 1}),
        (False, [False, False, None], {"no answer": 1}),
        (None, [None, None, None], {"no answer": 1, "what 'number' requires abstained or failed": 2}),
    ],
)
def test_an_answer_is_right_only_where_what_its_judge_requires_is_met(counts, found, reasons):
    asked = [replace(TASKS[0], counts=lambda verdicts: counts)]
    evaluator = make(EvaluationConfig(), tasks=asked)
    samples = asyncio.run(evaluator.run(4, with_pass=False))
    assert [sample.correct for sample in samples] == found
    assert dict(evaluator.reasons) == reasons


def test_every_question_is_asked_once_per_mode_with_the_settings_of_evaluation():
    config = EvaluationConfig(pass_k=[2], pass_samples=3, pass_temperature=0.8, max_completion_length=5)
    samples, generator = evaluate(config)
    assert Counter((s.task, s.mode, s.row) for s in samples) == {
        (task, mode, row): n
        for task, rows in (("sums", 3), ("words", 1))
        for row in range(rows)
        for mode, n in (("accuracy", 1), ("pass", 3))
    }
    for request in generator.requests:
        greedy = request.purpose.endswith(".accuracy")
        sampling = request.sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.0 if greedy else 0.8, 5)
        assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
        assert (sampling.stop, sampling.stop_token_ids) == (("\n",), (3,))
        assert request.seed == 11
    assert all((s.version, s.finish, s.num_tokens) == (4, "length", 1) for s in samples)


def test_the_length_of_training_counts_where_evaluation_names_none():
    _, generator = evaluate(EvaluationConfig())
    assert {request.sampling.max_tokens for request in generator.requests} == {9}


def test_random_keys_differ_from_those_of_training_and_between_tasks_and_modes():
    _, generator = evaluate(EvaluationConfig(pass_k=[1]))
    keys = [(request.purpose, request.admission) for request in generator.requests]
    assert len(set(keys)) == len(keys) == 8
    assert all(purpose != "rollout" for purpose, _ in keys)
    assert len({request.id for request in generator.requests}) == 8


def test_samples_for_pass_at_k_are_drawn_only_when_asked_for():
    samples, _ = evaluate(EvaluationConfig(pass_k=[2]), with_pass=False)
    assert {s.mode for s in samples} == {"accuracy"}
    samples, _ = evaluate(EvaluationConfig(), with_pass=True)
    assert {s.mode for s in samples} == {"accuracy"}


def test_right_is_what_the_first_source_calls_correct_not_a_shaped_part_of_it():
    samples, _ = evaluate(EvaluationConfig())
    assert [(s.task, s.text, s.correct, s.value) for s in samples] == [
        ("sums", "A", True, 1.0),
        ("sums", "B", False, 0.0),
        ("sums", "a", None, None),
        ("words", "A", True, 1.0),
    ]


def test_samples_keep_their_place_whatever_order_they_end_in():
    samples, _ = evaluate(EvaluationConfig(temperature=0.5, num_samples=3), tasks=TASKS[1:])
    assert [(s.sample, s.text, s.correct) for s in samples] == [(0, "A", True), (1, "B", False), (2, "C", False)]


def test_what_failed_or_was_not_judged_counts_neither_as_right_nor_as_wrong():
    samples, _ = evaluate(EvaluationConfig(), generator=Generator(failing={(1, 0)}))
    found = summary_of(samples, [])
    assert found == {"accuracy": 1.0, "correct": 2, "count": 2, "not_judged": 2}
    metrics = score_metrics(held_out_scores(samples), [])
    assert metrics == {"evaluation/sums/accuracy": 1.0, "evaluation/words/accuracy": 1.0}


def test_the_summary_weighs_tasks_by_their_questions_and_names_every_k():
    # Samples of "A..": A, B, C, so one of three is right; of "B..": none; pass@2 of (3, 1) is 1 - (2 choose 2)/3.
    tasks = [prompts("sums", "A1", "B1"), prompts("words", "A2")]
    samples, _ = evaluate(EvaluationConfig(pass_k=[1, 2], pass_samples=3), tasks=tasks)
    found = summary_of(samples, [1, 2])
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 0 + 1 / 3) / 3)
    assert found["pass_at_2"] == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    metrics = score_metrics(held_out_scores(samples), [1, 2])
    assert metrics["evaluation/sums/pass@2"] == pytest.approx(1 / 3)
    assert metrics["evaluation/words/pass@2"] == pytest.approx(2 / 3)


def test_an_empty_answer_is_judged_like_any_other():
    class Silent(Generator):
        async def submit(self, request):
            async for completion in super().submit(request):
                empty = {"token_ids": np.array([], dtype=np.int32), "logprobs": np.array([], dtype=np.float32)}
                yield Completion(
                    request=completion.request,
                    sample=completion.sample,
                    versions=np.array([], dtype=np.int32),
                    finish=Finish.STOP,
                    **empty,
                )

    samples, _ = evaluate(EvaluationConfig(), tasks=TASKS[1:], generator=Silent())
    assert [(s.text, s.num_tokens, s.correct) for s in samples] == [("", 0, False)]


def test_an_error_of_the_generator_ends_the_evaluation_with_that_error():
    class Broken(Generator):
        async def submit(self, request):
            raise RuntimeError("the engine stopped")
            yield

    with pytest.raises(RuntimeError, match="the engine stopped"):
        evaluate(EvaluationConfig(), generator=Broken())


def test_a_completion_is_judged_while_the_next_one_is_still_sampled():
    judged = asyncio.Event()

    class Waiting(Generator):
        async def submit(self, request):
            async for completion in super().submit(request):
                yield completion
                await asyncio.wait_for(judged.wait(), 5)

    class Telling(Verifier):
        async def score(self, prompt, rollout, *, admission=None):
            judged.set()
            return await super().score(prompt, rollout)

    config = EvaluationConfig(temperature=0.5, num_samples=2)
    samples, _ = evaluate(config, tasks=TASKS[1:], generator=Waiting(), verifier=Telling())
    assert [s.text for s in samples] == ["A", "B"]


def test_a_generator_that_fails_leaves_no_judgement_behind():
    running = set()

    class FailsLater(Generator):
        async def submit(self, request):
            async for completion in super().submit(request):
                yield completion
                await asyncio.sleep(0)
                raise RuntimeError("the engine stopped")

    class Slow(Verifier):
        async def score(self, prompt, rollout, *, admission=None):
            running.add(prompt.id)
            try:
                await asyncio.sleep(60)
            finally:
                running.discard(prompt.id)

    with pytest.raises(RuntimeError, match="the engine stopped"):
        evaluate(EvaluationConfig(), generator=FailsLater(), verifier=Slow())
    assert running == set()


@pytest.mark.parametrize(
    ("config", "with_pass", "says"),
    [
        (EvaluationConfig(), True, "4 questions: 4 greedy"),
        (EvaluationConfig(pass_k=[8]), True, "4 questions: 4 greedy + 32 samples for pass@8"),
        (
            EvaluationConfig(pass_k=[1, 4], pass_samples=500),
            True,
            "4 questions: 4 greedy + 2,000 samples for pass@1, pass@4",
        ),
        (EvaluationConfig(pass_k=[8]), False, "4 questions: 4 greedy"),
        (EvaluationConfig(temperature=0.5, num_samples=3), True, "4 questions: 12 at temperature 0.5"),
    ],
)
def test_an_evaluation_says_beforehand_what_it_asks_and_afterwards_has_asked_that(config, with_pass, says):
    evaluator = make(config)
    assert evaluator.plan(with_pass=with_pass) == says
    calls = []
    samples = asyncio.run(evaluator.run(0, with_pass=with_pass, on_answer=lambda: calls.append(1)))
    assert len(samples) == len(calls) == evaluator.size(with_pass=with_pass)


def test_an_evaluation_in_which_nothing_could_be_judged_is_an_error_with_the_reason():
    nothing = [prompts("sums", "abstain", "abstain")]
    evaluator = make(EvaluationConfig(), tasks=nothing)
    samples = asyncio.run(evaluator.run(0, with_pass=True))
    with pytest.raises(NotJudgedError, match="first reward, 'number': 2 of 2 not judged, because: no answer"):
        evaluator.require_judged(samples)


def test_one_judged_answer_is_enough_and_the_others_are_told():
    evaluator = make(EvaluationConfig(pass_k=[2]), generator=Generator(failing={(1, 0)}))
    samples = asyncio.run(evaluator.run(0, with_pass=True))
    evaluator.require_judged(samples)
    assert evaluator.not_judged(len(samples)) == "5 of 12 not judged, most often because: no answer"
