"""Alternating pairs: two sides under the same conditions, and the ratio of their times with its range."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def paired(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int, *, warm: bool = True) -> dict[str, Any]:
    """Times both sides, one after the other, the first of each pair in turn; a ratio above 1 says that ours is faster.

    ``warm``: one round of each before, which is not counted.
    """
    if warm:
        ours(), theirs()
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for pair in range(pairs):
        sides = [("ours", ours), ("theirs", theirs)]
        for name, run in sides if pair % 2 == 0 else sides[::-1]:
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return ratios(seconds["ours"], seconds["theirs"])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """What a comparison reports; `equal_results` is for the caller to add, once it has been checked."""
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio_median": round(statistics.median(each), 3),
        "ratio_min": round(min(each), 3),
        "ratio_max": round(max(each), 3),
        "pairs": len(each),
        "seconds_ours": [round(s, 4) for s in ours],
        "seconds_theirs": [round(s, 4) for s in theirs],
    }
