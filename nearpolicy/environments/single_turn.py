"""One prompt, G completions, one verdict each: the default environment, and the bounded wrapper around any.

Where the objective needs a baseline, one more completion is asked for beside the G samples: greedy, judged in the same
way, kept apart in `Group.baseline`. Without its reward there is no baseline, and the group is failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nearpolicy.errors import ConfigError, EngineError, NearpolicyError, described
from nearpolicy.records import BASELINE, Admission, Baseline, Finish, Group, Outcome, Prompt, Rollout, Verdict
from nearpolicy.roles import Begun, Completion, Environment, Generator, Request, Sampling, Verifier
from nearpolicy.waits import waiting

RewardOf = Callable[[Mapping[str, Verdict], str], float | None]
"""Verdicts by source and the task's name -> the weighted reward, or None if it cannot be told."""

Earlier = Callable[[Admission], Group | None]
"""An attempt -> what is stored of an earlier one and this one goes on from, if there is anything."""

_Judging = tuple[Rollout, Completion, "asyncio.Task[Mapping[str, Verdict]]"]
_Judged = tuple[Rollout, Completion, Mapping[str, Verdict]]
_Earlier = tuple[Rollout, Mapping[str, Verdict]]


class SingleTurn:
    """Generate ``n`` completions of a prompt, and perhaps a greedy one, and verify each as it ends."""

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
        smallest_group: int = 2,
        with_baseline: bool = False,
        timeout_s: float | None = None,
        earlier: Earlier = lambda admission: None,
    ) -> None:
        """``smallest_group``: scored samples that the estimator of advantages needs; a group with fewer is failed.
        ``with_baseline``: whether it needs the reward of a greedy completion too.

        ``timeout_s``: ``queue.rollout_timeout_s``. After this long the requests are aborted and judging stops; the
        group is then failed, and holds what was sampled, so that every token has a fate.

        ``earlier``: asked once for each attempt. Samples that had ended are taken as they are, with their verdicts,
        and others go on from their tokens, unless the generator cannot do that."""
        self._timeout_s = timeout_s
        self._generator = generator
        self._verifier = verifier
        self._render = render
        self._decode = decode
        self._reward_of = reward_of
        self._sampling = sampling
        self._n = n
        self._smallest_group = smallest_group
        # What limits the choice of tokens says nothing of the likeliest one, and no learner needs the choice there was.
        plain = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, record_support=False)
        self._greedy = plain if with_baseline else None
        self._wanted = {*range(n), *([BASELINE] if with_baseline else [])}
        found = generator.capabilities()
        if not found.returns_token_ids:
            raise ConfigError(
                "this generator returns text only; training needs the token ids that were sampled, since text that is "
                "tokenised again may give others. Use a generator that returns ids, or only evaluate with this one"
            )
        self._numerics = found.numerics
        self._earlier = earlier if found.resumable else lambda admission: None
        self._cut_off: dict[int, Callable[[str], None]] = {}
        """By admission that is running: how to end it early, given the reason."""

    async def run(self, admission: Admission) -> Group:
        context = self._render(admission.prompt)
        earlier = self._earlier_samples(admission, context)
        requests = self._requests(admission, context, earlier)
        tasks: list[_Judging] = []
        early: list[str] = []

        async def collect(request: Request) -> None:
            with waiting(f"group {admission.index}", "completions"):
                async for completion in self._generator.submit(request):
                    rollout = completion.rollout(context, completion.decoded(self._decode), self._numerics)
                    if request.purpose == "baseline":
                        rollout = replace(rollout, sample=BASELINE)
                    task = judging.create_task(self._judge(admission, rollout, earlier.get(rollout.sample)))
                    tasks.append((rollout, completion, task))
                    if early:
                        task.cancel()

        def cut_off(reason: str) -> None:
            if len(tasks) == len(self._wanted) and all(task.done() for _, _, task in tasks):
                return  # it has just completed, and the task group takes no more
            early.append(": ".join([reason, *filter(None, [self._missing(tasks)])]))
            abort = self._generator.abort([request.id for request in requests])
            try:
                judging.create_task(abort)  # what is left comes back as aborted
            except RuntimeError:  # it is ending with an error
                abort.close()
            for _, _, task in tasks:
                task.cancel()

        timer = None
        if self._timeout_s:
            reason = _out_of_time(self._timeout_s)
            timer = asyncio.get_running_loop().call_later(self._timeout_s, cut_off, reason)
        try:
            async with asyncio.TaskGroup() as judging:
                self._cut_off[admission.index] = cut_off
                for request in requests[1:]:
                    judging.create_task(collect(request))
                await collect(requests[0])  # in this task: there are thousands, and most ask for nothing else
        except asyncio.CancelledError as stopped:
            stopped.add_note(self._missing(tasks))  # shown if a time limit is the cause
            raise
        finally:
            self._cut_off.pop(admission.index, None)
            if timer is not None:
                timer.cancel()
        tasks.sort(key=lambda task: task[0].sample)
        for request in requests:
            n, samples = request.n, [c.sample for _, c, _ in tasks if c.request == request.id]
            if samples != list(range(n)):
                raise EngineError(f"the generator answered request {request.id!r} of {n} samples with {samples}")
        group = self._group(admission, [(r, c, {} if task.cancelled() else task.result()) for r, c, task in tasks])
        return replace(group, failure=early[0]) if early else group

    def give_up(self, admission: int, reason: str) -> None:
        if cut_off := self._cut_off.get(admission):
            cut_off(reason)

    async def stop(self) -> None:
        for cut_off in list(self._cut_off.values()):
            cut_off("the run ended")

    def _earlier_samples(self, admission: Admission, context: np.ndarray) -> dict[int, _Earlier]:
        """By sample, those whose tokens follow the same prompt."""
        group = self._earlier(admission)
        if group is None:
            return {}
        return {
            rollout.sample: (rollout, verdicts)
            for rollout, verdicts in zip(group.rollouts, group.verdicts, strict=True)
            if np.array_equal(rollout.segments[0].context_ids, context)
        }

    def _requests(self, admission: Admission, context: np.ndarray, earlier: Mapping[int, _Earlier]) -> list[Request]:
        """For the samples, and for the greedy completion if one is wanted; asked for at the same time."""
        samples = Request(
            id=f"{admission.index}.{admission.attempt}",
            token_ids=context,
            sampling=self._sampling,
            n=self._n,
            seed=admission.seed,
            admission=admission.index,
            begun={sample: _begun(rollout) for sample, (rollout, _) in earlier.items()},
        )
        if self._greedy is None:
            return [samples]
        greedy = {"sampling": self._greedy, "n": 1, "purpose": "baseline", "begun": {}}
        return [samples, replace(samples, id=f"{samples.id}.baseline", **greedy)]

    def _missing(self, tasks: Sequence[_Judging]) -> str:
        """What a group that ran out of time was waiting for."""
        waiting = {
            "generated": self._wanted - {rollout.sample for rollout, _, _ in tasks},
            "judged": {rollout.sample for rollout, _, task in tasks if not task.done() or task.cancelled()},
        }
        parts = []
        for what, which in waiting.items():
            if samples := sorted(which - {BASELINE}):
                parts.append(f"samples {samples} of {self._n} were not {what}")
            if BASELINE in which:
                parts.append(f"the greedy completion was not {what}")
        return " and ".join(parts)

    async def _judge(
        self, admission: Admission, rollout: Rollout, earlier: _Earlier | None = None
    ) -> Mapping[str, Verdict]:
        if rollout.finish in (Finish.FAILED, Finish.ABORTED) or not rollout.num_sampled:
            return {}  # there is nothing a verifier could speak about
        if earlier is not None and _is_judged(earlier[1]) and earlier[0].num_sampled == rollout.num_sampled:
            return earlier[1]
        with waiting(f"group {admission.index}", "verdicts"):
            return await self._verifier.score(admission.prompt, rollout, admission=admission.index)

    def _group(self, admission: Admission, judged: list[_Judged]) -> Group:
        rewards = [self._reward_of(verdicts, admission.prompt.task) if verdicts else None for _, _, verdicts in judged]
        first = len(judged) - self._n  # behind the greedy completion, whose sample number is the smallest
        samples, baseline = judged[first:], None
        if first:
            baseline = Baseline(rollout=judged[0][0], verdicts=judged[0][2], reward=rewards[0])
        failure = self._too_few(samples, rewards[first:])
        if failure is None and baseline is not None and baseline.reward is None:
            failure = "the greedy completion was not scored, so there is no baseline" + _first_reason(judged[:1])
        return Group(
            admission=admission,
            rollouts=tuple(rollout for rollout, _, _ in samples),
            verdicts=tuple(verdicts for _, _, verdicts in samples),
            rewards=tuple(rewards[first:]),
            failure=failure,
            baseline=baseline,
        )

    def _too_few(self, samples: Sequence[_Judged], rewards: Sequence[float | None]) -> str | None:
        """Why there is nothing to compare, with the first reason found; None if enough samples were scored."""
        if sum(reward is not None for reward in rewards) >= self._smallest_group:
            return None
        few = {1: "none", 2: "fewer than two"}.get(self._smallest_group, f"fewer than {self._smallest_group}")
        return f"{few} of {len(samples)} rollouts were scored{_first_reason(samples)}"


def _begun(rollout: Rollout) -> Begun:
    [segment] = rollout.segments
    return Begun(
        token_ids=segment.token_ids,
        logprobs=segment.behavior_logprobs,
        versions=segment.versions,
        extras=segment.extras,
    )


def _is_judged(verdicts: Mapping[str, Verdict]) -> bool:
    return bool(verdicts) and all(verdict.outcome is not Outcome.FAILED for verdict in verdicts.values())


def _first_reason(judged: Sequence[_Judged]) -> str:
    """Why something was not scored, in brackets behind a blank; empty if nothing says so."""
    reasons = [completion.reason for _, completion, _ in judged if completion.reason]
    reasons += [f"{source}: {v.reason}" for _, _, verdicts in judged for source, v in verdicts.items() if v.reason]
    return f" ({reasons[0]})" if reasons else ""


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
        self._given_up: set[int] = set()
        """Admissions that are running and not wanted any more."""

    async def run(self, admission: Admission) -> Group:
        group = await self._attempt(admission)
        for _ in range(self._retries):
            if group.failure is None or self._stopped or admission.index in self._given_up:
                break
            self._on_retry(group)
            group = await self._attempt(replace(group.admission, attempt=group.admission.attempt + 1))
        self._given_up.discard(admission.index)
        return group

    def give_up(self, admission: int, reason: str) -> None:
        self._given_up.add(admission)
        self._environment.give_up(admission, reason)

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
