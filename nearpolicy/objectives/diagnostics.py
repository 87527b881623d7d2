"""Numbers that say whether an update can be trusted; none of them has a gradient.

Log-ratios are log(proximal / behaviour) of sampled tokens, [N], in nats: how far the policy at the start of a step is
from the one that sampled.
"""

from __future__ import annotations

import numpy as np

_LARGEST = 80.0
"""exp(80) is still far from the largest float64, also squared."""


def mismatch(proximal_logprobs: np.ndarray, behavior_logprobs: np.ndarray) -> dict[str, float]:
    """Distances between the proximal and the behaviour policy, from the tokens that the latter sampled, [N] each.

    ``kl``, ``kl_k1``, ``kl_k2`` estimate KL(behaviour || proximal) (k3, k1 and k2 of Schulman 2020); differences are
    absolute; ``chi_square`` estimates the chi-square divergence of the proximal from the behaviour policy, E w^2 - 1,
    whose size the variance of importance sampling follows.
    """
    if not len(behavior_logprobs):
        return {}
    d = log_ratios(proximal_logprobs, behavior_logprobs)
    gap, weights = np.abs(d), _weights(d)
    return {
        "mismatch/kl": float(np.mean(np.expm1(np.minimum(d, _LARGEST)) - d)),
        "mismatch/kl_k1": float(np.mean(-d)),
        "mismatch/kl_k2": float(np.mean(d * d / 2)),
        "mismatch/chi_square": float(np.mean(weights * weights) - 1.0),
        "mismatch/prob_diff_mean": float(np.mean(np.abs(np.exp(proximal_logprobs) - np.exp(behavior_logprobs)))),
        "mismatch/logprob_diff_mean": float(gap.mean()),
        "mismatch/logprob_diff_p99": float(np.quantile(gap, 0.99)),
        "mismatch/logprob_diff_max": float(gap.max()),
        "mismatch/ess": effective_sample_size(d),
        **{f"mismatch/weight_p{q:02d}": float(np.quantile(weights, q / 100)) for q in (1, 50, 99)},
    }


def mismatch_by_cause(
    proximal_logprobs: np.ndarray, behavior_logprobs: np.ndarray, causes: np.ndarray
) -> dict[str, float]:
    """The same distance of tokens apart by what may cause it; ``causes`` [N] of `Cause`.

    Fresh tokens were sampled under the very weights of the proximal policy: what separates them there is what engine
    and learner compute differently (sampling temperature, precision, a tensor that was not synchronised, a prefix of
    other weights), and nothing else. The rest is staleness, and keys and values that were kept over a swap.
    """
    if not len(causes):
        return {}
    d = log_ratios(proximal_logprobs, behavior_logprobs)
    fresh = causes == FRESH
    found = {"mismatch/fresh_share": float(np.mean(fresh)), "mismatch/fresh_tokens": float(fresh.sum())}
    for name, cause in (("engine", FRESH), ("kept_kv", KEPT_KV), ("staleness", STALE)):
        of_cause = d[causes == cause]
        found |= distance(name, of_cause)
    return found


def distance(name: str, log_ratios_N: np.ndarray) -> dict[str, float]:
    """KL by the k3 estimate and largest difference over tokens, as metrics of ``name``; nothing over no token."""
    if not len(log_ratios_N):
        return {}
    return {
        f"mismatch/{name}_kl": float(np.mean(np.expm1(np.minimum(log_ratios_N, _LARGEST)) - log_ratios_N)),
        f"mismatch/{name}_logprob_diff_max": float(np.abs(log_ratios_N).max()),
    }


FRESH, KEPT_KV, STALE, REPLAYED = 0, 1, 2, 3
"""Of a token: its version is that of the proximal policy, and so is that of all before it in its sequence; its version
is, but not that of all before it, whose keys and values were kept; its version is an older one; it is trained once
more, in a later step than the one it was sampled for."""


def causes_of(versions: np.ndarray, mask: np.ndarray, version: int) -> np.ndarray:
    """[T] of a segment whose tokens, where ``mask`` is True, were sampled under ``versions``; meaningless elsewhere."""
    sampled = np.where(mask, versions, np.iinfo(versions.dtype).max)
    oldest_so_far = np.minimum.accumulate(sampled) if len(sampled) else sampled
    return np.where(versions < version, STALE, np.where(oldest_so_far < version, KEPT_KV, FRESH))


def effective_sample_size(log_ratios_N: np.ndarray) -> float:
    """(sum w)^2 / (N sum w^2): the share of the tokens that importance weights leave of a sample (Kish 1965); 1 for
    equal weights."""
    weights = _weights(log_ratios_N)
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def advantage_covariance(logprobs: np.ndarray, advantages: np.ndarray) -> float:
    """Covariance of log pi and advantage over tokens: while it is positive, entropy falls (arXiv 2505.22617)."""
    x, a = logprobs.astype(np.float64), advantages.astype(np.float64)
    return float(np.mean((x - x.mean()) * (a - a.mean()))) if len(x) else 0.0


def explained_variance(values: np.ndarray, targets: np.ndarray) -> float | None:
    """1 - Var(targets - values) / Var(targets) over tokens: 1 for a perfect critic, 0 for one that says the same of
    all, below 0 for one that is worse than that. None where the targets do not differ."""
    spread = float(np.var(targets)) if len(targets) else 0.0
    return 1.0 - float(np.var(targets - values)) / spread if spread > 0.0 else None


def log_ratios(proximal_logprobs: np.ndarray, behavior_logprobs: np.ndarray) -> np.ndarray:
    return proximal_logprobs.astype(np.float64) - behavior_logprobs.astype(np.float64)


def _weights(d: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(d, _LARGEST))
