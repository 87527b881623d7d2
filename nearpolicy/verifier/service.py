"""Every reward source of a task judges every rollout; a failure of any of them is a verdict, never a number.

    score(prompt, rollout) -> exact_match, number            here, at once
                           -> math_verify, regex, ...        a worker process (`workers`)
                           -> function                       a worker process, or here with `verifier.in_process`

Verdicts belong to the call that asked for them, so the order in which scoring ends changes nothing. `score` raises only
for what must end the run: a user function that breaks its contract, a prompt of an unknown task, a use before `start`.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearpolicy.errors import ConfigError, NearpolicyError
from nearpolicy.records import Outcome, Prompt, Rollout, Verdict
from nearpolicy.verifier import functions, rewards
from nearpolicy.verifier.config import FunctionReward, RewardConfig, VerifierConfig, check_names
from nearpolicy.verifier.functions import RewardFunctionError, UserFunction
from nearpolicy.verifier.rewards import BuiltIn, Sample, runs_inline
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

        Raises `ConfigError` for sources that share a name and `RewardFunctionError` for a function that fits no shape.
        """
        self._config = config
        self._on_event = on_event
        self._pool: WorkerPool | None = None
        self._sources: dict[str, list[_Source]] = {}
        for task, task_rewards in tasks.items():
            try:
                check_names(task_rewards)
            except ValueError as error:
                raise ConfigError(f"task {task!r}: {error}") from None
            self._sources[task] = [_source(task, reward, config.in_process, at_hand or {}) for reward in task_rewards]

    async def start(self) -> None:
        """Start the worker processes that the rewards need, perhaps none; returns when they are ready."""
        scorers = {s.key: _packed(s.scorer) for sources in self._sources.values() for s in sources if s.in_worker}
        if scorers:
            config = self._config
            pool = WorkerPool(scorers, workers=config.workers, timeout_s=config.timeout_s, retries=config.retries)
            await pool.start()
            self._pool = pool

    async def close(self) -> None:
        """Kill the worker processes; calls under way end as failed verdicts."""
        if self._pool is not None:
            await self._pool.close()

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        """One verdict per reward source of the prompt's task."""
        sources = self._sources.get(prompt.task)
        if sources is None:
            known = ", ".join(map(repr, self._sources))
            raise NearpolicyError(f"the verifier knows no task {prompt.task!r}, only {known}")
        if self._pool is None and any(source.in_worker for source in sources):
            raise NearpolicyError("the verifier has not been started: await `start()` before `score`")
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
        return verdicts

    async def _judged(self, source: _Source, sample: Sample) -> tuple[Verdict, float]:
        """The verdict of one source, and the seconds it waited for a worker."""
        asked = time.perf_counter()
        if not source.in_worker:
            verdict = await _judged_here(source.scorer, sample)
            return replace(verdict, seconds=time.perf_counter() - asked), 0.0
        began = asked

        def started() -> None:
            nonlocal began
            began = time.perf_counter()

        controls = _controls(source.scorer, sample)
        return await self._pool.score(source.key, sample, controls, started), began - asked


async def judged_once(
    reward: RewardConfig, completion: str, columns: Mapping[str, Any], config: VerifierConfig | None = None
) -> Verdict:
    """The verdict of one reward on one completion, with the limits of a run: for commands, and for a look by hand.

    ``columns``: the row, with the right answer where the reward reads it (``{"answer": "1/2"}``).
    """
    service = VerifierService({"once": [reward]}, config or VerifierConfig())
    await service.start()
    try:
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
    scorer: UserFunction | BuiltIn
    in_worker: bool


def _source(task: str, reward: RewardConfig, in_process: bool, at_hand: Mapping[str, Callable[..., Any]]) -> _Source:
    if isinstance(reward, FunctionReward):
        scorer, in_worker = functions.prepare(reward, at_hand), not in_process
    else:
        scorer, in_worker = reward, not runs_inline(reward)
    return _Source(name=reward.source, key=f"{task}/{reward.source}", scorer=scorer, in_worker=in_worker)


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


def weighted_reward(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> float | None:
    """The reward of one rollout: the weighted sum of what was scored; None if nothing was, or if any source failed.

    Weights 1.0 and 0.5: [1.0, abstained] gives 1.0, [abstained, 0.4] gives 0.2, [abstained, abstained] gives None. With
    a failed source the sum is unknown, not smaller: a failure never yields a number.
    """
    if any(verdict.outcome is Outcome.FAILED for verdict in verdicts.values()):
        return None
    scored = [weights[name] * v.value for name, v in verdicts.items() if v.outcome is Outcome.SCORED]
    return sum(scored) if scored else None
