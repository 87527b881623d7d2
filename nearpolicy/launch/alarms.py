"""What the monitors of a run see, what is said of it, and what is to be done about it.

line of a step or an evaluation -> trends -> monitors -> an event, words -> due: stop, rollback, pause
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nearpolicy.config import RunConfig
from nearpolicy.store.metric_lines import is_of_evaluation
from nearpolicy.store.reader import RunReader
from nearpolicy.telemetry.config import MonitorConfig
from nearpolicy.telemetry.health import HEALTH
from nearpolicy.telemetry.integrity import Alarm, Monitors
from nearpolicy.telemetry.metrics import as_logged
from nearpolicy.telemetry.trends import Trends

_WHAT_FOLLOWS = {
    "stop": "; the run ends",
    "lower_staleness": "; fewer groups are admitted at a time until it is over",
    "rollback": "; the run goes back",
    "pause": "; the run pauses",
}
_ONCE = ("stop", "rollback", "pause")
"""Actions of the moment in which an alarm begins."""


class Alarms:
    """Those of one run."""

    def __init__(self, config: RunConfig, *, tell: Callable[..., None], say: Callable[[str], None]) -> None:
        """``tell`` takes the numbers of an event of kind `alarm`."""
        self._tell, self._say = tell, say
        self._sources = {task.name: [reward.source for reward in task.rewards] for task in config.tasks}
        self._trends = Trends(self._sources)
        self._monitors = Monitors([*config.monitors, *(HEALTH if config.telemetry.health else ())])
        self._due: list[Alarm] = []

    def begin(self, monitors: Sequence[MonitorConfig], step: int) -> None:
        """These are new, and look at lines from this step on."""
        self._monitors.begin(monitors, step)

    def further(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What the past adds to a line."""
        return self._monitors.jump(metrics) | self._trends.of(metrics)

    def observe(self, step: int, metrics: Mapping[str, float], *, acts: bool = True) -> None:
        """``metrics`` of a step, or of an evaluation; before the first step and after the last one there is nothing to
        be done about it."""
        for alarm in self._monitors.observe(step, metrics):
            seen = {"metric": alarm.metric, "value": alarm.value, "severity": alarm.severity, "action": alarm.action}
            self._tell(**seen, text=alarm.text)
            if alarm.action != "log":
                self._say(f"{alarm.severity}: {alarm.text}" + (_WHAT_FOLLOWS.get(alarm.action, "") if acts else ""))
            if acts and alarm.action in _ONCE:
                self._due.append(alarm)

    def due(self) -> list[Alarm]:
        """Alarms whose actions are to be taken now; they are handed out once."""
        due, self._due = self._due, []
        return due

    def recall(self, run: RunReader, steps: int) -> list[Alarm]:
        """Stand as after so many steps of a run; the alarms of the last one, and of the weights now."""
        lines = [(line["step"], as_logged(line)) for line in run.metrics() if line["step"] <= steps]
        self._trends = Trends(self._sources)
        self._trends.restore(metrics for _, metrics in lines)
        begun = self._monitors.recall(lines)
        return [alarm for alarm in begun if alarm.step == (steps if is_of_evaluation(alarm.metric) else steps - 1)]

    @property
    def lowers_staleness(self) -> bool:
        """Whether an alarm lasts whose action that is."""
        return self._monitors.lowers_staleness
