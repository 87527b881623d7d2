"""The slow path: what a run that does not come to its end leaves."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from hostile import why_not

from nearpolicy.verifier.sandbox import bubblewrap
from nearpolicy.verifier.sandbox.bubblewrap import Bubblewrap
from nearpolicy.verifier.sandbox.runs import Run

if (REASON := why_not("bubblewrap")) is not None:
    pytest.skip(REASON, allow_module_level=True)

SLEEPS = Run(kind="program", program=b"import time; time.sleep(30)")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_process_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    def none_left(*_):
        raise OSError("no more processes")

    async def run():
        before = descriptors()
        ended = [await Bubblewrap(1).run(SLEEPS) for _ in range(3)]
        return ended, descriptors() - before

    monkeypatch.setattr(bubblewrap, "_spawned", none_left)
    ended, more = asyncio.run(run())
    assert all("no more processes" in each.failure for each in ended)
    assert more == 0


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.2])
def test_a_run_that_is_cancelled_leaves_no_process_and_no_descriptor(after_s):
    async def run():
        descriptors_before, children_before = descriptors(), children()
        running = asyncio.create_task(Bubblewrap(1).run(SLEEPS))
        await asyncio.sleep(after_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        deadline = time.monotonic() + 2
        while children() != children_before and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return children() == children_before, descriptors() - descriptors_before

    alone, more = asyncio.run(run())
    assert alone and more == 0
