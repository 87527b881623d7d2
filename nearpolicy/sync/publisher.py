"""Publishing: export with digests, load on every generator, compare what each one shows. No generator samples under
weights it has not shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nearpolicy.errors import SyncError
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Generator, Weights


class ExportsWeights(Protocol):
    async def weights(self, record_parent: int | None) -> Weights: ...


class Publisher:
    """Implements `WeightSync` over generators that show digests of the memory they compute from."""

    def __init__(
        self,
        learner: ExportsWeights,
        generators: Sequence[Generator],
        *,
        timeout_s: float,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        """``timeout_s``: bound on one generator's load, waiting for its running sequences included."""
        self._learner = learner
        self._generators = generators
        self._timeout_s = timeout_s
        self._emit = on_event or (lambda *_, **__: None)
        self._parent: int | None = None

    async def publish(self) -> VersionRecord:
        begin = time.monotonic()
        weights = await self._learner.weights(self._parent)
        size = sum(tensor.nbytes for tensor in weights.tensors.values())
        self._told("export", begin, weights, bytes=size)
        begin = time.monotonic()
        shown = await asyncio.gather(*(self._load(i, weights) for i in range(len(self._generators))))
        self._told("load", begin, weights, bytes=size)
        begin = time.monotonic()
        for i, digests in enumerate(shown):
            compare(i, weights, digests)
        self._told("compare", begin, weights, tensors=len(weights.digests))
        self._parent = weights.record.version
        return weights.record

    async def _load(self, instance: int, weights: Weights) -> Mapping[str, str]:
        try:
            async with asyncio.timeout(self._timeout_s * 2):  # running sequences may take all of timeout_s to end
                return await self._generators[instance].load(weights)
        except TimeoutError:
            raise SyncError(
                f"generator {instance} did not take version {weights.record.version} within {self._timeout_s * 2:g} s "
                "(twice sync.timeout_s)"
            ) from None

    def _told(self, phase: str, begin: float, weights: Weights, **numbers: float) -> None:
        self._emit(phase, seconds=time.monotonic() - begin, version=weights.record.version, **numbers)


def compare(instance: int, weights: Weights, shown: Mapping[str, str]) -> None:
    """Raises `SyncError` naming the tensors whose digests differ or stand on one side only."""
    wrong = sorted(n for n in weights.digests.keys() | shown.keys() if weights.digests.get(n) != shown.get(n))
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SyncError(
            f"generator {instance} does not hold version {weights.record.version} after its load: "
            f"{', '.join(repr(name) for name in wrong[:5])}{more} differ from the learner's"
        )
