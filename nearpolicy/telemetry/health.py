"""Monitors that every run has (`telemetry.health`): signs that learning has gone wrong, whatever is learned.

They are wide enough to be silent in a healthy run. What a run should do about one is its recipe's matter: an entry of
`monitors` with the same metric and an `action`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from nearpolicy.telemetry.config import MonitorConfig

HEALTH = (
    MonitorConfig(metric="policy/skipped_updates", above=0, severity="critical"),
    MonitorConfig(metric="policy/grad_norm_ratio", above=50, severity="warning"),
    MonitorConfig(metric="policy/kl_reference", above=10, steps=2, severity="warning"),
    MonitorConfig(metric="policy/clip_high_share", above=0.5, steps=3, severity="warning"),
    MonitorConfig(metric="policy/clip_low_share", above=0.5, steps=3, severity="warning"),
    MonitorConfig(metric="mismatch/ess", below=0.1, clear=0.3, steps=2, severity="warning"),
    MonitorConfig(metric="mismatch/engine_kl", above=0.1, steps=2, severity="critical"),
    MonitorConfig(metric="mismatch/probe_kl", above=0.1, steps=2, severity="critical"),
    MonitorConfig(metric="reward/zero_variance_share", above=0.999, steps=20, severity="info"),
    MonitorConfig(metric="integrity/duplicate_share", above=0.9, steps=5, severity="info"),
)
"""In the order of metrics: a gradient that is not finite; one of another size than before; a policy far from its
reference; updates that clip most tokens; importance weights that leave a tenth of the batch; engine and learner that
disagree about weights they share, on rollouts or on a probe; nothing to learn from; one text for nearly every
prompt."""

PAST = 20
_LEAST_PAST = 5


class GradientNorms:
    """The norm of each step against the median of those before."""

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=PAST)

    def ratio(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Nothing at first, and for a norm that is not there."""
        norm = metrics.get("policy/grad_norm")
        if norm is None or norm != norm:
            return {}
        past = list(self._past)
        self._past.append(norm)
        middle = statistics.median(past) if len(past) >= _LEAST_PAST else 0.0
        return {"policy/grad_norm_ratio": norm / middle} if middle > 0 else {}
