"""One prompt, G completions, one verdict each: the default environment, and the bounded wrapper around any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nearpolicy.errors import NearpolicyError
from nearpolicy.records import Admission, Finish, Group, Prompt, Rollout, Segment, Verdict
from nearpolicy.roles import Completion, Environment, Generator, Request, Sampling, Verifier

RewardOf = Callable[[Mapping[str, Verdict], str], float | None]
"""Verdicts by source and the task's name -> the weighted reward, or None if it cannot be told."""


class SingleTurn:
    """Generate ``n`` completions of a prompt and verify each as it ends."""

    def __init__(
        self,
        generator: Generator,
        verifier: Verifier,
        *,
        render: Callable[[Prompt], np.ndarray],
        decode: Callable[[Sequence[int]], str],
        reward_of: RewardOf,
        sampling: Sampling,
        n: int,
    ) -> None:
        self._generator = generator
        self._verifier = verifier
        self._render = render
        self._decode = decode
        self._reward_of = reward_of
        self._sampling = sampling
        self._n = n
        self._numerics = generator.capabilities().numerics

    async def run(self, admission: Admission) -> Group:
        context = self._render(admission.prompt)
        request = Request(
            id=f"{admission.index}.{admission.attempt}",
            token_ids=context,
            sampling=self._sampling,
            n=self._n,
            seed=admission.seed,
            admission=admission.index,
        )
        async with asyncio.TaskGroup() as judging:
            tasks = []
            async for completion in self._generator.submit(request):
                rollout = self._rollout(context, completion)
                tasks.append((rollout, completion, judging.create_task(self._judge(admission.prompt, rollout))))
        tasks.sort(key=lambda task: task[0].sample)
        return self._group(admission, [(r, c, task.result()) for r, c, task in tasks])

    def _rollout(self, context: np.ndarray, completion: Completion) -> Rollout:
        tokens = completion.token_ids
        segment = Segment(
            context_ids=context,
            token_ids=tokens,
            mask=np.ones(len(tokens), dtype=bool),
            behavior_logprobs=completion.logprobs,
            versions=completion.versions,
            finish=completion.finish,
            extras=completion.extras,
        )
        return Rollout(
            sample=completion.sample, segments=(segment,), text=self._decode(tokens), numerics=self._numerics
        )

    async def _judge(self, prompt: Prompt, rollout: Rollout) -> Mapping[str, Verdict]:
        if rollout.finish in (Finish.FAILED, Finish.ABORTED) or not rollout.num_sampled:
            return {}  # there is nothing a verifier could speak about
        return await self._verifier.score(prompt, rollout)

    def _group(self, admission: Admission, judged: list[tuple[Rollout, Completion, Mapping[str, Verdict]]]) -> Group:
        task = admission.prompt.task
        rewards = tuple(self._reward_of(verdicts, task) if verdicts else None for _, _, verdicts in judged)
        return Group(
            admission=admission,
            rollouts=tuple(rollout for rollout, _, _ in judged),
            verdicts=tuple(verdicts for _, _, verdicts in judged),
            rewards=rewards,
            failure=self._failure(judged, rewards),
        )

    def _failure(self, judged: list[tuple[Rollout, Completion, Mapping[str, Verdict]]], rewards: tuple) -> str | None:
        """A group with fewer than two scored rollouts compares nothing: it is failed, with the first reason found."""
        if sum(reward is not None for reward in rewards) >= 2:
            return None
        reasons = [c.reason for _, c, _ in judged if c.reason]
        reasons += [f"{source}: {v.reason}" for _, _, vs in judged for source, v in vs.items() if v.reason]
        return f"fewer than two of {len(judged)} rollouts were scored" + (f" ({reasons[0]})" if reasons else "")


class Bounded:
    """Any environment with a limit on time and attempts; nothing but a broken invariant gets out of it.

    A retry keeps the admission index and so repeats the random numbers. What fails to the end is a failed group.
    """

    def __init__(self, environment: Environment, *, timeout_s: float, retries: int) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._retries = retries

    async def run(self, admission: Admission) -> Group:
        group = Group(admission=admission, failure="no attempt was made")
        for attempt in range(self._retries + 1):
            current = Admission(
                index=admission.index,
                prompt=admission.prompt,
                seed=admission.seed,
                version=admission.version,
                attempt=attempt,
            )
            group = await self._attempt(current)
            if group.failure is None:
                return group
        return group

    async def _attempt(self, admission: Admission) -> Group:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._environment.run(admission)
        except TimeoutError:
            reason = f"no group within {self._timeout_s:g} s (queue.rollout_timeout_s)"
        except Exception as error:
            cause = _innermost(error)
            if isinstance(cause, NearpolicyError):  # a dead engine or a broken contract concerns every group
                raise cause from error
            reason = f"the environment raised {type(cause).__name__}: {cause}"
        return Group(admission=admission, failure=reason)


def _innermost(error: BaseException) -> BaseException:
    """The first error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
