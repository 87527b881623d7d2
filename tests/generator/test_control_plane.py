"""The whole control plane over generators that compute nothing: members die, join and leave, and nothing is lost."""

from __future__ import annotations

import asyncio

from benchmarks.control import Controlled
from benchmarks.standins import Law, StandInHost
from nearpolicy.store.reader import RunReader

STEPS, PER_STEP, SIZE = 12, 16, (2, 4)
LAW = Law(mean=4, sigma=0.6, longest=16, fixed_s=0.002, each_s=0.0, slots=32, tick_s=0.002)


def test_a_run_whose_members_die_join_and_leave_trains_every_group_once(tmp_path):
    hosts = [StandInHost(f"host {i}", 2, LAW, speeds=(1.0, 3.0)) for i in range(3)]
    spare = StandInHost("spare", 4, LAW)

    async def happen(run: Controlled, step: int) -> None:
        if step == 2:
            hosts[0].die()
            while len(run.fleet.links) == 3:
                await asyncio.sleep(0)
        elif step == 4:
            link = run.fleet.join(spare)
            await link.load(await run.learner.weights(None))
        elif step == 6:
            link = next(link for link in run.fleet.links if link.member is hosts[1])
            await run.fleet.leave(link, within_s=0.0)
        elif step == 8:
            usage.update(run.fleet.usage())

    usage: dict[str, float] = {}

    async def play() -> None:
        async with asyncio.timeout(60):
            run = Controlled(tmp_path, hosts, SIZE, STEPS, per_step=PER_STEP, after_step=happen)
            await run.run()  # which looks itself at what is recorded
            assert [link.member.name for link in run.fleet.links] == ["host 2", "spare"]

    try:
        asyncio.run(play())
    finally:
        for host in [*hosts, spare]:
            host.close()
    with RunReader(tmp_path) as run:
        told = {kind: [e.numbers["name"] for e in run.events(kind)] for kind in ("join", "lost", "leave")}
        assert told == {"join": [*(h.name for h in hosts), "spare"], "lost": ["host 0"], "leave": ["host 1"]}
        assert len(run.steps()) == STEPS
    assert usage["generator/replicas"] == 6
