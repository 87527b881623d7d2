"""Right answers that only math-verify may be able to read, for a process that can be ended; importing this loads it."""

from __future__ import annotations

from nearpolicy.verifier.math import library, verdict

library.preload()


def problem(_: None, answer: str) -> str | None:
    """What is wrong with the right answer of a row; None if it can be read."""
    return verdict.gold_problem(answer)
