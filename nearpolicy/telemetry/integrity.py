"""Whether rewards still mean what they should: figures of each step, and alarms on any metric.

batch -> duplicates, length against reward          (in the line of the step)
lines -> a jump of the reward against its own past  -> monitors -> alarms
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearpolicy.records import Batch
from nearpolicy.telemetry.config import MonitorConfig
from nearpolicy.telemetry.suspicion import correlation, normalised

PAST = 10
"""Steps that a jump is measured against."""
_LEAST_PAST = 5
_LEAST_SPREAD = 0.01


def integrity_metrics(batch: Batch) -> dict[str, float]:
    """What a policy that games its reward often shows first."""
    texts: dict[str, set[int]] = {}
    lengths, rewards = [], []
    for group in batch.groups:
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            texts.setdefault(normalised(rollout.text), set()).add(group.index)
            if reward is not None:
                lengths.append(rollout.num_sampled)
                rewards.append(reward)
    total = sum(len(group.rollouts) for group in batch.groups)
    shared = sum(len(texts[normalised(rollout.text)]) > 1 for group in batch.groups for rollout in group.rollouts)
    found = {"integrity/duplicate_share": shared / total} if total and len(batch.groups) > 1 else {}
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
    """The first of the steps that raised it."""

    @property
    def severity(self) -> str:
        return self.monitor.severity

    @property
    def action(self) -> str:
        return self.monitor.action


class Monitors:
    """Looks at the line of every step."""

    def __init__(self, monitors: Sequence[MonitorConfig]) -> None:
        self._monitors = list(monitors)
        self._in_a_row = [0] * len(self._monitors)
        """Steps that speak for a change of what is raised."""
        self._raised = [False] * len(self._monitors)
        self._first = [0] * len(self._monitors)
        """The first of those steps."""
        self._past: deque[float] = deque(maxlen=PAST)
        self.alarms: list[Alarm] = []

    def jump(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean reward against that of the steps before, in their standard deviations; nothing at first."""
        reward = metrics.get("reward/mean")
        if reward is None:
            return {}
        past = list(self._past)
        self._past.append(reward)
        if len(past) < _LEAST_PAST:
            return {}
        spread = max(statistics.pstdev(past), _LEAST_SPREAD)
        return {"integrity/reward_jump": (reward - statistics.fmean(past)) / spread}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that begin with this step."""
        begun = []
        for place, monitor in enumerate(self._monitors):
            value = metrics.get(monitor.metric)
            if value is None:
                continue
            raised = self._raised[place]
            bound = _beyond(monitor, value, cleared_at=monitor.clear if raised else None)
            beyond = bound is not None
            self._in_a_row[place] = self._in_a_row[place] + 1 if beyond != raised else 0
            if self._in_a_row[place] == 1:
                self._first[place] = step
            if self._in_a_row[place] < monitor.steps:
                continue
            self._raised[place], self._in_a_row[place] = beyond, 0
            if beyond:
                lasting = f" for {monitor.steps} steps" if monitor.steps > 1 else ""
                text = f"step {step}: {monitor.metric} is {value:.4g}, {bound}{lasting}"
                begun.append(
                    Alarm(
                        step=step,
                        metric=monitor.metric,
                        value=value,
                        text=text,
                        monitor=monitor,
                        first=self._first[place],
                    )
                )
        self.alarms += begun
        return begun

    def recall(self, lines: Iterable[tuple[int, Mapping[str, float]]]) -> list[Alarm]:
        """Stand as after these steps, which were looked at before, and after no others; the alarms of the last one."""
        self._in_a_row, self._raised = [0] * len(self._monitors), [False] * len(self._monitors)
        self._past.clear()
        known, begun = list(self.alarms), []
        for step, metrics in lines:
            self.jump(metrics)
            begun = self.observe(step, metrics)
        self.alarms = known
        return begun

    @property
    def lowers_staleness(self) -> bool:
        """Whether an alarm lasts whose action that is."""
        return any(
            raised and monitor.action == "lower_staleness"
            for raised, monitor in zip(self._raised, self._monitors, strict=True)
        )


def _beyond(monitor: MonitorConfig, value: float, cleared_at: float | None) -> str | None:
    """Which bound a value is beyond; NaN is beyond any."""
    above = monitor.above if cleared_at is None or monitor.above is None else cleared_at
    below = monitor.below if cleared_at is None or monitor.below is None else cleared_at
    if above is not None and not value <= above:
        return f"above {monitor.above:g}"
    if below is not None and not value >= below:
        return f"below {monitor.below:g}"
    return None
