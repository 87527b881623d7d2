"""One, two or three real engines: the same tokens and log-probabilities, bit for bit, whoever computes them."""

from __future__ import annotations

import asyncio
import functools
import random

import families
import torch
from driving import Outcome, assert_same_bits, make_engine, make_request, run, weights_of

from nearpolicy.generator.fleet import Fleet
from nearpolicy.generator.host import Host
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.records import Finish
from nearpolicy.roles import Request

BOUND_S = 60
HELD = (0, 0)


def make_host(name: str, replicas: int = 1) -> Host:
    def make(on_event):
        policy = families.fresh()
        engine = make_engine(policy, families.exact_numerics(policy, 1), max_running=8, on_event=on_event)
        return EngineRunner(engine, on_event=on_event)

    return Host(name, [make] * replicas)


def requests() -> list[Request]:
    return [make_request(5 + 3 * i, id=f"g{i}", n=3, admission=i, max_tokens=4 + 7 * (i % 4)) for i in range(12)]


@functools.cache
def alone() -> Outcome:
    torch.set_num_threads(1)
    policy = families.fresh()
    return run(make_engine(policy, families.exact_numerics(policy, 1), max_running=8), requests())


def playing(scene, *hosts: Host, **options) -> None:
    async def within_the_bound() -> None:
        fleet = Fleet(**options)
        try:
            async with asyncio.timeout(BOUND_S):
                await scene(fleet, *[fleet.join(host, holds=HELD) for host in hosts])
        finally:
            await fleet.close()

    try:
        asyncio.run(within_the_bound())
    finally:
        for host in hosts:
            host.close()


async def completed(fleet: Fleet, wanted: list[Request]) -> Outcome:
    outcome: Outcome = {}

    async def collect(request: Request) -> None:
        async for completion in fleet.submit(request):
            assert completion.request == request.id
            assert (request.id, completion.sample) not in outcome
            outcome[request.id, completion.sample] = completion

    await asyncio.gather(*map(collect, wanted))
    return outcome


def test_tokens_do_not_depend_on_the_number_of_replicas_and_members():
    for layout in ([1], [1, 1], [2, 1]):
        hosts = [make_host(f"m{i}", replicas) for i, replicas in enumerate(layout)]

        async def scene(fleet, *links):
            assert_same_bits(await completed(fleet, requests()), alone())
            assert fleet.num_ignored == 0

        playing(scene, *hosts)
        assert all(replica._engine.sampled for host in hosts for replica in host.replicas)  # each did a part


def test_tokens_are_the_same_when_members_are_lost_and_join_in_the_middle():
    async def scene(fleet, *links):
        chance = random.Random(3)
        wanted, outcome, spare = requests(), {}, make_host("spare")
        ended = asyncio.Event()

        async def collect(request: Request) -> None:
            async for completion in fleet.submit(request):
                outcome[request.id, completion.sample] = completion
                ended.set()

        try:
            tasks = [asyncio.create_task(collect(request)) for request in wanted]
            for link in chance.sample(links, 2):
                ended.clear()
                await ended.wait()
                fleet.lost(link, "killed by the test")
            fleet.join(spare, holds=HELD)
            await asyncio.gather(*tasks)
        finally:
            spare.close()
        assert fleet.num_reissued > 0
        assert_same_bits(outcome, alone())

    playing(scene, *[make_host(f"m{i}") for i in range(3)])


def test_what_a_leaving_member_gives_back_goes_on_from_its_tokens_elsewhere():
    async def scene(fleet, first, second):
        task = asyncio.create_task(completed(fleet, requests()))
        while not any(h.workload().sampled for h in first.member.replicas):
            await asyncio.sleep(0)
        await fleet.leave(first, within_s=0.0)
        outcome = await task
        assert_same_bits(outcome, alone())
        assert all(completion.finish is not Finish.ABORTED for completion in outcome.values())
        assert [link.member.name for link in fleet.links] == ["m1"]

    playing(scene, make_host("m0"), make_host("m1"))


def test_a_member_that_joins_samples_only_once_it_has_shown_the_weights():
    async def scene(fleet):
        member = make_host("m0")
        try:
            link = fleet.join(member)
            task = asyncio.create_task(completed(fleet, requests()[:2]))
            await member.replicas[0].pause()  # a command behind any request that had been sent
            await member.replicas[0].resume()
            assert member.replicas[0].workload().sampled == 0
            await link.load(weights_of(families.fresh(), 0))
            outcome = await task
            assert_same_bits(outcome, {key: c for key, c in alone().items() if key[0] in ("g0", "g1")})
        finally:
            member.close()

    playing(scene)
