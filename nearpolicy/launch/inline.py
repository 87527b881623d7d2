"""The inline runtime: the control plane on one event loop, the engine and the learner each on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from nearpolicy.learner.step import PolicyLearner
from nearpolicy.records import Batch, Row, StepReport
from nearpolicy.roles import Weights
from nearpolicy.waits import waiting


class RoleThread:
    """One long-lived thread; `torch.set_num_threads` acts on the thread that calls it, so a role keeps its own."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=settle, initargs=(threads,))

        self.is_busy = False
        """Whether it computes. May be asked from any thread; the answer may be old at once."""

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run there, in the order of the calls."""
        what = getattr(function, "func", function).__name__
        with waiting("the run", f"{what} on the thread of the {self._name}"):
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._busy_with, function, *arguments)

    def _busy_with(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.is_busy = True
        try:
            return function(*arguments)
        finally:
            self.is_busy = False

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def settle(threads: int) -> None:
    """What a thread needs for the same bits as any other: torch keeps both settings by thread."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


class LearnerInThread:
    """Implements `nearpolicy.launch.places.LearnerPlace` around a `PolicyLearner`."""

    def __init__(self, make: Callable[[], PolicyLearner], thread: RoleThread) -> None:
        """``make`` a learner with its initial weights."""
        self.inner = make()
        self._make = make
        self._thread = thread

    async def learn_ahead(self, rows: Sequence[Row]) -> None:
        await self._thread.call(self.inner.learn_ahead, rows)

    async def step(self, batch: Batch) -> StepReport:
        return await self._thread.call(self.inner.step, batch)

    async def weights(self, record_parent: int | None) -> Weights:
        return await self._thread.call(self.inner.weights, record_parent)

    @property
    def is_there(self) -> bool:
        """Not while it begins anew, and not if that failed."""
        return self.inner is not None

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def can_learn_ahead(self) -> bool:
        return self.inner.can_learn_ahead

    async def begin_anew(self) -> None:
        self.inner = None  # its memory is needed for the new one
        self.inner = await self._thread.call(self._make)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._thread.call(function, self.inner, *arguments)

    def close(self) -> None:
        self._thread.close()
