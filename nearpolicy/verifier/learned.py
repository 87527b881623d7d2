"""Learned rewards in the service: what they need is opened at the start, shared, and closed.

    start: reward -> endpoint (one for equal settings) or model process (one for equal settings) -> probed or loaded
    score: key, sample -> verdict

What is missing is refused here, before the first completion: a key, an endpoint, a model, a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from nearpolicy.errors import ConfigError, NearpolicyError
from nearpolicy.records import Verdict
from nearpolicy.verifier.config import JudgeReward, LearnedReward, RubricReward
from nearpolicy.verifier.endpoint import Endpoint, missing_key
from nearpolicy.verifier.judge import Judge, Panel, RemotePanel
from nearpolicy.verifier.learned_config import JudgingConfig
from nearpolicy.verifier.rewards import Sample
from nearpolicy.verifier.rubric import Rubric


class _Scorer(Protocol):
    async def score(self, sample: Sample) -> Verdict: ...


class LearnedScorers:
    """The learned rewards of a run by their keys."""

    def __init__(self, on_event: Callable[..., None]) -> None:
        self._on_event = on_event
        self._endpoints: dict[str, Endpoint] = {}
        self._scorers: dict[str, _Scorer] = {}
        self._told: set[str] = set()
        """Endpoints of which it has been told that their money is used up."""

    async def start(self, rewards: Mapping[str, LearnedReward]) -> None:
        """Returns when all can score; `ConfigError` names the reward and what is wrong with it."""
        for key, reward in rewards.items():
            try:
                self._scorers[key] = await self._scorer(reward)
            except ConfigError as error:
                raise ConfigError(f"reward {key!r}: {error}") from None

    async def close(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()

    async def score(self, key: str, sample: Sample) -> Verdict:
        if key not in self._scorers:
            raise NearpolicyError("the verifier has not been started: await `start()` before `score`")
        asked = time.perf_counter()
        verdict = replace(await self._scorers[key].score(sample), seconds=time.perf_counter() - asked)
        for name, endpoint in self._endpoints.items():
            if endpoint.purse.is_spent and name not in self._told:
                self._told.add(name)
                self._on_event("verifier", "budget", spent=endpoint.purse.spent, budget=endpoint.config.budget)
        return verdict

    async def _scorer(self, reward: LearnedReward) -> _Scorer:
        if isinstance(reward, RubricReward):
            return Rubric(reward, None if reward.judge is None else await self._panel(reward.judge))
        assert isinstance(reward, JudgeReward)
        return Judge(reward, await self._panel(reward))

    async def _panel(self, config: JudgingConfig) -> Panel:
        assert config.endpoint is not None
        name = config.endpoint.model_dump_json()
        if name not in self._endpoints:
            endpoint = Endpoint.of(config.endpoint)
            await endpoint.open()
            self._endpoints[name] = endpoint
        panel = RemotePanel(config, self._endpoints[name])
        await panel.probe()
        return panel


def problem_of(reward: LearnedReward) -> str | None:
    """What can be told to be missing without asking anybody; None if nothing."""
    judging = reward.judge if isinstance(reward, RubricReward) else reward if isinstance(reward, JudgeReward) else None
    if judging is None or judging.endpoint is None:
        return None
    return missing_key(judging.endpoint)
