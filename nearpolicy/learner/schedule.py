"""The learning rate as a function of the step alone, so that a resumed run goes on where it was."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Rate of step ``step`` (from 0). Warm-up reaches the peak at step ``warmup_steps`` counted from 1."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    remaining = max(1, total_steps - warmup_steps)
    done = min(1.0, (step - warmup_steps) / remaining)
    return peak * (1.0 - done) if schedule == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * done))
