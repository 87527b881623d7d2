"""Where a learner lives, as the life of a run sees it: a thread of this process, or ranks in other ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nearpolicy.roles import Learner


class LearnerPlace(Learner, Protocol):
    """A learner, and a way to have anything else done with it."""

    @property
    def is_there(self) -> bool:
        """Not while it begins anew, and not if that failed."""
        ...

    @property
    def version(self) -> int:
        """Steps that its weights contain."""
        ...

    @property
    def can_learn_ahead(self) -> bool:
        """Whether a step can begin before its batch is complete."""
        ...

    async def begin_anew(self) -> None:
        """With the initial weights; what was learned is forgotten."""
        ...

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(learner, *arguments)`` where the learner lives, in the order of the calls; on every rank, if it
        has several, and the first one's answer. Function, arguments and answer may travel."""
        ...
