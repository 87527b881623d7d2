"""The verdict of a reward model: its score of the whole completion, or one value made of the scores of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import RewardModelReward
from nearpolicy.verifier.learned.model_server import ModelFault, ModelServer
from nearpolicy.verifier.rewards import Sample

_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
    "last": lambda values: values[-1],
    "sum": math.fsum,
    "product": math.prod,
}


class RewardModel:
    """Scores completions by a model that a server holds."""

    def __init__(self, reward: RewardModelReward, server: ModelServer) -> None:
        self._reward = reward
        self._server = server

    async def score(self, sample: Sample) -> Verdict:
        """By step, the parts `steps`, `min`, `mean` and `last`, and the array `step_scores`."""
        try:
            values = await self._server.ask({"prompt": _prompt(sample), "completion": sample.text})
        except ModelFault as fault:
            return Verdict.failed(str(fault))
        if self._reward.form == "whole":
            return Verdict.scored(values[0])
        if not values:
            return Verdict.failed("no step is left of the completion within max_tokens")
        parts = {name: float(_AGGREGATES[name](values)) for name in ("min", "mean", "last")}
        return Verdict(
            outcome=Outcome.SCORED,
            value=float(_AGGREGATES[self._reward.aggregate](values)),
            parts={"steps": float(len(values)), **parts},
            arrays={"step_scores": np.asarray(values, dtype=np.float32)},
        )


def _prompt(sample: Sample) -> str | list[dict[str, str]]:
    """Text, or messages without all but role and content."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return [{"role": str(m.get("role", "user")), "content": str(m.get("content", ""))} for m in sample.prompt]


_OF_THE_VERDICT = {"name", "weight", "kind", "aggregate", "window_s", "timeout_s", "requires"}


def reward_model_setup(reward: RewardModelReward) -> dict[str, Any]:
    """What the model's process needs to know: all that changes a score, and nothing that does not."""
    return {"scorer": "head", **reward.model_dump(mode="json", exclude=_OF_THE_VERDICT)}


def judge_setup(path: str) -> dict[str, Any]:
    """The same for a judge that is computed here."""
    return {
        "scorer": "choices",
        "path": path,
        "dtype": "float32",
        "device": "cpu",
        "max_tokens": None,
        "batch_tokens": 16_384,
    }
