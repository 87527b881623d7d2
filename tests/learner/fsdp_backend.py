"""Learners of several ranks (FSDP2 over gloo) for tests, in the processes of a `RankPool`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from learner_cases import learner
from rank_pool import RankPool

from nearpolicy.learner.parallel import Ranks


@dataclass(frozen=True)
class Fsdp:
    """A backend of `conformance`."""

    pool: RankPool
    ranks: int
    replicas: int = 1

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.pool.run(self.ranks, call, function, self.replicas, arguments)


def call(ranks: Ranks, function: Callable[..., Any], replicas: int, arguments: tuple[Any, ...]) -> Any:
    """``function(make, *arguments)`` on a rank."""
    return function(partial(learner, ranks=ranks, replicas=replicas), *arguments)
