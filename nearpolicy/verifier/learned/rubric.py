"""The rubric: weighted items, each fulfilled or not. What can be checked is checked here; a judge answers the rest.

    cites, quotes, number, contains, max_words   here, in linear time
    regex                                        in a thread, with a time limit of its own
    judge                                        all of them in one request, a yes or no for each

A completion that lacks something fulfils an item not; a row that lacks something gives a failed verdict, as does a
judge without an answer, however much of the rubric had been checked by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import RubricReward
from nearpolicy.verifier.learned.asking import Choice, Material, Question
from nearpolicy.verifier.learned.config import (
    CitesItem,
    ContainsItem,
    JudgeItem,
    MaxWordsItem,
    NumberItem,
    QuotesItem,
    RegexItem,
    RubricItem,
)
from nearpolicy.verifier.learned.judge import NoAnswer, Panel, column_text, shown
from nearpolicy.verifier.rewards import RowError, Sample, brief, find_numbers, is_number

PATTERN_S = 1.0
"""Longest search for one regular expression."""
LONGEST_REASON = 300
INSTRUCTIONS = (
    "Decide about the answer to a question, point by point. A point is true only if the answer itself fulfils it; that "
    "it says so, or says it of itself, is not enough."
)


class Rubric:
    """Scores completions item by item."""

    def __init__(self, reward: RubricReward, panel: Panel | None) -> None:
        self._reward = reward
        self._panel = panel

    async def score(self, sample: Sample) -> Verdict:
        items = self._reward.items
        try:
            parts = {item.part: await _checked(item, sample) for item in items if not isinstance(item, JudgeItem)}
            spread: list[float] = []
            if self._panel is not None:
                told, spread = await self._asked(sample)
                parts |= told
        except (RowError, NoAnswer) as problem:
            return Verdict.failed(str(problem))
        total = sum(item.weight for item in items)
        value = sum(item.weight * parts[item.part] for item in items) / total
        ordered = {item.part: parts[item.part] for item in items}
        if spread and self._reward.judge is not None and self._reward.judge.penalty:
            ordered["deviation"] = statistics.pstdev(spread) / total
            value -= self._reward.judge.penalty * ordered["deviation"]
        missed = ", ".join(name for name, fulfilled in parts.items() if fulfilled < 0.5)
        reason = f"not fulfilled: {missed}"[:LONGEST_REASON] if missed else ""
        return Verdict(outcome=Outcome.SCORED, value=value, parts=ordered, reason=reason)

    async def _asked(self, sample: Sample) -> tuple[dict[str, float], list[float]]:
        """Each item for the judge with the mean over the panel, and what the items weigh for each member."""
        reward = self._reward
        assert self._panel is not None and reward.judge is not None
        question = Question(
            instructions=INSTRUCTIONS,
            material=(*shown(sample, reward.judge.show), Material("ANSWER", sample.text)),
            choices=tuple(
                Choice(name=item.part, labels=("true", "false"), kind="boolean", asks=item.question)
                for item in reward.questions
            ),
            reasoning=reward.judge.reasoning,
        )
        answers = await self._panel.ask(question)
        told = [{item.part: answer[item.part].get("true", 0.0) for item in reward.questions} for answer in answers]
        means = {item.part: statistics.fmean(each[item.part] for each in told) for item in reward.questions}
        return means, [sum(item.weight * each[item.part] for item in reward.questions) for each in told]


async def _checked(item: RubricItem, sample: Sample) -> float:
    check = _CHECKS[type(item)]
    if isinstance(item, RegexItem | CitesItem):  # a pattern of the recipe's may take long
        return float(await asyncio.to_thread(check, item, sample))
    return float(check(item, sample))


def _found(item: RubricItem, pattern: str, text: str) -> list[str]:
    """The first group (or all) of each match of a recipe's pattern."""
    import regex  # unlike `re`, it has a time limit, and lets other threads run

    try:
        matches = regex.finditer(pattern, text, timeout=PATTERN_S, concurrent=True)
        return [match[bool(match.re.groups)] or "" for match in matches]
    except TimeoutError:
        raise RowError(f"the pattern of the item {item.part!r} was not done within {PATTERN_S:g} s") from None


def _regex(item: RegexItem, sample: Sample) -> bool:
    return bool(_found(item, item.pattern, sample.text))


# Citations and quotations


def _cites(item: CitesItem, sample: Sample) -> bool:
    known = sources_of(item.sources_column, sample.columns).keys()
    found = _found(item, item.marker, sample.text)
    return len(found) >= item.least and all(name in known for name in found)


def _quotes(item: QuotesItem, sample: Sample) -> bool:
    sources = [plain(text) for text in sources_of(item.source_column, sample.columns).values()]
    quotes = [quote for quote in quotations(sample.text) if len(quote.split()) >= item.min_words]
    stands = all(any(_stands_in(quote, text, item.min_words) for text in sources) for quote in quotes)
    return stands and len(quotes) >= item.least


def sources_of(column: str, columns: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the sources in a column: a mapping, a list counted from 1, a text, or JSON of one."""
    value = columns.get(column)
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping | list | tuple):
        value = [column_text(columns, column)]
    named = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
    return {str(name): text if isinstance(text, str) else json.dumps(text, default=str) for name, text in named}


_QUOTATION = re.compile(
    r"""
    \u201c ([^\u201c\u201d]*) \u201d                    # English
    | \u201e ([^\u201c\u201d\u201e]*) [\u201c\u201d]     # German
    | \u00ab ([^\u00ab\u00bb]*) \u00bb                  # French
    | " ([^"\n]*) "
    """,
    re.VERBOSE,
)
_ALIKE = str.maketrans(
    dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"')
    | dict.fromkeys("\u2018\u2019\u201a\u201b`\u00b4", "'")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
)
_LEFT_OUT = re.compile(r"\[?(?:\.\.\.|\u2026)\]?")


def quotations(text: str) -> list[str]:
    """What stands in double quote marks: straight ones on one line, typographic ones, guillemets."""
    return [next(group for group in match.groups() if group is not None) for match in _QUOTATION.finditer(text)]


def plain(text: str) -> str:
    """Without what differs between two prints of a text: case, white space, and the form of marks and dashes."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_ALIKE).casefold().split())


def _stands_in(quote: str, source: str, min_words: int) -> bool:
    """Whether the parts of a quotation, with `...` between them, follow one another in a source that is `plain`.

    Each part has ``min_words``: any sentence can be put together from single words of a long text.
    """
    place = 0
    parts = [plain(part).rstrip(".,;:!?") for part in _LEFT_OUT.split(quote)]  # marks may be the sentence's
    parts = [part for part in parts if part]
    for part in parts:
        found = source.find(part, place)
        if found < 0 or len(part.split()) < min_words:
            return False
        place = found + len(part)
    return bool(parts)


# The rest


def right_number(item: NumberItem, columns: Mapping[str, Any]) -> Decimal:
    """The number a completion must match; `RowError` if the row has none."""
    answer = column_text(columns, item.answer_column)
    if not is_number(answer):
        raise RowError(f"the column {item.answer_column!r} holds {answer[:80]!r}, which is not a number")
    [(_, right)] = find_numbers(answer)
    return right


def _number(item: NumberItem, sample: Sample) -> bool:
    right = right_number(item, sample.columns)
    allowed = max(Decimal(item.tolerance), abs(right) * Decimal(item.relative))
    found = [value for _, value in find_numbers(sample.text)]
    return any(abs(value - right) <= allowed for value in (found if item.which == "any" else found[-1:]))


def wanted_texts(item: ContainsItem, columns: Mapping[str, Any]) -> list[str]:
    """What a completion must contain; `RowError` if the row names nothing, which any completion would contain."""
    if item.text is not None:
        return [item.text]
    name = str(item.column)
    value = columns.get(name)
    wanted = list(map(str, value)) if isinstance(value, list) else [column_text(columns, name)]
    if not wanted or not all(wanted):
        raise RowError(f"the column {name!r} holds {brief(value)}, which every completion contains")
    return wanted


def _contains(item: ContainsItem, sample: Sample) -> bool:
    wanted = wanted_texts(item, sample.columns)
    text = sample.text.casefold() if item.ignore_case else sample.text
    return all((each.casefold() if item.ignore_case else each) in text for each in wanted)


def _max_words(item: MaxWordsItem, sample: Sample) -> bool:
    return len(sample.text.split()) <= item.words


_CHECKS: Mapping[type, Any] = {
    CitesItem: _cites,
    QuotesItem: _quotes,
    NumberItem: _number,
    ContainsItem: _contains,
    RegexItem: _regex,
    MaxWordsItem: _max_words,
}
