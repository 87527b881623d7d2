"""Regular expressions of a recipe over the rows of its data: what they find, and a name for the row that they hang on.

The patterns run in a child process (`nearpolicy.bounded`), which imports this module and nothing else of the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nearpolicy.bounded import bounded
from nearpolicy.errors import DataError

LIMIT_S = 5.0
"""For one row; ordinary patterns take a millionth of it."""


def matching(pattern: str, texts: Sequence[str], where: Sequence[str], setting: str) -> list[bool]:
    """Whether the pattern occurs in each text. ``where``: what `DataError` calls each."""
    return list(_run("found", pattern, texts, where, setting))


def last_matches(pattern: str, texts: Sequence[str], where: Sequence[str], setting: str) -> list[str | None]:
    """Of each text's last match the first group (or all of it, without groups); None where there is no match."""
    return list(_run("cut", pattern, texts, where, setting))


def _run(function: str, pattern: str, texts: Sequence[str], where: Sequence[str], setting: str) -> Iterator:
    answers = bounded(f"nearpolicy.tasks.patterns:{function}", pattern, texts, limit_s=LIMIT_S)
    for answer, place in zip(answers, where, strict=True):
        if answer.error is not None:
            remedy = "write it so that it has fewer ways to match: no repetition inside a repetition"
            raise DataError(f"{place}: {setting} {pattern!r}: {answer.error}; {remedy}")
        yield answer.value


def found(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def cut(pattern: str, text: str) -> str | None:
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1][1] if matches[-1].re.groups else matches[-1][0]
