"""Groups that failed, and when it is no use to go on."""

from __future__ import annotations

from dataclasses import dataclass

from nearpolicy.rollout_queue.config import hopeless_after


@dataclass(slots=True)
class Failures:
    """Of one run."""

    total: int = 0
    """Since its start."""
    in_a_row: int = 0
    last: str = ""
    """Why the last one failed."""
    has_worked: bool = False
    """Whether any group of the run has been judged."""

    def failed(self, reason: str) -> None:
        self.total += 1
        self.in_a_row += 1
        self.last = reason

    def worked(self) -> None:
        self.in_a_row, self.has_worked = 0, True

    def are_hopeless(self, num_slots: int) -> bool:
        return self.in_a_row >= hopeless_after(num_slots, has_worked=self.has_worked)
