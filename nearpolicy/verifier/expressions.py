"""Right answers read as math-verify reads them, for a process that can be ended; importing this loads math-verify."""

from __future__ import annotations

from nearpolicy.verifier import rewards
from nearpolicy.verifier.config import MathVerifyReward

rewards.preload(MathVerifyReward())


def problem(_: None, answer: str) -> str | None:
    """What is wrong with the right answer of a row; None if it can be read."""
    try:
        rewards.golds_of(answer)
    except rewards.RowError as error:
        return str(error)
    return None
