"""Asking held-out questions under one fixed version of the weights, with sampling settings of their own.

Evaluation uses the run's generator and verifier, under random keys and a ledger of its own: its tokens are recorded as
evaluations and never have a training fate.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nearpolicy.errors import UserError, first_error
from nearpolicy.evaluate.config import EvaluationConfig
from nearpolicy.evaluate.metrics import HeldOutScore, held_out_scores
from nearpolicy.records import Finish, Prompt, Rollout, Verdict
from nearpolicy.roles import Completion, Generator, Request, Sampling, Verifier
from nearpolicy.store.schema import EvaluatedSample, prompt_text

CORRECT = 1.0
"""Smallest value of the first reward source (or of its part ``correct``) that counts as a right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A task's held-out questions, and the reward source that decides what is right: its first."""

    task: str
    prompts: Sequence[Prompt]
    judge: str
    counts: Callable[[Mapping[str, Verdict]], bool | None] = lambda verdicts: True
    """Whether what the judge says counts, by the other sources that it requires; None if nobody can say."""


class NotJudgedError(UserError):
    """No answer of an evaluation could be judged; the message names the reasons."""


class Evaluator:
    """Answers the held-out questions of all tasks; one call is one evaluation."""

    def __init__(
        self,
        generator: Generator,
        verifier: Verifier,
        tasks: Sequence[HeldOut],
        config: EvaluationConfig,
        *,
        sampling: Sampling,
        seed: int,
        render: Callable[[Prompt], np.ndarray],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """``sampling``: the run's; evaluation keeps its stops and replaces temperature, length and truncation."""
        self._generator = generator
        self._numerics = generator.capabilities().numerics
        self._verifier = verifier
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._render = render
        self._decode = decode
        plain = replace(sampling, top_p=1.0, top_k=0, min_p=0.0, record_support=False)
        length = config.max_completion_length or sampling.max_tokens
        self._greedy = replace(plain, temperature=config.temperature, max_tokens=length)
        self._sampled = replace(plain, temperature=config.pass_temperature, max_tokens=length)
        self.reasons: Counter[str] = Counter()
        """Why answers of the last evaluation were not judged, and how many each time."""
        self._tell: Callable[[], None] = _nobody_listens

    def _modes(self, with_pass: bool) -> list[tuple[str, Sampling, int]]:
        """(mode, sampling, completions per question)."""
        modes = [("accuracy", self._greedy, self._config.num_samples)]
        if with_pass and self._config.pass_k:
            modes.append(("pass", self._sampled, self._config.pass_samples))
        return modes

    def size(self, *, with_pass: bool) -> int:
        """Completions of one evaluation."""
        return sum(len(task.prompts) for task in self._tasks) * sum(n for _, _, n in self._modes(with_pass))

    def plan(self, *, with_pass: bool) -> str:
        """What one evaluation asks, for people: ``200 questions: 200 greedy + 1,600 samples for pass@8``."""
        questions, config = sum(len(task.prompts) for task in self._tasks), self._config
        how = "greedy" if config.temperature == 0 else f"at temperature {config.temperature:g}"
        parts = [f"{questions * config.num_samples:,} {how}"]
        if len(self._modes(with_pass)) > 1:
            passes = ", ".join(f"pass@{k}" for k in config.pass_k)
            parts.append(f"{questions * config.pass_samples:,} samples for {passes}")
        return f"{questions:,} question{'' if questions == 1 else 's'}: {' + '.join(parts)}"

    async def run(
        self, version: int, *, with_pass: bool, on_answer: Callable[[], None] | None = None
    ) -> list[EvaluatedSample]:
        """All samples of one evaluation; ``with_pass`` adds those for pass@k. ``on_answer`` is called after each."""
        self.reasons.clear()
        self._tell = on_answer or _nobody_listens
        modes = self._modes(with_pass)
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(self._ask(task, row, prompt, mode, sampling, n, version))
                    for task in self._tasks
                    for mode, sampling, n in modes
                    for row, prompt in enumerate(task.prompts)
                ]
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return [sample for samples in asked for sample in samples.result()]

    async def _ask(
        self, task: HeldOut, row: int, prompt: Prompt, mode: str, sampling: Sampling, n: int, version: int
    ) -> list[EvaluatedSample]:
        context = self._render(prompt)
        request = Request(
            id=f"evaluation.{version}.{task.task}.{mode}.{row}",
            token_ids=context,
            sampling=sampling,
            n=n,
            seed=self._seed,
            admission=row,
            purpose=f"evaluation.{task.task}.{mode}",
        )
        async with asyncio.TaskGroup() as tasks:  # each completion is judged when it ends, while others go on
            judged = [
                tasks.create_task(self._judge(task, prompt, context, completion))
                async for completion in self._generator.submit(request)
            ]
        rollouts = [judging.result() for judging in judged]
        return [
            EvaluatedSample(
                task=task.task,
                mode=mode,
                temperature=sampling.temperature,
                row=row,
                sample=rollout.sample,
                prompt=prompt_text(prompt),
                text=rollout.text,
                correct=None if value is None else value >= CORRECT,
                value=value,
                num_tokens=rollout.num_sampled,
                finish=rollout.finish.value,
                version=version,
            )
            for rollout, value in sorted(rollouts, key=lambda pair: pair[0].sample)
        ]

    async def _judge(
        self, task: HeldOut, prompt: Prompt, context: np.ndarray, completion: Completion
    ) -> tuple[Rollout, float | None]:
        rollout = completion.rollout(context, completion.decoded(self._decode), self._numerics)
        if completion.finish in (Finish.FAILED, Finish.ABORTED):
            value, reason = None, completion.reason or f"the completion ended as {completion.finish.value}"
        else:
            verdicts = await self._verifier.score(prompt, rollout)
            value, reason = _judged(task, verdicts)
        if value is None:
            self.reasons[reason or "no reason given"] += 1
        self._tell()
        return rollout, value

    def require_judged(self, samples: Sequence[EvaluatedSample]) -> None:
        """`NotJudgedError` if answers were asked for and not one could be judged."""
        if not samples or any(sample.correct is not None for sample in samples):
            return
        judges = ", ".join(dict.fromkeys(repr(task.judge) for task in self._tasks))
        raise NotJudgedError(
            f"held-out answers cannot be judged by the first reward, {judges}: {self.not_judged(len(samples))}. "
            "Fix the reward, put one that can judge first, or set held_out: 0"
        )

    def not_judged(self, count: int) -> str:
        """``10 of 10 not judged, because: ...`` with the most frequent reason; ``count`` answers were asked for."""
        [(reason, _)] = self.reasons.most_common(1)
        often = " most often" if len(self.reasons) > 1 else ""
        return f"{self.reasons.total():,} of {count:,} not judged,{often} because: {reason}"


def _nobody_listens() -> None:
    pass


def _judged(task: HeldOut, verdicts: Mapping[str, Verdict]) -> tuple[float | None, str]:
    """The number the judge says about being right, 0 if it does not count; and why there is none."""
    verdict = verdicts[task.judge]
    value, counts = correctness(verdict), task.counts(verdicts)
    if value is not None and counts is None:
        return None, f"what {task.judge!r} requires abstained or failed"
    return 0.0 if counts is False and value is not None else value, verdict.reason


def correctness(verdict: Verdict) -> float | None:
    """The number a verdict says about being right: its part ``correct`` where it has one, else its value."""
    return verdict.value if verdict.value is None else verdict.parts.get("correct", verdict.value)


def score_metrics(scores: Sequence[HeldOutScore], pass_k: Sequence[int]) -> dict[str, float]:
    """Evaluation metrics under their canonical names."""
    metrics: dict[str, float] = {}
    for score in scores:
        if score.mode == "accuracy" and score.accuracy is not None:
            metrics[f"evaluation/{score.task}/accuracy"] = score.accuracy
        for k in pass_k if score.mode == "pass" else ():
            value = score.pass_at(k)
            if value is not None:
                metrics[f"evaluation/{score.task}/pass@{k}"] = value
    return metrics


def summary_of(samples: Sequence[EvaluatedSample], pass_k: Sequence[int]) -> Mapping[str, object]:
    """What ``summary.json`` says of one evaluation, over all tasks together."""
    scores = held_out_scores(samples)
    right = [score for score in scores if score.mode == "accuracy"]
    correct, count = sum(s.correct for s in right), sum(s.count for s in right)
    found: dict[str, object] = {
        "accuracy": correct / count if count else None,
        "correct": correct,
        "count": count,
        "not_judged": sum(score.unjudged for score in right),
    }
    passes = [score for score in scores if score.mode == "pass"]
    for k in pass_k:
        values = [(score.pass_at(k), len(score.questions)) for score in passes]
        if values and all(value is not None for value, _ in values):
            found[f"pass_at_{k}"] = sum(v * n for v, n in values) / sum(n for _, n in values)
    return found
