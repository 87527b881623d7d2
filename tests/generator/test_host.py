"""Engines behind batched calls: answers, events, and what becomes of an engine that cannot go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from driving import make_request

from nearpolicy.errors import EngineError
from nearpolicy.generator.host import Events, Host, ended
from nearpolicy.records import Finish
from nearpolicy.roles import Completion, Load, Placed, Request
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.writer import SqliteStore
from nearpolicy.telemetry.events import Recorder

BOUND_S = 60


class Scripted:
    """A generator that does what each request's id says."""

    def __init__(self, on_event) -> None:
        self.emit = on_event
        self.aborted: list[str] = []
        self.released = asyncio.Event()

    async def submit(self, request: Request) -> AsyncIterator[Completion]:
        word = request.id.split("@")[0]
        if word == "bad":
            raise ValueError("no such thing")
        if word == "dead":
            raise EngineError("the engine stopped")
        if word == "slow":
            await self.released.wait()
        for sample in range(request.n):
            self.emit("finish", sample=sample)
            yield ended(request, sample, Finish.STOP)

    async def abort(self, names) -> None:
        self.aborted += names
        self.released.set()

    async def sleep(self) -> None:
        self.is_asleep = True

    def workload(self) -> Load:
        return Load(slots=4)

    def close(self) -> None: ...


def placed(ticket: int, word: str, n: int = 1) -> Placed:
    return Placed(ticket=ticket, replica=0, request=make_request(3, id=word, n=n))


def playing(scene) -> None:
    async def within_the_bound() -> None:
        host = Host("h", [Scripted])
        try:
            async with asyncio.timeout(BOUND_S):
                await scene(host)
        finally:
            host.close()

    asyncio.run(within_the_bound())


def test_an_answer_carries_all_that_has_ended_under_its_own_name():
    async def scene(host):
        await host.submit_many([placed(1, "a", n=2), placed(2, "b")])
        told = await host.collect(0.0)
        assert [(ticket, c.request, c.sample) for ticket, c in told.completions] == [
            *((1, "a", 0), (1, "a", 1), (2, "b", 0)),
        ]
        assert [(place, kind) for place, kind, _ in told.events] == [(0, "finish")] * 3
        assert told.loads == {0: Load(slots=4)}

    playing(scene)


def test_every_replica_sleeps():
    async def scene(host: Host) -> None:
        await host.sleep()
        assert all(replica.is_asleep for replica in host.replicas)

    playing(scene)


def test_a_lone_answer_waits_for_no_company_where_nothing_runs_and_for_company_where_something_does():
    async def scene(host):
        await host.submit_many([placed(1, "a")])
        await host.collect(BOUND_S * 10)
        await host.submit_many([placed(2, "b"), placed(3, "slow")])
        answer = asyncio.create_task(host.collect(BOUND_S * 10))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not answer.done()
        await host.abort_many([3, 77])
        assert [ticket for ticket, _ in (await answer).completions] == [2, 3]
        assert host.replicas[0].aborted == ["slow@3"]

    playing(scene)


def test_a_request_that_cannot_be_carried_out_is_failed_completions_and_harms_no_other():
    async def scene(host):
        await host.submit_many([placed(1, "bad", n=2), placed(2, "a")])
        told = await host.collect(0.0)
        assert [(t, c.finish) for t, c in told.completions if t == 1] == [(1, Finish.FAILED)] * 2
        assert "ValueError: no such thing" in told.completions[0][1].reason

    playing(scene)


def test_an_engine_that_stops_is_told_after_what_had_ended_before():
    async def scene(host):
        await host.submit_many([placed(1, "a"), placed(2, "dead")])
        assert [ticket for ticket, _ in (await host.collect(0.0)).completions] == [1]
        with pytest.raises(EngineError, match="the engine stopped"):
            await host.collect(0.0)
        with pytest.raises(EngineError):
            await host.submit_many([placed(3, "a")])

    playing(scene)


def test_decode_steps_told_together_add_up_to_those_told_one_by_one(tmp_path):
    def steps():
        for i in range(10):
            numbers = {"batch": 3 + i % 2, "context_sum": 40 + i, "ms": 2.0, "sampled": 3, "running": 3}
            yield {"seconds": 0.002, "version": i // 7, **numbers}

    found = []
    for together in (True, False):
        events = Events()
        with SqliteStore.create(create_run_folder("", directory=tmp_path / str(together)), config={}) as store:
            recorder = Recorder(store, wall_anchor=store.wall_anchor)
            for fields in steps():
                events.tell(0, "decode_step", **fields)
                if not together:
                    [(_, kind, told)] = events.take()
                    recorder.event("generator", kind, **told)
            taken = events.take()
            assert len(taken) == (2 if together else 0)  # one for each version
            for _, kind, told in taken:
                recorder.event("generator", kind, **told)
            recorder.flush()
            store.flush()
            with RunReader(store.folder.path) as run:
                rows = run.query("SELECT kind, version, numbers FROM events ORDER BY rowid")
            found.append((rows, recorder.busy_times()["time/generate_s"]))
    (together, busy), (singly, busy_singly) = found
    assert together == singly and len(together) == 2
    assert busy == pytest.approx(busy_singly)
