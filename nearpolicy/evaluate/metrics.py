"""What a held-out score is, and how sure one can be of it. Plain numbers in, plain numbers out.

A question that nobody could judge counts neither as right nor as wrong; it is reported apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nearpolicy.store.schema import EvaluatedSample


def wilson_interval(correct: int, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The share of ``correct`` in ``count`` lies in here with 95 % confidence (``z`` standard deviations).

    Wilson's score interval: unlike mean +- z sd it stays inside [0, 1] and has a width at 0 and at 1.
    Nothing counted says nothing: (0, 1).
    """
    if not 0 <= correct <= count:
        raise ValueError(f"{correct} correct of {count} is not a share")
    if count == 0:
        return 0.0, 1.0
    share = correct / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # Rounding must not move the ends that are exact.
    low = 0.0 if correct == 0 else (centre - spread) / scale
    high = 1.0 if correct == count else (centre + spread) / scale
    return low, high


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Chance that at least one of ``k`` samples is right, from ``c`` right ones among ``n``; None if it cannot be told.

    The unbiased estimate 1 - C(n-c, k) / C(n, k): draw k of the n without replacement. With fewer than k samples there
    is no such draw, so n < k gives None, never a number. Worked: n=5, c=2, k=3 gives 1 - C(3,3)/C(5,3) = 0.9.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@{k} of {c} right among {n} makes no sense")
    if n < k:
        return None
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_pass_at_k(problems: Iterable[tuple[int, int]], k: int) -> float | None:
    """pass@k per problem (n samples, c right), averaged over problems; None if it cannot be told for one of them.

    Pooling the counts first would be wrong: (4, 1), (4, 4), (4, 0) at k=2 have mean (0.5 + 1 + 0) / 3 = 0.5.
    """
    values = [pass_at_k(n, c, k) for n, c in problems]
    if not values or any(value is None for value in values):
        return None
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScore:
    """One evaluation: one task, one version of the weights, one way of sampling."""

    task: str
    mode: str
    version: int
    lineage: int
    correct: int
    count: int
    """Samples that were judged."""
    unjudged: int
    questions: tuple[tuple[int, int], ...]
    """Per held-out question: samples judged, right ones."""
    mean_tokens: float

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy. It takes samples as independent: exact for one sample per question."""
        return wilson_interval(self.correct, self.count)

    def pass_at(self, k: int) -> float | None:
        return mean_pass_at_k(self.questions, k)


def held_out_scores(samples: Sequence[EvaluatedSample]) -> list[HeldOutScore]:
    """One score per (task, mode, lineage, version), in that order."""
    parts: dict[tuple[str, str, int, int], list[EvaluatedSample]] = defaultdict(list)
    for sample in samples:
        parts[sample.task, sample.mode, sample.lineage, sample.version].append(sample)
    return [_score(*key, parts[key]) for key in sorted(parts)]


def _score(task: str, mode: str, lineage: int, version: int, samples: list[EvaluatedSample]) -> HeldOutScore:
    questions: dict[int, list[bool]] = {sample.row: [] for sample in samples}
    for sample in samples:
        if sample.correct is not None:
            questions[sample.row].append(sample.correct)
    judged = [right for of_question in questions.values() for right in of_question]
    return HeldOutScore(
        task=task,
        mode=mode,
        version=version,
        lineage=lineage,
        correct=sum(judged),
        count=len(judged),
        unjudged=len(samples) - len(judged),
        # A question nobody could judge has no pass@k and is left out of its mean; `unjudged` shows it.
        questions=tuple((len(r), sum(r)) for _, r in sorted(questions.items()) if r),
        mean_tokens=math.fsum(sample.num_tokens for sample in samples) / len(samples),
    )
