"""Numbers that say whether an update can be trusted; none of them has a gradient."""

from __future__ import annotations

import numpy as np


def mismatch(proximal_logprobs: np.ndarray, behavior_logprobs: np.ndarray) -> dict[str, float]:
    """How far the learner's log-probabilities at the start of the step are from those the tokens were sampled with.

    Both [N] over sampled tokens. Differences are absolute, in nats. ``kl`` is the k3 estimate of
    KL(behaviour || proximal) (Schulman 2020); ``ess`` is (sum w)^2 / (N sum w^2).
    """
    if not len(behavior_logprobs):
        return {}
    d = proximal_logprobs.astype(np.float64) - behavior_logprobs.astype(np.float64)
    gap = np.abs(d)
    weights = np.exp(np.minimum(d, 80.0))
    return {
        "mismatch/kl": float(np.mean(np.expm1(np.minimum(d, 80.0)) - d)),
        "mismatch/prob_diff_mean": float(np.mean(np.abs(np.exp(proximal_logprobs) - np.exp(behavior_logprobs)))),
        "mismatch/logprob_diff_mean": float(gap.mean()),
        "mismatch/logprob_diff_p99": float(np.quantile(gap, 0.99)),
        "mismatch/logprob_diff_max": float(gap.max()),
        "mismatch/ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }
