"""Where metrics go besides the run folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from nearpolicy.settings import ConfigModel


class TelemetryConfig(ConfigModel):
    """Section `telemetry`: the run folder always holds `metrics.jsonl`; this adds to it."""

    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Further places for step metrics; each needs its package."""
    profile: NonNegativeInt = 0
    """Write `trace.json` into the run folder: what each role did when during this many steps, every decode step and
    phase. Perfetto (ui.perfetto.dev) opens it. 0 writes none."""
