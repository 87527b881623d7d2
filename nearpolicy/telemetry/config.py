"""Where metrics go besides the run folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nearpolicy.settings import ConfigModel


class TelemetryConfig(ConfigModel):
    """Section `telemetry`: the run folder always holds `metrics.jsonl`; this adds to it."""

    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Further places for step metrics; each needs its package."""
