"""A few tokens sampled under the weights that engine and learner share, and what the learner says of them.

    prompts -> engine, pinned to a version -> rows with its log-probabilities -> learner, same weights -> the difference

Whatever is sampled here is compared and thrown away: it is no rollout, has no place in the ledger, and its random
numbers are of a purpose of their own, so that nobody else's change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from nearpolicy.generator.scheduler import PROBE
from nearpolicy.learner.passes import Passes
from nearpolicy.models.policy import PolicyModel
from nearpolicy.objectives.diagnostics import distance, log_ratios
from nearpolicy.records import Finish, Row
from nearpolicy.roles import Generator, Request, Sampling

TOKENS_EACH = 8
"""Of one completion."""


class Holder(Protocol):
    """Has what says how likely a token is: a `PolicyLearner`, or a model alone."""

    policy: PolicyModel
    passes: Passes
    same_support: bool


class HoldsPolicy(Protocol):
    """A `LearnerPlace`, or another place of a `Holder`."""

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(holder, *arguments)`` there."""
        ...


@dataclass(frozen=True, slots=True)
class Scoring:
    """Asks what a learner says of tokens."""

    learner: HoldsPolicy

    async def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """[T] per row."""
        return await self.learner.call(logprobs_of, rows)


def logprobs_of(holder: Holder, rows: Sequence[Row]) -> list[np.ndarray]:
    """[T] per row."""
    return holder.passes.logprobs(holder.policy, rows, range(len(rows)), same_support=holder.same_support)


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What both say of the same tokens, [N] each."""

    rows: tuple[Row, ...]
    engine: np.ndarray
    learner: np.ndarray

    @property
    def metrics(self) -> Mapping[str, float]:
        found = distance("probe", log_ratios(self.learner, self.engine))
        return {**found, "mismatch/probe_tokens": float(len(self.engine))} if found else {}

    @property
    def gap(self) -> float:
        """Mean absolute difference, in nats; 0 over no token."""
        return mean_gap(self.engine, self.learner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Asks both sides."""

    generator: Generator
    scoring: Scoring
    sampling: Sampling
    """Of the run: what is compared goes the way of its rollouts."""
    seed: int

    async def measure(
        self, prompts: Sequence[np.ndarray], version: int, *, n: int, tokens: int = TOKENS_EACH, name: str = PROBE
    ) -> Probed:
        """``n`` completions of up to ``tokens`` tokens for each prompt. The learner must hold ``version`` too.
        ``name``: of the requests; those that run at a time have different ones."""
        rows = await self.rows(prompts, version, n=n, tokens=tokens, name=name)
        return Probed(rows, flat([row.segment.behavior_logprobs for row in rows]), flat(await self.score(rows)))

    async def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return await self.scoring.logprobs(rows) if rows else []

    async def rows(
        self, prompts: Sequence[np.ndarray], version: int, *, n: int, tokens: int, name: str
    ) -> tuple[Row, ...]:
        """In the order of prompts and samples; without completions that failed or are empty."""
        sampling = replace(self.sampling, max_tokens=min(tokens, self.sampling.max_tokens))
        requests = [
            Request(
                id=f"{name}-{version}-{place}",
                token_ids=prompt,
                sampling=sampling,
                n=n,
                seed=self.seed,
                admission=place,
                turn=version,
                purpose=PROBE,
                version=version,
            )
            for place, prompt in enumerate(prompts)
        ]
        found = await asyncio.gather(*(self._completed(place, request) for place, request in enumerate(requests)))
        return tuple(row for rows in found for row in sorted(rows, key=lambda row: row.sample))

    async def _completed(self, place: int, request: Request) -> list[Row]:
        rows = []
        async for completion in self.generator.submit(request):
            if completion.finish in (Finish.STOP, Finish.LENGTH) and len(completion.token_ids):
                [segment] = completion.fetched().rollout(request.token_ids, "", "").segments
                nothing = np.zeros(len(segment.token_ids), dtype=np.float32)
                row = Row(
                    group=place, sample=completion.sample, segment=segment, trained=segment.mask, advantages=nothing
                )
                rows.append(row)
        return rows


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.float32), *arrays]).astype(np.float64)


def mean_gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).mean()) if len(ours) else 0.0
