"""The learner's processes as the step sees them: who takes part, and at what points they meet.

`Together` is one process, which is in agreement with itself: nothing here costs it anything.
`nearpolicy.learner.parallel.Ranks` is several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearpolicy.learner.sharding import Sharding

T = TypeVar("T")


class Together:
    """All ranks call the same methods, in the same order."""

    rank: int = 0
    size: int = 1

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside, ranks may wait for each other; if one fails there, no rank goes on."""
        yield

    @contextmanager
    def agreement(self, what: str) -> Iterator[None]:
        """Around what a rank does by itself: an exception on any of them becomes the same error on all."""
        yield

    def agree(self, what: str, error: Exception | None = None, *, same: Any = None) -> None:
        """Raises on every rank if one comes with an ``error``, or if they come with different values of ``same``."""
        if error is not None:
            raise error

    def exchange(self, what: str, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return [value]

    def merged(self, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of which each rank has filled some parts, and left 0 what others fill: all of them, to the bit."""
        return list(tensors)

    def shard(self, model: torch.nn.Module, *, replicas: int, offload: bool) -> Sharding:
        """Spread a model's weights over the ranks."""
        return Sharding()


ALONE = Together()
"""The only rank."""
