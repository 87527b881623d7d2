"""Monitors that every run has (`telemetry.health`): signs that learning has gone wrong, whatever is learned.

They are wide enough to be silent in a healthy run. What a run should do about one is its recipe's matter: an entry of
`monitors` with the same metric and an `action`.
"""

from __future__ import annotations

from nearpolicy.telemetry.config import MonitorConfig

HEALTH = (
    # a gradient that is not finite, and was not applied
    MonitorConfig(metric="policy/skipped_updates", above=0, severity="critical"),
    # a gradient of another size than those before
    MonitorConfig(metric="policy/grad_norm_ratio", above=50),
    # a policy far from its reference
    MonitorConfig(metric="policy/kl_reference", above=10, clear=5, steps=2),
    # updates that clip most tokens
    MonitorConfig(metric="policy/clip_high_share", above=0.5, clear=0.4, steps=3),
    MonitorConfig(metric="policy/clip_low_share", above=0.5, clear=0.4, steps=3),
    # a policy that has lost its entropy
    MonitorConfig(metric="policy/entropy_ratio", below=0.05, clear=0.1, steps=3),
    # completions of another length than those before
    MonitorConfig(metric="completion/length_ratio", above=2, clear=1.5, steps=3),
    MonitorConfig(metric="completion/length_ratio", below=0.4, clear=0.6, steps=3),
    # importance weights that leave a tenth of the batch
    MonitorConfig(metric="mismatch/ess", below=0.1, clear=0.3, steps=2),
    # engine and learner that disagree about weights they share
    MonitorConfig(metric="mismatch/engine_kl", above=0.1, clear=0.05, steps=2, severity="critical"),
    MonitorConfig(metric="mismatch/probe_kl", above=0.1, clear=0.05, steps=2, severity="critical"),
    # nothing to learn from
    MonitorConfig(metric="reward/zero_variance_share", above=0.999, steps=20, severity="info"),
    # one text for nearly every prompt
    MonitorConfig(metric="integrity/duplicate_share", above=0.9, clear=0.7, steps=5, severity="info"),
    # less reward for more distance from the reference
    MonitorConfig(metric="integrity/reward_fall", above=3, clear=1.5, steps=3),
    # rewards that held-out answers do not confirm
    MonitorConfig(metric="integrity/<source>/held_out_gap", above=0.3, clear=0.2, steps=2),
    MonitorConfig(metric="integrity/<source>/held_out_fall", above=0.15, clear=0.1, steps=2),
    # verdicts that change when they are asked for again
    MonitorConfig(metric="verifier/<source>/flip_rate", above=0.05, clear=0.03, steps=3),
)
