"""A run against its own past: figures that one step alone cannot show.

    line of a step, line of an evaluation -> Trends.of -> further metrics of that line

- norms and lengths against the steps just before (`Ratio`)
- entropy against the beginning (`Ratio`)
- reward against the square root of the KL to the reference (`RewardAgainstKl`)
- reward in training against held-out answers (`HeldOut`)

A value that is not finite says nothing and is not remembered. A run that goes on is told the lines it has logged
before, and then says what it would have said.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BEGINNING = 5
"""Steps that are a run's beginning; nothing is said during them."""
NEAR = 10
"""Steps that a mean of now is over."""
PAST = 20
"""Steps that a ratio compares with."""
_LEAST_SPREAD = 0.01
_LEAST_DISTANCE = 0.05
"""Square root of a KL, below which nothing is divided by it."""


@dataclass(slots=True)
class Ratio:
    """A metric against the median of the steps before, or against the mean of the run's beginning."""

    metric: str
    name: str
    to_beginning: bool = False
    past: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.past = deque(maxlen=PAST)

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        value = _finite(metrics, self.metric)
        if value is None:
            return {}
        past = list(self.past)
        if not self.to_beginning or len(past) < BEGINNING:
            self.past.append(value)
        if len(past) < BEGINNING:
            return {}
        usual = statistics.fmean(past) if self.to_beginning else statistics.median(past)
        return {self.name: value / usual} if usual > 0 else {}


@dataclass(slots=True)
class _Best:
    reward: float
    spread: float
    distance: float


class RewardAgainstKl:
    """What a policy gets for moving away from its reference.

    Gao et al. 2022 (Scaling Laws for Reward Model Overoptimization): with d the square root of the KL to the initial
    policy, the true reward gained by RL is d (alpha - beta log d). It rises, and then falls while d goes on growing:
    a fall of the reward that comes with more distance is over-optimization, one without is noise or other data. The
    distance of now is a median: one token can make the estimate of a step a hundred times what it is.
    """

    def __init__(self) -> None:
        self._beginning: list[float] = []
        self._rewards: deque[float] = deque(maxlen=NEAR)
        self._distances: deque[float] = deque(maxlen=NEAR)
        self._best: _Best | None = None

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reward, kl = _finite(metrics, "reward/mean"), _finite(metrics, "policy/kl_reference")
        if reward is None or kl is None:
            return {}
        if len(self._beginning) < BEGINNING:
            self._beginning.append(reward)
        self._rewards.append(reward)
        self._distances.append(math.sqrt(max(kl, 0.0)))
        if len(self._rewards) < NEAR:
            return {}
        now = _Best(
            statistics.fmean(self._rewards), statistics.pstdev(self._rewards), statistics.median(self._distances)
        )
        gain = now.reward - statistics.fmean(self._beginning)
        found = {"integrity/reward_per_sqrt_kl": gain / now.distance} if now.distance >= _LEAST_DISTANCE else {}
        return found | {"integrity/reward_fall": self._fall(now)}

    def _fall(self, now: _Best) -> float:
        best = self._best
        if best is None or now.reward >= best.reward:
            self._best = now
            return 0.0
        if now.distance <= best.distance:
            return 0.0
        return (best.reward - now.reward) / max(best.spread, now.spread, _LEAST_SPREAD)


@dataclass(slots=True)
class _Asked:
    """What an evaluation found, and what training had come to by then."""

    accuracy: float
    reward: float


class HeldOut:
    """Rewards in training against answers to held-out questions, which nothing is trained on."""

    def __init__(self, sources: Mapping[str, Iterable[str]]) -> None:
        """``sources``: of each task, by name; the first one decides what a right answer is."""
        self._tasks: dict[str, list[str]] = {}
        for task, names in sources.items():
            for name in names:
                self._tasks.setdefault(name, []).append(task)
        self._gold = {next(iter(names)) for names in sources.values()}
        self._means: dict[str, deque[float]] = {name: deque(maxlen=NEAR) for name in self._tasks}
        self._beginnings: dict[str, list[float]] = {name: [] for name in self._tasks}
        self._first: dict[str, float] = {}
        """By source: accuracy at the first evaluation."""
        self._best: dict[str, _Asked] = {}

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """An evaluation is of the weights before the step of its number, so it counts before that step's rewards."""
        found: dict[str, float] = {}
        for name, tasks in self._tasks.items():
            accuracies = [a for task in tasks if (a := _finite(metrics, f"evaluation/{task}/accuracy")) is not None]
            if accuracies:
                found |= self._evaluated(name, statistics.fmean(accuracies))
        for name in self._tasks:
            if (mean := _finite(metrics, f"reward/{name}/mean")) is not None:
                self._means[name].append(mean)
                if len(self._beginnings[name]) < BEGINNING:
                    self._beginnings[name].append(mean)
        return found

    def _evaluated(self, name: str, accuracy: float) -> dict[str, float]:
        first = self._first.setdefault(name, accuracy)
        means, beginning = self._means[name], self._beginnings[name]
        if len(means) < NEAR:
            return {}
        now, begun = _Asked(accuracy, statistics.fmean(means)), _Asked(first, statistics.fmean(beginning))
        best = self._best.setdefault(name, begun)
        if accuracy >= best.accuracy:
            best = self._best[name] = now
        varies = statistics.pstdev(means)
        fall = best.accuracy - accuracy if now.reward - best.reward > varies else 0.0
        found = {f"integrity/{name}/held_out_fall": fall}
        if name in self._gold and min(means) >= 0 and max(means) <= 1:
            rise = now.reward - begun.reward
            found[f"integrity/{name}/held_out_gap"] = rise - (accuracy - first) if rise > varies else 0.0
        return found


class Trends:
    """All of them."""

    def __init__(self, sources: Mapping[str, Iterable[str]]) -> None:
        """``sources``: the names of the reward sources of each task."""
        self._each: tuple[Ratio | RewardAgainstKl | HeldOut, ...] = (
            Ratio("policy/grad_norm", "policy/grad_norm_ratio"),
            Ratio("completion/length_mean", "completion/length_ratio"),
            Ratio("policy/entropy", "policy/entropy_ratio", to_beginning=True),
            RewardAgainstKl(),
            HeldOut({task: list(names) for task, names in sources.items()}),
        )

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What a line adds to itself; nothing where there is no past yet."""
        return {name: value for each in self._each for name, value in each.of(metrics).items()}

    def restore(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Remember the lines of a run that goes on, by step."""
        for line in lines:
            self.of(line)


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None
