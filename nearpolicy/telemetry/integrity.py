"""Whether rewards still mean what they should: figures of each step, and alarms on any metric.

batch -> duplicates, length against reward          (in the line of the step)
lines -> a jump of the reward against its own past  -> monitors -> alarms
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearpolicy.records import Batch
from nearpolicy.store.metric_lines import is_of_evaluation
from nearpolicy.telemetry.config import MonitorConfig
from nearpolicy.telemetry.metrics import pattern
from nearpolicy.telemetry.suspicion import correlation, normalised

PAST = 10
"""Steps that a jump is measured against."""
_LEAST_PAST = 5
_LEAST_SPREAD = 0.01


def integrity_metrics(batch: Batch) -> dict[str, float]:
    """What a policy that games its reward often shows first."""
    groups_of: dict[str, set[int]] = {}
    texts, lengths, rewards = [], [], []
    for group in batch.groups:
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            texts.append(normalised(rollout.text))
            groups_of.setdefault(texts[-1], set()).add(group.index)
            if reward is not None:
                lengths.append(rollout.num_sampled)
                rewards.append(reward)
    shared = sum(len(groups_of[text]) > 1 for text in texts)
    found = {"integrity/duplicate_share": shared / len(texts)} if texts and len(batch.groups) > 1 else {}
    slope = correlation(lengths, rewards)
    return found | ({} if slope is None else {"integrity/reward_length_correlation": slope})


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What a monitor saw."""

    step: int
    metric: str
    value: float
    text: str
    monitor: MonitorConfig
    first: int
    """The first of the steps that raised it, or of the evaluations by the version of their weights."""

    @property
    def severity(self) -> str:
        return self.monitor.severity

    @property
    def action(self) -> str:
        return self.monitor.action

    @property
    def good(self) -> int:
        """The newest version before it."""
        return self.first - is_of_evaluation(self.metric)


class Monitors:
    """Looks at the line of every step."""

    def __init__(self, monitors: Sequence[MonitorConfig]) -> None:
        self._monitors = [(monitor, pattern(monitor.metric)) for monitor in monitors]
        self._in_a_row: dict[tuple[int, str], int] = {}
        """By monitor and metric: steps that speak for a change of what is raised."""
        self._first: dict[tuple[int, str], int] = {}
        """The first of those steps."""
        self._raised: set[tuple[int, str]] = set()
        self._since: dict[int, int] = {}
        """By monitor: the first step that it looks at, if that is not the first one."""
        self._past: deque[float] = deque(maxlen=PAST)
        self.alarms: list[Alarm] = []

    def jump(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean reward against that of the steps before, in their standard deviations; nothing at first."""
        reward = metrics.get("reward/mean")
        if reward is None or not math.isfinite(reward):
            return {}
        past = list(self._past)
        self._past.append(reward)
        if len(past) < _LEAST_PAST:
            return {}
        spread = max(statistics.pstdev(past), _LEAST_SPREAD)
        return {"integrity/reward_jump": (reward - statistics.fmean(past)) / spread}

    def begin(self, monitors: Container[MonitorConfig], step: int) -> None:
        """These look at lines from this step on."""
        self._since |= {place: step for place, (monitor, _) in enumerate(self._monitors) if monitor in monitors}

    def recall(self, lines: Iterable[tuple[int, Mapping[str, float]]]) -> list[Alarm]:
        """Stand as after these lines, by step, which were looked at before, and after no others; the alarms that they
        had raised."""
        for seen in (self._in_a_row, self._first, self._raised, self._past):
            seen.clear()
        known, self.alarms = self.alarms, []
        for step, metrics in lines:
            self.jump(metrics)
            self.observe(step, metrics)
        begun, self.alarms = self.alarms, known
        return begun

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that begin with this step."""
        begun = []
        for place, (monitor, names) in enumerate(self._monitors):
            if step < self._since.get(place, 0):
                continue
            for metric in sorted(name for name in metrics if names.fullmatch(name)):
                alarm = self._look(place, monitor, step, metric, metrics[metric])
                begun += [alarm] if alarm else []
        self.alarms += begun
        return begun

    def _look(self, place: int, monitor: MonitorConfig, step: int, metric: str, value: float) -> Alarm | None:
        key = place, metric
        raised = key in self._raised
        bound = _beyond(monitor, value, cleared_at=monitor.clear if raised else None)
        beyond = bound is not None
        self._in_a_row[key] = self._in_a_row.get(key, 0) + 1 if beyond != raised else 0
        if self._in_a_row[key] == 1:
            self._first[key] = step
        if self._in_a_row[key] < monitor.steps:
            return None
        self._in_a_row[key] = 0
        if not beyond:
            self._raised.discard(key)
            return None
        self._raised.add(key)
        lasting = f" for {monitor.steps} {_lines_of(metric)}" if monitor.steps > 1 else ""
        text = f"step {step}: {metric} is {value:.4g}, {bound}{lasting}"
        return Alarm(step=step, metric=metric, value=value, text=text, monitor=monitor, first=self._first[key])

    @property
    def lowers_staleness(self) -> bool:
        """Whether an alarm lasts whose action that is."""
        return any(self._monitors[place][0].action == "lower_staleness" for place, _ in self._raised)


def _beyond(monitor: MonitorConfig, value: float, cleared_at: float | None) -> str | None:
    """Which bound a value is beyond; NaN is beyond any."""
    above = monitor.above if cleared_at is None or monitor.above is None else cleared_at
    below = monitor.below if cleared_at is None or monitor.below is None else cleared_at
    if above is not None and not value <= above:
        return f"above {monitor.above:g}"
    if below is not None and not value >= below:
        return f"below {monitor.below:g}"
    return None


def _lines_of(metric: str) -> str:
    return "evaluations" if is_of_evaluation(metric) else "steps"
