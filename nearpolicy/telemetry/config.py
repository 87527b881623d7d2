"""Where metrics go besides the run folder, and which of them raise an alarm."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nearpolicy.settings import ConfigModel, Seconds
from nearpolicy.telemetry.metrics import unknown_names


class TelemetryConfig(ConfigModel):
    """Section `telemetry`: the run folder always holds `metrics.jsonl`; this adds to it."""

    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Further places for step metrics; each needs its package."""
    profile: NonNegativeInt = 0
    """Write `trace.json` into the run folder: what each role did when during this many steps, every decode step and
    phase. Perfetto (ui.perfetto.dev) opens it. 0 writes none."""
    health: bool = True
    """Watch for signs that learning has gone wrong, and say so: a gradient that is not finite or of another size, lost
    entropy, importance weights that leave little of a batch, engine and learner that disagree, with the fault that
    explains it, rewards that held-out answers do not confirm, and others (docs/reliability.md). Actions are for
    `monitors`."""
    probe: int = Field(32, ge=0, le=4096)
    """Tokens by which engine and learner are compared after a publication where the last batch had fewer that were
    sampled under the learner's own weights: so many are sampled for this alone, under the new version, for prompts of
    that batch. They are no rollouts and train nothing. The learner waits for them: once they have taken more than a
    fiftieth of the run's time, publications go by without a probe until they have not. 0 asks for none."""
    quiet_s: Seconds = 120.0
    """When no role has told of anything for so long, the run says who waits for whom; `nearpolicy why` says it at any
    time."""


class MonitorConfig(ConfigModel):
    """An entry of `monitors`: a metric that says when something is wrong."""

    metric: str
    """Name of a metric (docs/metrics.md), as in `metrics.jsonl`; or of a family of them, as in
    `verifier/<source>/flip_rate`: each of its metrics is then watched by itself."""
    above: float | None = None
    """Alarm when it is larger."""
    below: float | None = None
    """Alarm when it is smaller."""
    steps: PositiveInt = 1
    """For so many steps in a row (evaluations, for a metric of theirs); a step without the metric does not count."""
    clear: float | None = None
    """The alarm is over when the metric is back on the good side of this, for as many steps; the bound itself if left
    out."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """How it is said."""
    action: Literal["log", "alarm", "lower_staleness", "rollback", "pause", "stop"] = "alarm"
    """log: an event in the store. alarm: say it as well, once until it is over. lower_staleness: admit one batch of
    groups less at a time after each step until it is over, down to `sync.weight_sync_steps` batches. rollback: go back
    to the weights and the training state before the first of the steps that raised it, and on from there with other
    prompts, as a new lineage. pause: admit and learn nothing until a person removes the file PAUSED from the run
    folder. stop: end the run after the step, with what was learned."""
    back: NonNegativeInt = 0
    """rollback: so many steps further back."""
    most: PositiveInt = 3
    """rollback: after so many in one run the next one is a stop."""
    pause_s: Seconds = 86_400.0
    """pause: so long at most; then the run ends as with stop."""

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError(f"the monitor of {self.metric} says neither above nor below; set one of them")
        if self.above is not None and self.below is not None and self.clear is not None:
            raise ValueError(f"the monitor of {self.metric} has two bounds and one `clear`; make it two monitors")
        wrong = self.clear is not None and (
            (self.above is not None and self.clear > self.above) or (self.below is not None and self.clear < self.below)
        )
        if wrong:
            raise ValueError(f"the monitor of {self.metric} would be over (clear) while it is still beyond its bound")
        for key, action in (("back", "rollback"), ("most", "rollback"), ("pause_s", "pause")):
            if self.action != action and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"the monitor of {self.metric} sets {key}, but its action is {self.action}")
        if unknown_names([self.metric]):
            raise ValueError(f"{self.metric!r} is no metric; docs/metrics.md lists them")
        return self
