"""One prompt, G completions, one verdict each: the default environment, and the bounded wrapper around any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nearpolicy.errors import ConfigError, EngineError, NearpolicyError, described
from nearpolicy.records import Admission, Finish, Group, Prompt, Rollout, Verdict
from nearpolicy.roles import Completion, Environment, Generator, Request, Sampling, Verifier

RewardOf = Callable[[Mapping[str, Verdict], str], float | None]
"""Verdicts by source and the task's name -> the weighted reward, or None if it cannot be told."""

_Judging = tuple[Rollout, Completion, "asyncio.Task[Mapping[str, Verdict]]"]


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
        timeout_s: float | None = None,
    ) -> None:
        """``timeout_s``: ``queue.rollout_timeout_s``. After this long the request is aborted and judging stops; the
        group is then failed, and holds what was sampled, so that every token has a fate."""
        self._timeout_s = timeout_s
        self._generator = generator
        self._verifier = verifier
        self._render = render
        self._decode = decode
        self._reward_of = reward_of
        self._sampling = sampling
        self._n = n
        found = generator.capabilities()
        if not found.returns_token_ids:
            raise ConfigError(
                "this generator returns text only; training needs the token ids that were sampled, since text that is "
                "tokenised again may give others. Use a generator that returns ids, or only evaluate with this one"
            )
        self._numerics = found.numerics
        self._cut_off: dict[str, Callable[[str], None]] = {}
        """By request that is running: how to end it early, given the reason."""

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
        tasks: list[_Judging] = []
        early: list[str] = []

        def cut_off(reason: str) -> None:
            if len(tasks) == self._n and all(task.done() for _, _, task in tasks):
                return  # it has just completed, and the task group takes no more
            early.append(": ".join([reason, *filter(None, [self._missing(tasks)])]))
            judging.create_task(self._generator.abort([request.id]))  # what is left comes back as aborted
            for _, _, task in tasks:
                task.cancel()

        timer = None
        if self._timeout_s:
            reason = _out_of_time(self._timeout_s)
            timer = asyncio.get_running_loop().call_later(self._timeout_s, cut_off, reason)
        try:
            async with asyncio.TaskGroup() as judging:
                self._cut_off[request.id] = cut_off
                async for completion in self._generator.submit(request):
                    rollout = completion.rollout(context, self._decode(completion.token_ids), self._numerics)
                    task = judging.create_task(self._judge(admission, rollout))
                    tasks.append((rollout, completion, task))
                    if early:
                        task.cancel()
        except asyncio.CancelledError as stopped:
            stopped.add_note(self._missing(tasks))  # shown if a time limit is the cause
            raise
        finally:
            self._cut_off.pop(request.id, None)
            if timer is not None:
                timer.cancel()
        tasks.sort(key=lambda task: task[0].sample)
        if (samples := [rollout.sample for rollout, _, _ in tasks]) != list(range(self._n)):
            raise EngineError(f"the generator answered request {request.id!r} of {self._n} samples with {samples}")
        group = self._group(admission, [(r, c, {} if task.cancelled() else task.result()) for r, c, task in tasks])
        return replace(group, failure=early[0]) if early else group

    async def stop(self) -> None:
        for cut_off in list(self._cut_off.values()):
            cut_off("the run ended")

    def _missing(self, tasks: Sequence[_Judging]) -> str:
        """What a group that ran out of time was waiting for."""
        generated = {rollout.sample for rollout, _, _ in tasks}
        waiting = {
            "generated": sorted(set(range(self._n)) - generated),
            "judged": sorted(rollout.sample for rollout, _, task in tasks if not task.done() or task.cancelled()),
        }
        return " and ".join(f"samples {which} of {self._n} were not {what}" for what, which in waiting.items() if which)

    async def _judge(self, admission: Admission, rollout: Rollout) -> Mapping[str, Verdict]:
        if rollout.finish in (Finish.FAILED, Finish.ABORTED) or not rollout.num_sampled:
            return {}  # there is nothing a verifier could speak about
        return await self._verifier.score(admission.prompt, rollout, admission=admission.index)

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
        """A group with fewer than two scored rollouts compares nothing: it is failed, with the first reason found. A
        group that was to have only one is for estimators that compare nothing within it."""
        needed = min(2, self._n)
        if sum(reward is not None for reward in rewards) >= needed:
            return None
        reasons = [c.reason for _, c, _ in judged if c.reason]
        reasons += [f"{source}: {v.reason}" for _, _, vs in judged for source, v in vs.items() if v.reason]
        what = f"fewer than two of {len(judged)} rollouts were scored" if needed == 2 else "its rollout was not scored"
        return what + (f" ({reasons[0]})" if reasons else "")


GRACE_S = 10.0
"""What an environment that keeps the limit itself gets beyond it, to hand over what was sampled: an abort waits for the
forward pass that the engine is in."""


class Bounded:
    """Any environment with a limit on time and attempts; nothing but a broken invariant gets out of it.

    A retry keeps the admission index and so repeats the random numbers. What fails to the end is a failed group.
    An environment that is still busy ``grace_s`` after the limit is cut off; what it has sampled is then not recorded.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_s: float,
        retries: int,
        on_retry: Callable[[Group], None] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """``timeout_s``: ``queue.rollout_timeout_s``. ``on_retry`` is told of each failed attempt that another one
        follows: its tokens have a fate too."""
        self._environment = environment
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._retries = retries
        self._on_retry = on_retry or (lambda group: None)
        self._stopped = False

    async def run(self, admission: Admission) -> Group:
        group = await self._attempt(admission)
        for _ in range(self._retries):
            if group.failure is None or self._stopped:
                break
            self._on_retry(group)
            group = await self._attempt(replace(group.admission, attempt=group.admission.attempt + 1))
        return group

    async def stop(self) -> None:
        self._stopped = True
        await self._environment.stop()

    async def _attempt(self, admission: Admission) -> Group:
        try:
            async with asyncio.timeout(self._timeout_s + self._grace_s) as limit:
                return await self._environment.run(admission)
        except Exception as error:
            cause = _innermost(error)
            if isinstance(cause, NearpolicyError):  # a dead engine or a broken contract concerns every group
                raise cause from error
            if limit.expired():
                notes = getattr(error.__cause__, "__notes__", [])
                reason = ": ".join([_out_of_time(self._timeout_s), *notes])
            else:
                reason = f"the environment raised {described(cause)}"
        return Group(admission=admission, failure=reason)


def _out_of_time(limit_s: float) -> str:
    return f"no group within {limit_s:g} s (queue.rollout_timeout_s)"


def _innermost(error: BaseException) -> BaseException:
    """The first error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
