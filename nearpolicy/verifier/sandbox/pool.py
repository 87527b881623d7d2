"""Workers of the sandbox, as many at a time as asked for, and what becomes of a run that is lost.

A run that could not be had is tried again on another worker, twice. If it stays, a program that is known to be good
runs in the same place: if that one ends as it must, the run was lost because of what it did; if not, nothing is known
about it, and it is a failure of the sandbox. A run that got no processor time is compared with one that wants as much
beside it: under load a short one gets what it needs, and a program can see to it itself that it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import replace

from nearpolicy.verifier.sandbox.runs import Ended, OnFrame, Run
from nearpolicy.verifier.sandbox.zygotes import Worker, WorkerLost, WorkerRefused

ATTEMPTS = 3
RUNS_OF_A_WORKER = 10_000
"""Then it is replaced."""
CONTROL = Run(kind="program", program=b"print(int(input()) ** 2)", stdin=b"7\n")
CONTROL_ANSWER = b"49\n"
BUSY = b"while True: pass"
"""A control that takes all the processor time that its limits allow."""


class Workers:
    """A `Sandbox` of worker processes; starts them as they are needed. Use `close`."""

    def __init__(self, isolation: str, workers: int, packages: Sequence[str] = ()) -> None:
        """``packages``: folders and files that programs may import, beyond the standard library."""
        self._isolation = isolation
        self._packages = list(packages)
        self._idle: dict[bool, list[Worker]] = {False: [], True: []}
        # Test code waits for runs that it asks for: in places of its own, so that these always find one.
        self._places = {False: asyncio.Semaphore(workers), True: asyncio.Semaphore(workers)}
        self._workers = workers
        self._busy: set[Worker] = set()
        self._slot = secrets.randbelow(1 << 24)  # not those of another service on this machine
        self._closed = False

    async def run(self, run: Run, on_frame: OnFrame | None = None) -> Ended:
        async with self._places[on_frame is not None]:
            ended = await self._attempt(run, on_frame)
            for _ in range(ATTEMPTS - 1):
                if ended.failure is None:
                    return ended
                ended = await self._attempt(run, on_frame)
            if ended.failure is None:
                return ended
            return await (self._compared(run, on_frame) if ended.starved else self._blamed(ended))

    async def _compared(self, run: Run, on_frame: OnFrame | None) -> Ended:
        """Once more, with the control at the same time: the load may be another one a moment later."""
        control = Run(kind="program", program=BUSY, limits=run.limits)
        ended, other = await asyncio.gather(self._attempt(run, on_frame), self._attempt(control, None))
        if ended.starved and other.failure is None:
            stopped = f"{ATTEMPTS} times without processor time, which another program got"
            return replace(ended, failure=None, starved=False, stopped=stopped)
        return ended if ended.failure is None or ended.starved else await self._blamed(ended)

    async def _blamed(self, ended: Ended) -> Ended:
        control = await self._attempt(CONTROL, None)
        if control.failure is None and control.status == 0 and control.stdout == CONTROL_ANSWER:
            return replace(ended, failure=None, stopped=f"lost {ATTEMPTS} times where another program was not")
        return ended

    async def _attempt(self, run: Run, on_frame: OnFrame | None) -> Ended:
        """Each failed one ends its worker, so that the next has another."""
        try:
            worker = await self._worker(run.packages and bool(self._packages))
        except (WorkerRefused, OSError) as error:
            return Ended(failure=f"no worker could be started: {error}")
        healthy = False
        try:
            ended = await worker.run(run, on_frame)
            healthy = ended.failure is None and worker.runs < RUNS_OF_A_WORKER and not self._closed
            return ended
        except (WorkerLost, OSError) as error:
            return Ended(failure=str(error))
        finally:
            self._busy.discard(worker)
            if healthy:
                self._idle[worker.with_packages].append(worker)
            else:
                worker.kill()
                await asyncio.shield(worker.close())

    async def _worker(self, packages: bool) -> Worker:
        if self._closed:
            raise WorkerRefused("the sandbox is closed")
        if self._idle[packages]:
            worker = self._idle[packages].pop()
        else:
            others = self._idle[not packages]
            if others and len(self._busy) + len(self._idle[packages]) + len(others) >= 2 * self._workers:
                await others.pop().close()
            self._slot += 1
            worker = await Worker.start(self._isolation, self._slot, self._packages if packages else [])
            if self._closed:  # meanwhile
                await worker.close()
                raise WorkerRefused("the sandbox is closed")
        self._busy.add(worker)
        return worker

    async def close(self) -> None:
        """Kill them all; runs under way end as failures."""
        self._closed = True
        workers = [*self._busy, *self._idle[False], *self._idle[True]]
        self._idle = {False: [], True: []}
        for worker in workers:
            worker.kill()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(worker.close() for worker in workers))
