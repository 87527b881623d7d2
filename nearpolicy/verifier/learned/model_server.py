"""A model in a process of its own, asked in batches.

    ask() -> waiting -> (window_s, batch_size) -> its process: one batch -> answers
                                |  dead or over the limit: killed, a new one started, each request once more alone

Every request ends: with an answer, or with a `ModelFault` that says why. A request that ends the process alone is not
given a third chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpolicy.errors import ConfigError, NearpolicyError
from nearpolicy.verifier.workers import WorkerDied, WorkerProcess

MODULE = "nearpolicy.verifier.learned.model_main"
START_LIMIT_S = 600.0
"""A large model is read from a slow disk."""


class ModelFault(NearpolicyError):
    """A request without an answer."""


@dataclass(eq=False)
class _Waiting:
    request: Mapping[str, Any]
    answer: asyncio.Future[list[float]]


class ModelServer:
    """One model, one process, one batch at a time."""

    def __init__(
        self, setup: Mapping[str, Any], *, batch_size: int, window_s: float, timeout_s: float, name: str
    ) -> None:
        """``setup``: what `model_main` loads. ``name``: what messages call the model."""
        self._setup = json.dumps(setup).encode()
        self._batch_size = batch_size
        self._window_s = window_s
        self._timeout_s = timeout_s
        self._name = name
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._open: set[_Waiting] = set()
        """Every request that has no answer yet, wherever it is."""
        self._process: WorkerProcess | None = None
        self._loop: asyncio.Task[None] | None = None
        self.specials: tuple[str, ...] = ()
        """Tokens of its tokenizer that stand for no text."""

    async def start(self) -> None:
        """Returns when the model is loaded; `ConfigError` if it cannot be."""
        try:
            await self._launch()
        except WorkerDied as error:
            raise ConfigError(f"the process of {self._name} did not start: {error}") from None
        self._loop = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Requests under way end as faults."""
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        for each in self._open:
            self._fail(each, "was closed before it answered")
        if self._process is not None:
            await self._process.end()

    async def ask(self, request: Mapping[str, Any]) -> list[float]:
        """The numbers that the model gives."""
        if self._loop is None or self._loop.done():
            raise ModelFault(f"{self._name} is not running")
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._open.add(waiting)
        try:
            self._waiting.put_nowait(waiting)
            return await waiting.answer
        finally:
            self._open.discard(waiting)

    async def _serve(self) -> None:
        while True:
            batch = await self._batch()
            try:
                await self._answer(batch)
            except Exception as error:  # a broken process must not leave anybody waiting
                for each in batch:
                    self._fail(each, f"gave no answer: {error}")

    async def _batch(self) -> list[_Waiting]:
        batch = [await self._waiting.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._window_s):
                while len(batch) < self._batch_size:
                    batch.append(await self._waiting.get())
        return [each for each in batch if not each.answer.done()]  # some callers were cancelled meanwhile

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        if not batch:
            return
        why = await self._try(batch)
        if why is None:
            return
        for each in batch:
            if not each.answer.done() and (again := await self._try([each])) is not None:
                self._fail(each, again)

    async def _try(self, batch: Sequence[_Waiting]) -> str | None:
        """Give each its answer; or say what became of the process instead."""
        try:
            process = self._process if self._process is not None and self._process.alive else await self._launch()
            async with asyncio.timeout(self._timeout_s):
                answers = await process.exchange(json.dumps([each.request for each in batch]).encode())
        except TimeoutError:
            await self._end()
            return f"gave no answer within {self._timeout_s:g} s"
        except WorkerDied as error:
            await self._end()
            return f"gave no answer: {error}"
        except BaseException:  # cancelled: the process is busy with nobody's batch
            await self._end()
            raise
        for each, answer in zip(batch, answers, strict=True):
            if "error" in answer:
                self._fail(each, f"cannot score this: {answer['error']}")
            elif not each.answer.done():
                each.answer.set_result(answer["values"])
        return None

    async def _launch(self) -> WorkerProcess:
        await self._end()
        process, answer = await WorkerProcess.launched(MODULE, self._setup, START_LIMIT_S)
        if answer["status"] == "refused":
            await process.end()
            raise ConfigError(f"{self._name} cannot be loaded: {answer['message']}")
        self._process, self.specials = process, tuple(answer["specials"])
        return process

    async def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    def _fail(self, waiting: _Waiting, why: str) -> None:
        if not waiting.answer.done():
            waiting.answer.set_exception(ModelFault(f"{self._name} {why}"))
