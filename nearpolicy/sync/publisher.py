"""Publishing: export with digests, load on every generator, compare what each one shows.

The embedded engine compares by itself too, before it samples; here every generator is asked, whatever it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import require_held
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Generator, Weights
from nearpolicy.waits import waiting


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
        adapter_only: bool = False,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        """``timeout_s``: bound on each of two phases that a generator goes through: its running sequences end
        (``generator.on_sync`` finish), then it loads. What is watched here is both together. ``adapter_only``: of a
        learner that trains an adapter send nothing else."""
        self._learner = learner
        self._generators = generators
        self._timeout_s = timeout_s
        self._adapter_only = adapter_only
        self._emit = on_event or (lambda *_, **__: None)
        self._parent: int | None = None

    async def publish(self) -> VersionRecord:
        begin = time.monotonic()
        weights = await self._learner.weights(self._parent)
        if self._adapter_only:
            weights = replace(weights, tensors={})
        size = weights.nbytes
        self._told("export", begin, weights, bytes=size)
        begin = time.monotonic()
        shown = await asyncio.gather(*(self._load(i, weights) for i in range(len(self._generators))))
        self._told("load", begin, weights, bytes=size)
        begin = time.monotonic()
        for i, digests in enumerate(shown):
            require_held(f"generator {i}", weights.record.version, weights.digests, digests)
        self._told("compare", begin, weights, tensors=len(weights.digests))
        self._parent = weights.record.version
        return weights.record

    async def _load(self, instance: int, weights: Weights) -> Mapping[str, str]:
        try:
            async with asyncio.timeout(self._timeout_s * 2):
                with waiting("publication", f"generator {instance} to take version {weights.record.version}"):
                    return await self._generators[instance].load(weights)
        except TimeoutError:
            raise SyncError(
                f"generator {instance} did not take version {weights.record.version} within {self._timeout_s * 2:g} s "
                "(twice sync.timeout_s)"
            ) from None

    def _told(self, phase: str, begin: float, weights: Weights, **numbers: float) -> None:
        self._emit(phase, seconds=time.monotonic() - begin, version=weights.record.version, **numbers)
