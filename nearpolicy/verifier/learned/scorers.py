"""Learned rewards in the service: what they need is opened at the start, shared, and closed.

    start: reward -> endpoint (one for equal settings) or model process (one for equal settings) -> probed or loaded
    score: key, sample -> verdict

What is missing is refused here, before the first completion: a key, an endpoint, a model, a head.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nearpolicy.errors import ConfigError, NearpolicyError
from nearpolicy.records import Verdict
from nearpolicy.verifier import functions
from nearpolicy.verifier.config import LearnedReward, RewardModelReward, RubricReward
from nearpolicy.verifier.learned.config import JudgingConfig
from nearpolicy.verifier.learned.endpoint import Endpoint, missing_key
from nearpolicy.verifier.learned.judge import Judge, LocalPanel, Panel, RemotePanel
from nearpolicy.verifier.learned.model_server import ModelServer
from nearpolicy.verifier.learned.reward_model import RewardModel, judge_setup, reward_model_setup
from nearpolicy.verifier.learned.rubric import Rubric
from nearpolicy.verifier.rewards import Sample

_JUDGE_BATCHING = {"batch_size": 4, "window_s": 0.01, "timeout_s": 600.0}
"""Of a judge that is computed here: a question has a thousand tokens, which can take seconds."""


class _Scorer(Protocol):
    async def score(self, sample: Sample) -> Verdict: ...


class LearnedScorers:
    """The learned rewards of a run by their keys."""

    def __init__(self, on_event: Callable[..., None]) -> None:
        self._on_event = on_event
        self._endpoints: dict[str, Endpoint] = {}
        self._servers: dict[str, ModelServer] = {}
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
        async with contextlib.AsyncExitStack() as ending:
            for each in (*self._servers.values(), *self._endpoints.values()):
                ending.push_async_callback(each.close)

    async def score(self, key: str, sample: Sample) -> Verdict:
        if key not in self._scorers:
            raise NearpolicyError("the verifier has not been started: await `start()` before `score`")
        asked = time.perf_counter()
        try:
            verdict = await self._scorers[key].score(sample)
        except Exception as error:  # a mistake of ours is no score either
            verdict = functions.failure(error, "the scorer")
        for name, endpoint in self._endpoints.items():
            if endpoint.purse.is_spent and name not in self._told:
                self._told.add(name)
                self._on_event("verifier", "budget", spent=endpoint.purse.spent, budget=endpoint.config.budget)
        return replace(verdict, seconds=time.perf_counter() - asked)

    async def _scorer(self, reward: LearnedReward) -> _Scorer:
        if isinstance(reward, RubricReward):
            return Rubric(reward, None if reward.judge is None else await self._panel(reward.judge))
        if isinstance(reward, RewardModelReward):
            return RewardModel(reward, await self._server(reward_model_setup(reward), reward))
        return Judge(reward, await self._panel(reward))

    async def _panel(self, config: JudgingConfig) -> Panel:
        if config.endpoint is None:
            setups = {path: judge_setup(path) for path in config.models}
            return LocalPanel(config, {path: await self._server(setup) for path, setup in setups.items()})
        name = config.endpoint.model_dump_json()
        if name not in self._endpoints:
            endpoint = Endpoint.of(config.endpoint)
            endpoint.open()
            self._endpoints[name] = endpoint
        panel = RemotePanel(config, self._endpoints[name])
        await panel.probe()
        return panel

    async def _server(self, setup: Mapping[str, Any], reward: RewardModelReward | None = None) -> ModelServer:
        batching = {key: getattr(reward, key, default) for key, default in _JUDGE_BATCHING.items()}
        name = json.dumps([setup, batching], sort_keys=True)
        if name not in self._servers:
            server = ModelServer(setup, name=f"the model {setup['path']!r}", **batching)
            await server.start()
            self._servers[name] = server
        return self._servers[name]


def problem_of(reward: LearnedReward) -> str | None:
    """What can be told to be missing without asking anybody; None if nothing."""
    if isinstance(reward, RewardModelReward):
        return _no_folder([reward.path])
    judging = reward.judge if isinstance(reward, RubricReward) else reward
    if judging is None:
        return None
    return _no_folder(judging.models) if judging.endpoint is None else missing_key(judging.endpoint)


def _no_folder(paths: Sequence[str]) -> str | None:
    """A path that is certainly meant as one: a hub id has one slash at most, and none of these beginnings."""
    for path in paths:
        looks_local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
        if looks_local and not Path(path).expanduser().is_dir():
            return f"there is no model folder {path}; correct the path"
    return None
