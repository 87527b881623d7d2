r"""math-verify, for formulas that `grammar` does not read: integrals, sums, limits, piecewise functions.

It may compute for ever, so it belongs into a process with a limit. What reaches it has passed
`equivalence.looks_like_formula`, and only its LaTeX grammar is used: its reader of plain expressions evaluates text.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from nearpolicy.errors import described
from nearpolicy.verifier.math.equivalence import Comparison, looks_like_formula
from nearpolicy.verifier.math.notation import bare


class UnreadableGold(Exception):
    """Nobody can read the right answer; the message says why."""


def compare(gold: str, answer: str) -> Comparison:
    """What math-verify says. Raises `UnreadableGold`, or what math-verify raises when it compares the two."""
    golds = golds_of(gold)
    try:
        candidates = parsed(answer) if looks_like_formula(answer) else []
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # its parser has no errors of its own
        return Comparison(False, f"math-verify cannot read the answer: {described(error, 200)}")
    if not candidates:
        return Comparison(False, "math-verify finds no formula in the answer")
    # Its own time limits use SIGALRM, which exists only in a main thread and is blind inside one long multiplication.
    # Its roundings would make 0.333333 a third.
    equal = functools.partial(
        _library().verify, float_rounding=30, numeric_precision=30, timeout_seconds=None, raise_on_error=True
    )
    return Comparison(any_equal(golds, candidates, equal), "math-verify")


def golds_of(gold: str) -> list[Any]:
    """What a right answer says, in math-verify's terms."""
    try:
        found = parsed(gold) if looks_like_formula(gold) else []
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise UnreadableGold(f"math-verify cannot read it: {described(error, 200)}") from None
    if not found:
        raise UnreadableGold("neither our notation nor math-verify finds anything in it to compare with")
    return found


def parsed(text: str) -> list[Any]:
    """The formulas in a text, as sympy's objects."""
    library = _library()
    return library.parse(
        rf"\boxed{{{bare(text)}}}",
        extraction_config=[library.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )


def any_equal(golds: Iterable[Any], candidates: Iterable[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether any pair is equal; an error in one pair counts only if no other pair settles the matter."""
    failure: Exception | None = None
    for gold, candidate in itertools.product(golds, candidates):
        try:
            if equal(gold, candidate):
                return True
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return False


def preload() -> None:
    """Load it and build its grammar, which takes longer than most answers."""
    parsed("1")


@functools.cache
def _library() -> Any:
    """Imported late because it takes a second or two, and without its warnings about missing limits."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify

    return math_verify
