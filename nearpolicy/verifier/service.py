"""Every reward source of a task judges every rollout; a failure of any of them is a verdict, never a number.

    score(prompt, rollout) -> exact_match, number            here, at once
                           -> math_verify, regex, ...        a worker process (`workers`)
                           -> function                       a worker process, or here with `verifier.in_process`
                           -> code                           runs in the sandbox (`sandbox`), judged here
                           -> judge, rubric, reward_model    an endpoint or a model's own process (`learned`)

Verdicts belong to the call that asked for them, so the order in which scoring ends changes nothing. `score` raises only
for what must end the run: a user function that breaks its contract, a prompt of an unknown task, a use before `start`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearpolicy.errors import ConfigError, NearpolicyError, VerifierError
from nearpolicy.records import Outcome, Prompt, Rollout, Verdict
from nearpolicy.verifier import functions, rewards
from nearpolicy.verifier.cache import VerdictCache, is_chosen, is_deterministic
from nearpolicy.verifier.code import CodeGrader
from nearpolicy.verifier.combining import with_gates_shown
from nearpolicy.verifier.config import (
    CodeReward,
    FunctionReward,
    JudgeReward,
    LearnedReward,
    RewardConfig,
    RewardModelReward,
    RubricReward,
    VerifierConfig,
    check_together,
    reads_tokens,
)
from nearpolicy.verifier.functions import RewardFunctionError, UserFunction
from nearpolicy.verifier.learned.scorers import LearnedScorers
from nearpolicy.verifier.rewards import BuiltIn, Sample, runs_inline
from nearpolicy.verifier.sandbox.ladder import Opened, opened
from nearpolicy.verifier.workers import WorkerPool

OnEvent = Callable[..., None]
"""Called as ``on_event("verifier", "verify", **numbers)`` when a rollout has been judged, ``seconds`` after it came.

The numbers: ``sample``, ``seconds``, ``queue_s`` (longest wait of one of its sources for a worker), and how many of its
sources ``scored``, ``abstained`` and ``failed``. `nearpolicy.roles.Telemetry.event` is such a callable.
"""


def _ignore(role: str, kind: str, **numbers: float) -> None:
    """The listener of those who do not listen."""


class VerifierService:
    """The verifier of a run. `start` it before anything heavy is loaded, and `close` it."""

    def __init__(
        self,
        tasks: Mapping[str, Sequence[RewardConfig]],
        config: VerifierConfig,
        *,
        at_hand: Mapping[str, Callable[..., Any]] | None = None,
        on_event: OnEvent = _ignore,
    ) -> None:
        """``at_hand``: user functions that need no loading, by the path under which a reward names them.

        Raises `ConfigError` for sources that contradict each other and `RewardFunctionError` for a function that fits
        no shape.
        """
        self._config = config
        self._on_event = on_event
        self._pool: WorkerPool | None = None
        self._sandbox: Opened | None = None
        self._grader: CodeGrader | None = None
        self._learned = LearnedScorers(on_event)
        self._cache = VerdictCache(config.cache)
        self._failures = FailureRate()
        self._flips = FlipRates()
        self._tasks = tasks
        self._sources: dict[str, list[_Source]] = {}
        for task, task_rewards in tasks.items():
            try:
                check_together(task_rewards)
            except ValueError as error:
                raise ConfigError(f"task {task!r}: {error}") from None
            self._sources[task] = [_source(task, reward, config, at_hand or {}) for reward in task_rewards]

    def flip_rates(self) -> dict[str, float]:
        """``verifier/<source>/flip_rate`` of what has been judged twice so far."""
        return self._flips.rates()

    @property
    def isolation(self) -> Opened | None:
        """How programs are kept in, once started; None if no reward runs any."""
        return self._sandbox

    async def start(self) -> None:
        """Start the processes that the rewards need, perhaps none; returns when they are ready.

        Raises `VerifierError` if programs are to be run and cannot be isolated as asked, and `ConfigError` if a judge
        cannot be asked or a reward model not be loaded.
        """
        config = self._config
        sources = [source for each in self._sources.values() for source in each]
        if any(isinstance(source.scorer, CodeReward) for source in sources):
            self._sandbox = await opened(
                config.isolation,
                workers=config.workers,
                packages=config.packages,
                allow_unisolated=config.allow_unisolated,
                url=config.sandbox_url,
            )
            self._grader = CodeGrader.of(self._sandbox, config)
        learned = {source.key: source.scorer for source in sources if isinstance(source.scorer, LearnedReward)}
        await self._learned.start(learned)
        scorers = {source.key: _packed(source.scorer) for source in sources if source.in_worker}
        if scorers:
            pool = WorkerPool(scorers, workers=config.workers, timeout_s=config.timeout_s, retries=config.retries)
            await pool.start()
            self._pool = pool

    async def close(self) -> None:
        """Kill the worker processes; calls under way end as failed verdicts. What cannot be closed keeps none of the
        others from it."""
        async with contextlib.AsyncExitStack() as ending:
            ending.push_async_callback(self._learned.close)
            if self._sandbox is not None:
                ending.push_async_callback(self._sandbox.close)
            if self._pool is not None:
                ending.push_async_callback(self._pool.close)

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        """One verdict per reward source of the prompt's task, behind a gate with the part `combining.GATED`.

        Raises `VerifierError` if programs can be run ever more seldom.
        """
        sources = self._sources.get(prompt.task)
        if sources is None:
            known = ", ".join(map(repr, self._sources))
            raise NearpolicyError(f"the verifier knows no task {prompt.task!r}, only {known}")
        not_here = self._pool is None and any(source.in_worker for source in sources)
        if not_here or (self._grader is None and any(isinstance(s.scorer, CodeReward) for s in sources)):
            raise NearpolicyError("the verifier has not been started: await `start()` before `score`")
        if not reads_tokens(self._tasks[prompt.task]):
            rollout = replace(rollout, segments=())  # its tokens may lie elsewhere
        sample = Sample.of(prompt, rollout)
        asked = time.perf_counter()
        judged = await asyncio.gather(*(self._judged(source, sample) for source in sources))
        verdicts = {source.name: verdict for source, (verdict, _) in zip(sources, judged, strict=True)}
        self._on_event(
            "verifier",
            "verify",
            admission=admission,
            sample=rollout.sample,
            seconds=time.perf_counter() - asked,
            queue_s=max((queue_s for _, queue_s in judged), default=0.0),
            **{o.value: sum(verdict.outcome is o for verdict in verdicts.values()) for o in Outcome},
        )
        return with_gates_shown(verdicts, self._tasks[prompt.task])

    async def _judged(self, source: _Source, sample: Sample) -> tuple[Verdict, float]:
        """The verdict of one source, and the seconds it waited for a worker."""
        asked = began = time.perf_counter()
        is_new = False

        def started() -> None:
            nonlocal began
            began = time.perf_counter()

        async def ask() -> Verdict:
            nonlocal is_new
            is_new = True
            return await self._bounded(source, sample, started)

        verdict = await self._cache.verdict(source.key if source.deterministic else None, sample, ask)
        if isinstance(source.scorer, CodeReward | LearnedReward):
            self._failures.count(source.key, verdict, source.scorer)
        if is_new and source.may_flip and is_chosen(source.key, sample, self._config.recheck):
            self._flips.count(source.name, verdict, await self._bounded(source, sample, lambda: None))
        return verdict, began - asked

    async def _bounded(self, source: _Source, sample: Sample, started: Callable[[], None]) -> Verdict:
        """Within the deadline, waiting included."""
        limit = self._config.deadline_s
        try:
            async with asyncio.timeout(limit):
                return await self._fresh(source, sample, started)
        except TimeoutError:
            return Verdict.failed(f"no verdict within verifier.deadline_s ({limit:g} s), waiting included")

    async def _fresh(self, source: _Source, sample: Sample, started: Callable[[], None]) -> Verdict:
        if isinstance(source.scorer, CodeReward):
            assert self._grader is not None
            return await self._grader.score(source.scorer, sample)
        if isinstance(source.scorer, LearnedReward):
            return await self._learned.score(source.key, sample)
        if not source.in_worker:
            begin = time.perf_counter()
            verdict = await _judged_here(source.scorer, sample)
            return replace(verdict, seconds=time.perf_counter() - begin)
        assert self._pool is not None
        return await self._pool.score(source.key, sample, _controls(source.scorer, sample), started)


class FlipRates:
    """How often a second look at a completion gives another score; failures say nothing about that."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def count(self, source: str, first: Verdict, second: Verdict) -> None:
        if first.outcome is Outcome.SCORED and second.outcome is Outcome.SCORED:
            counts = self._counts.setdefault(source, [0, 0])
            counts[0] += 1
            counts[1] += first.value != second.value

    def rates(self) -> dict[str, float]:
        return {f"verifier/{source}/flip_rate": flips / looks for source, (looks, flips) in self._counts.items()}


_ADVICE: Mapping[type, str] = {
    CodeReward: "`nearpolicy doctor` examines the sandbox, `nearpolicy verify code` tries a program",
    JudgeReward: "see to the judge, then `nearpolicy calibrate` asks it about answers of yours",
    RubricReward: "see to its judge, or to the columns that its items read; `nearpolicy check` looks at the rows",
    RewardModelReward: "see to the model and its limits, then `nearpolicy calibrate` asks it about answers of yours",
}
"""Where to look when a source fails too often."""


class FailureRate:
    """Ends a run whose sandbox or judge has broken: what fails is left out, and too much left out is not training any
    more. A policy must not get used to a machine on which programs cannot be run."""

    WINDOW = 1000
    """Verdicts of one source that are looked back upon."""
    LIMIT = 0.05
    """Of the window, whether it is full or not: a few failures at the start say nothing."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[bool]] = {}

    def count(self, key: str, verdict: Verdict, reward: CodeReward | LearnedReward) -> None:
        """Raises `VerifierError` beyond `LIMIT`."""
        recent = self._recent.setdefault(key, deque(maxlen=self.WINDOW))
        recent.append(verdict.outcome is Outcome.FAILED)
        failed = sum(recent) if recent[-1] else 0
        if failed > self.LIMIT * self.WINDOW:
            task, _, source = key.partition("/")
            raise VerifierError(
                f"reward {source!r} of task {task!r} failed on {failed} of its last {len(recent)} completions, "
                f"the last: {verdict.reason}. Nothing is known about those, so nothing can be learned from them; "
                f"{_ADVICE[type(reward)]}"
            )


async def judged_once(
    reward: RewardConfig, completion: str, columns: Mapping[str, Any], config: VerifierConfig | None = None
) -> Verdict:
    """The verdict of one reward on one completion, with the limits of a run: for commands, and for a look by hand.

    ``columns``: the row, with the right answer where the reward reads it (``{"answer": "1/2"}``).
    """
    service = VerifierService({"once": [reward]}, config or VerifierConfig())
    try:
        await service.start()
        prompt = Prompt(id="once", task="once", text="", columns=columns)
        rollout = Rollout(sample=0, segments=(), text=completion, numerics="exact")
        return (await service.score(prompt, rollout))[reward.source]
    finally:
        await service.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One reward source of one task, ready for use."""

    name: str
    key: str
    """Name across all tasks."""
    scorer: UserFunction | BuiltIn | CodeReward | LearnedReward
    in_worker: bool
    deterministic: bool

    @property
    def may_flip(self) -> bool:
        """Whether a second look could differ, and costs nothing but time: a function of a user may do anything."""
        return self.deterministic and (self.in_worker or isinstance(self.scorer, CodeReward))


def _source(
    task: str, reward: RewardConfig, config: VerifierConfig, at_hand: Mapping[str, Callable[..., Any]]
) -> _Source:
    scorer: UserFunction | BuiltIn | CodeReward | LearnedReward
    if isinstance(reward, FunctionReward):
        scorer, in_worker = functions.prepare(reward, at_hand), not config.in_process
    elif isinstance(reward, CodeReward):
        scorer, in_worker = reward, False
        if reward.trust == "together" and not config.allow_weak_trust:
            raise ConfigError(
                f"task {task!r}, reward {reward.source!r}: trust is together, where a program shares a process with "
                f"its tests and can cheat them; use split, or set verifier.allow_weak_trust: true"
            )
    elif isinstance(reward, LearnedReward):
        scorer, in_worker = reward, False
    else:
        scorer, in_worker = reward, not runs_inline(reward)
    return _Source(
        name=reward.source,
        key=f"{task}/{reward.source}",
        scorer=scorer,
        in_worker=in_worker,
        deterministic=is_deterministic(reward),
    )


def _packed(scorer: UserFunction | BuiltIn) -> bytes:
    return functions.packed(scorer) if isinstance(scorer, UserFunction) else pickle.dumps(scorer)


async def _judged_here(scorer: UserFunction | BuiltIn, sample: Sample) -> Verdict:
    try:
        if not isinstance(scorer, UserFunction):
            return rewards.score(scorer, sample)
        results = [await r if inspect.isawaitable(r) else r for r in scorer.begin([sample])]
        [verdict] = scorer.verdicts(results, 1)
        return verdict
    except RewardFunctionError:
        raise
    except (Exception, SystemExit) as error:
        return functions.failure(error, "the function" if isinstance(scorer, UserFunction) else scorer.kind)


def _controls(scorer: UserFunction | BuiltIn, sample: Sample) -> tuple[Sample, ...]:
    """The samples to check the place with after a limit; none if the row has no answer, which its verdict will say."""
    if isinstance(scorer, UserFunction):
        return ()
    try:
        return tuple(replace(sample, text=text) for text in rewards.controls(scorer, sample.columns))
    except rewards.RowError:
        return ()
