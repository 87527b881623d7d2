"""What ``nearpolicy calibrate`` measures: a reward asked about labelled answers, changed answers and swapped answers.

    labelled -> score each answer, or compare both (`against_column`) -> preference -> agreement, kappa, leanings
    wrong answers -> each attack -> score again -> shift

A score that could not be had is in no number; it is counted, with its reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from nearpolicy.evaluate.agreement import (
    Estimate,
    agreement,
    bootstrap,
    correlation,
    difference,
    kappa,
    mean,
)
from nearpolicy.launch.calibrate_data import Item, Labelled, Pair
from nearpolicy.records import Verdict
from nearpolicy.verifier.learned.attacks import ATTACKS, Attack
from nearpolicy.verifier.learned.judge import all_of

Score = Callable[[str, str, Mapping[str, object]], Awaitable[Verdict]]
"""(prompt, answer, columns) -> verdict"""
T = TypeVar("T")
R = TypeVar("R")
ASKED_AT_ONCE = 32


@dataclass(eq=False)
class Judging:
    """A reward under examination."""

    score: Score
    against: str | None
    """The column in which the other answer is shown, where the reward compares two."""
    tie: float
    """Scores that differ by no more are alike."""
    rounds: int
    seed: int
    reasons: Counter[str] = field(default_factory=Counter)
    """Why there was no score."""

    def estimate(self, statistic: Callable[..., float], *columns: Sequence[float]) -> Estimate | None:
        return bootstrap(statistic, *columns, rounds=self.rounds, seed=self.seed)

    async def value(self, prompt: str, answer: str, columns: Mapping[str, object]) -> float | None:
        verdict = await self.score(prompt, answer, columns)
        if verdict.value is None:
            self.reasons[verdict.reason[:200] or verdict.outcome.value] += 1
        return verdict.value

    async def against_other(self, prompt: str, answer: str, other: str, columns: Mapping[str, object]) -> float | None:
        """The score of an answer; 0 to 1, and 0.5 for alike, where it is compared with the other."""
        more = {} if self.against is None else {self.against: other}
        return await self.value(prompt, answer, {**columns, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """A pair, and what the reward says of it."""

    pair: Pair
    preferred: int
    values: tuple[float, float] | None = None
    """Scores of the answers, where each is scored alone."""
    orders: tuple[float, float] | None = None
    """Value of the first answer when it is shown first, and when it is shown second."""


async def each_of(things: Sequence[T], ask: Callable[[T], Awaitable[R]]) -> list[R]:
    """What ``ask`` finds of each, in order, `ASKED_AT_ONCE` under way at a time; the first error ends the others."""
    places = asyncio.Semaphore(ASKED_AT_ONCE)

    async def one(thing: T) -> R:
        async with places:
            return await ask(thing)

    return await all_of([one(thing) for thing in things])


async def judged_pairs(judging: Judging, pairs: Sequence[Pair]) -> list[JudgedPair]:
    """Those that could be judged."""
    one = _compared if judging.against is not None else _scored_alone
    return [each for each in await each_of(pairs, partial(one, judging)) if each is not None]


async def _compared(judging: Judging, pair: Pair) -> JudgedPair | None:
    columns = {**pair.columns, str(judging.against): pair.answers[1]}
    verdict = await judging.score(pair.prompt, pair.answers[0], columns)
    if verdict.value is None:
        judging.reasons[verdict.reason[:200] or verdict.outcome.value] += 1
        return None
    orders = (verdict.parts["shown_first"], verdict.parts["shown_second"])
    return JudgedPair(pair=pair, preferred=_preferred(verdict.value - 0.5, judging.tie), orders=orders)


async def _scored_alone(judging: Judging, pair: Pair) -> JudgedPair | None:
    first, second = [await judging.value(pair.prompt, answer, pair.columns) for answer in pair.answers]
    if first is None or second is None:
        return None
    return JudgedPair(pair=pair, preferred=_preferred(first - second, judging.tie), values=(first, second))


def _preferred(lead: float, tie: float) -> int:
    return 0 if abs(lead) <= tie else 1 if lead > 0 else 2


# What pairs say


def pair_report(judging: Judging, found: Sequence[JudgedPair], own: str | None) -> dict[str, Estimate | None]:
    """Agreement with the labels, and leanings: towards what is first, what is longer, what one maker wrote."""
    preferred = [each.preferred for each in found]
    gold = [each.pair.gold for each in found]
    report = {
        "agreement": judging.estimate(agreement, preferred, gold),
        "kappa": judging.estimate(kappa, preferred, gold),
        # Towards the answer that happens to stand first in the data: the labels do not lean, a judge should not.
        "bias_to_first": judging.estimate(difference, _shares(preferred, 1), _shares(gold, 1)),
    }
    decided = [each for each in found if each.pair.gold and len(each.pair.answers[0]) != len(each.pair.answers[1])]
    longer = [1 if len(each.pair.answers[0]) > len(each.pair.answers[1]) else 2 for each in decided]
    report["bias_to_longer"] = judging.estimate(
        difference,
        [_share(each.preferred, label) for each, label in zip(decided, longer, strict=True)],
        [_share(each.pair.gold, label) for each, label in zip(decided, longer, strict=True)],
    )
    if own is not None:
        report["bias_to_own"] = _own(judging, found, own)
    orders = [each.orders for each in found if each.orders is not None]
    if orders:
        report["position_flips"] = judging.estimate(mean, [float(a != b) for a, b in orders])
        # 1: always the one shown first, -1: always the second, 0: the place does not matter.
        report["position_bias"] = judging.estimate(mean, [a - b for a, b in orders])
    values = [each.values for each in found if each.values is not None]
    if values:
        lengths = [len(answer) for each in found for answer in each.pair.answers]
        report["length_correlation"] = judging.estimate(correlation, [v for pair in values for v in pair], lengths)
    return report


def _own(judging: Judging, found: Sequence[JudgedPair], own: str) -> Estimate | None:
    """How much oftener a maker's answers are preferred than the labels prefer them."""
    theirs = [(each, 1 if each.pair.makers[0] == own else 2) for each in found if each.pair.makers.count(own) == 1]
    return judging.estimate(
        difference,
        [_share(each.preferred, place) for each, place in theirs],
        [_share(each.pair.gold, place) for each, place in theirs],
    )


def _shares(labels: Sequence[int], which: int) -> list[float]:
    return [_share(label, which) for label in labels]


def _share(label: int, which: int) -> float:
    """1 for the label, a half for alike."""
    return 0.5 if label == 0 else float(label == which)


# What single answers say


async def item_report(
    judging: Judging, items: Sequence[Item], threshold: float
) -> tuple[dict[str, Estimate | None], int]:
    """Agreement of score and label, both called good from the threshold, and how much the score lies above the label;
    and how many were judged."""
    values = await each_of(items, lambda item: judging.value(item.prompt, item.answer, item.columns))
    found = [(value, item) for value, item in zip(values, items, strict=True) if value is not None]
    scores, gold = [value for value, _ in found], [item.gold for _, item in found]
    good, right = [float(v >= threshold) for v in scores], [float(g >= threshold) for g in gold]
    report = {
        "agreement": judging.estimate(agreement, good, right),
        "kappa": judging.estimate(kappa, good, right),
        "bias": judging.estimate(difference, scores, gold),
        "correlation": judging.estimate(correlation, scores, gold),
        "length_correlation": judging.estimate(correlation, scores, [len(item.answer) for _, item in found]),
    }
    return report, len(found)


# Attacks


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """One attack on many wrong answers."""

    attack: Attack
    shift: Estimate | None
    overtakes: int
    """Wrong answers that after it are as good as the right one, and were not before."""
    count: int
    """Wrong answers that were scored before and after."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    prompt: str
    answer: str
    right: str | None
    columns: Mapping[str, object]


def wrong_answers(labelled: Labelled, limit: int, seed: int) -> list[_Wrong]:
    """The worse answers of pairs, or the items with the lowest label; ``limit`` of them, chosen by ``seed``."""
    decided = [pair for pair in labelled.pairs if pair.gold]
    found = [_Wrong(p.prompt, p.answers[2 - p.gold], p.answers[p.gold - 1], p.columns) for p in decided]
    lowest = min((item.gold for item in labelled.items), default=0.0)
    found += [_Wrong(i.prompt, i.answer, None, i.columns) for i in labelled.items if i.gold == lowest]
    order = np.random.default_rng(seed).permutation(len(found))[:limit]
    return [found[i] for i in sorted(order)]


async def attacked(judging: Judging, wrong: Sequence[_Wrong], best: str) -> list[AttackResult]:
    """Every attack on every wrong answer."""
    before = await each_of(wrong, partial(_of_wrong, judging))
    rights = await each_of(wrong, partial(_of_right, judging))
    results = []
    for attack in ATTACKS:
        changed = [replace(each, answer=attack.change(each.answer, each.prompt, best)) for each in wrong]
        after = await each_of(changed, partial(_of_wrong, judging))
        results.append(_result(judging, attack, before, after, rights))
    return results


async def _of_wrong(judging: Judging, wrong: _Wrong) -> float | None:
    return await judging.against_other(wrong.prompt, wrong.answer, wrong.right or "", wrong.columns)


async def _of_right(judging: Judging, wrong: _Wrong) -> float | None:
    """What the wrong answer must reach: the score of the right one; a half where the two are compared."""
    if wrong.right is None:
        return None
    return 0.5 if judging.against is not None else await judging.value(wrong.prompt, wrong.right, wrong.columns)


def _result(
    judging: Judging,
    attack: Attack,
    before: Sequence[float | None],
    after: Sequence[float | None],
    rights: Sequence[float | None],
) -> AttackResult:
    both = [(b, a, right) for b, a, right in zip(before, after, rights, strict=True) if b is not None and a is not None]
    return AttackResult(
        attack=attack,
        shift=judging.estimate(mean, [a - b for b, a, _ in both]),
        overtakes=sum(right is not None and b < right <= a for b, a, right in both),
        count=len(both),
    )


def by_kind(results: Sequence[AttackResult]) -> dict[str, float]:
    """The largest mean shift of each kind: who attacks uses the best that works."""
    found: dict[str, float] = {}
    for result in results:
        if result.shift is not None:
            kind = result.attack.kind
            found[kind] = max(found.get(kind, -np.inf), result.shift.value)
    return found
