"""From the rewards of a group to one advantage per rollout; known before any model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def grpo(rewards_G: Sequence[float | None], *, scale: bool = True) -> np.ndarray:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / std(r), with the n - 1 spread and without an epsilon; ``scale=False`` leaves the division
    out. Unscored rollouts (None) take no part in mean and spread and get 0. A group without spread gets zeros; so does
    a group of one.
    """
    scored = np.array([reward is not None for reward in rewards_G], dtype=bool)
    rewards = np.array([0.0 if reward is None else reward for reward in rewards_G], dtype=np.float64)
    advantages = np.zeros(len(rewards), dtype=np.float64)
    values = rewards[scored]
    if len(values) < 2 or np.ptp(values) == 0.0:  # a mean in floating point may differ from equal rewards
        return advantages
    advantages[scored] = values - values.mean()
    if scale:
        advantages[scored] /= values.std(ddof=1)
    return advantages
