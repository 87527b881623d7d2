"""How far a judge agrees with people, and what it leans towards. Numbers in, numbers with intervals out.

Every interval is a percentile bootstrap over the judged pairs or items: they are drawn again with replacement, the
number is computed anew, and 95 % of the results lie inside. A pair that was not judged is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """What it rests on."""


def bootstrap(
    statistic: Callable[..., float], *columns: Sequence[float], rounds: int = 1000, seed: int = 0
) -> Estimate | None:
    """``statistic`` of columns of equal length; None without a row, or where it is no number (NaN) for all rows."""
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    count = len(arrays[0])
    value = statistic(*arrays) if count else np.nan
    if not np.isfinite(value):
        return None
    draws = np.random.default_rng(seed).integers(0, count, size=(rounds, count))
    found = np.array([statistic(*(array[draw] for array in arrays)) for draw in draws])
    found = found[np.isfinite(found)]
    low, high = np.quantile(found, [0.025, 0.975]) if len(found) else (value, value)
    return Estimate(float(value), float(low), float(high), count)


def mean(values: np.ndarray) -> float:
    return float(values.mean())


def difference(values: np.ndarray, others: np.ndarray) -> float:
    """Of the means."""
    return float(values.mean() - others.mean())


def agreement(judged: np.ndarray, gold: np.ndarray) -> float:
    """Share of equal labels."""
    return float((judged == gold).mean())


def kappa(judged: np.ndarray, gold: np.ndarray) -> float:
    """Cohen's kappa: agreement beyond chance, (p - e) / (1 - e) with e from the two distributions of labels.

    1 is agreement, 0 what two would have who answer at random with the same frequencies. NaN where both say the same of
    everything, which chance explains as well. Worked: [1, 1, 2, 2] and [1, 1, 2, 1] agree on 0.75, by chance on
    0.5 * 0.75 + 0.5 * 0.25 = 0.5, which gives 0.5.
    """
    labels = np.union1d(judged, gold)
    chance = float(sum((judged == label).mean() * (gold == label).mean() for label in labels))
    return (agreement(judged, gold) - chance) / (1.0 - chance) if chance < 1.0 else float("nan")


def correlation(values: np.ndarray, others: np.ndarray) -> float:
    """Spearman's: of the ranks, equal values sharing theirs. NaN where one side is constant."""
    a, b = _ranks(values), _ranks(others)
    if a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2.0)[inverse]
