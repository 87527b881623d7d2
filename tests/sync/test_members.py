"""Generators that miss a version get no new request, keep nobody waiting, and come back only with its digests."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
import torch

from nearpolicy.errors import EngineError, SyncError
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Shipment, Weights
from nearpolicy.sync.publisher import Publisher


class Learner:
    """One tensor, which lies where every member can fetch it."""

    def __init__(self, transport: str = "files") -> None:
        self.version, self.transport = 0, transport

    async def weights(self, record_parent: int | None) -> Weights:
        parts = digests({"w": torch.full((4,), float(self.version))})
        record = VersionRecord(
            lineage=0, version=self.version, updates=self.version, fingerprint=fingerprint(parts), parent=record_parent
        )
        shipment = Shipment(
            transport=self.transport, lineage=0, version=self.version, entries=(), digests=parts, place=self.version
        )
        return Weights(record=record, tensors={}, digests=parts, shipment=shipment)


class Member:
    """Takes what it is given, unless it is told otherwise."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self.error: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.wrong = 0.0

    async def load(self, weights: Weights):
        self.loads.append(weights.record.version)
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        return digests({"w": torch.full((4,), weights.shipment.place + self.wrong)})


class Table:
    """A publisher of three members, and what it tells."""

    def __init__(self, timeout_s: float = 30.0, transport: str = "files", **options) -> None:
        self.learner = Learner(transport)
        self.members = {name: Member() for name in "abc"}
        self.told: list[tuple[str, str]] = []
        self.publisher = Publisher(
            self.learner,
            self.members,
            timeout_s=timeout_s,
            on_behind=lambda name, why: self.told.append((name, why)),
            **options,
        )

    async def publish(self, version: int) -> VersionRecord:
        self.learner.version = version
        return await self.publisher.publish()

    def sampling(self) -> str:
        return "".join(name for name in self.members if self.publisher.may_sample(name))


def test_a_member_may_sample_from_when_it_has_shown_the_version():
    async def scenario():
        table = Table()
        assert table.sampling() == "" and set(table.publisher.behind) == set("abc")
        await table.publish(0)
        assert table.sampling() == "abc" and table.publisher.behind == {} and table.told == []

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["raises", "dies", "shows_other_weights"])
def test_a_member_that_fails_is_behind_by_name_and_the_next_publication_takes_it_in_again(how):
    async def scenario():
        table = Table()
        await table.publish(0)
        member = table.members["b"]
        member.error = {"raises": SyncError("'w' does not fit"), "dies": ConnectionError("gone")}.get(how)
        member.wrong = float(how == "shows_other_weights")
        assert (await table.publish(1)).version == 1
        assert table.sampling() == "ac"
        [(name, why)] = table.told
        expected = {"raises": "'w' does not fit", "dies": "gone", "shows_other_weights": "b does not hold version 1"}
        assert name == "b" and expected[how] in why and table.publisher.behind == {"b": why}
        member.error, member.wrong = None, 0.0
        await table.publish(2)
        assert table.sampling() == "abc" and member.loads == [0, 1, 2] and len(table.told) == 1

    asyncio.run(scenario())


def test_a_member_that_failed_samples_nothing_while_the_others_still_load():
    async def scenario():
        table = Table()
        await table.publish(0)
        table.members["a"].hold.clear()
        table.members["b"].error = ConnectionError("gone")
        publication = asyncio.create_task(table.publish(1))
        while "gone" not in table.publisher.behind.get("b", ""):
            await asyncio.sleep(0)
        assert not publication.done() and not table.publisher.may_sample("b")
        table.members["a"].hold.set()
        await publication
        assert table.sampling() == "ac"

    asyncio.run(scenario())


def test_a_member_that_does_not_answer_delays_one_publication_and_no_further():
    async def scenario():
        table = Table(timeout_s=0.05)
        await table.publish(0)
        late = table.members["c"]
        late.hold.clear()
        await table.publish(1)
        assert table.sampling() == "ab" and "did not take version 1 within 0.1 s" in table.publisher.behind["c"]
        table.publisher._timeout_s = 30.0  # now a wait for it would be seen
        await asyncio.wait_for(table.publish(2), 10)
        assert table.sampling() == "ab" and late.loads == [0, 1, 2]
        late.hold.set()
        while not table.publisher.may_sample("c"):
            await asyncio.sleep(0)
        await table.publish(3)
        assert table.sampling() == "abc"
        await table.publisher.close()

    asyncio.run(scenario())


def test_a_load_that_cannot_be_stopped_blocks_nobody_and_counts_for_nothing_when_it_ends():
    async def scenario():
        table = Table(timeout_s=0.05)
        await table.publish(0)
        stubborn = table.members["c"]
        go, ended = asyncio.Event(), asyncio.Event()

        async def load(weights: Weights):
            while not go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await go.wait()
            ended.set()
            return weights.digests

        stubborn.load = load
        await table.publish(1)
        assert table.sampling() == "ab" and "c can neither load nor be stopped" in table.publisher.behind["c"]
        del stubborn.load
        stubborn.error = ConnectionError("gone")
        await table.publish(2)
        go.set()
        await ended.wait()
        await asyncio.sleep(0)
        assert table.sampling() == "ab"

    asyncio.run(scenario())


def test_a_publication_that_nobody_takes_fails_with_an_error_of_a_member_and_changes_nothing():
    async def scenario():
        table = Table()
        await table.publish(0)
        for member in table.members.values():
            member.error = SyncError("'w' does not fit")
        with pytest.raises(SyncError, match="'w' does not fit"):
            await table.publish(1)
        assert table.sampling() == ""
        for member in table.members.values():
            member.error = None
        assert (await table.publish(2)).parent == 0 and table.sampling() == "abc"

    asyncio.run(scenario())


def test_a_member_catches_up_between_publications_where_the_transport_has_the_version():
    async def scenario():
        table = Table()
        await table.publish(0)
        table.members["b"].error = ConnectionError("gone")
        await table.publish(1)
        assert not await table.publisher.catch_up("b")
        table.members["b"].error = None
        assert await table.publisher.catch_up("b") and table.sampling() == "abc"
        assert await table.publisher.catch_up("b") and table.members["b"].loads == [0, 1, 1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["files", "shared_memory", "broadcast"])
def test_a_member_that_joins_samples_once_it_has_shown_the_present_version(transport):
    async def scenario():
        table = Table(transport=transport)
        assert not await table.publisher.add("d", Member())
        assert table.publisher.behind["d"] == "nothing has been published yet"
        await table.publish(0)
        assert table.publisher.may_sample("d")
        liar = Member()
        liar.wrong = 1.0
        assert not await table.publisher.add("liar", liar) and not table.publisher.may_sample("liar")
        assert await table.publisher.add("e", Member()) and table.publisher.may_sample("e")
        await table.publish(1)
        assert table.publisher.may_sample("e") and set(table.publisher.behind) == {"liar"}
        with pytest.raises(ValueError, match="'e' already"):
            await table.publisher.add("e", Member())

    asyncio.run(scenario())


def test_a_version_that_is_not_to_be_had_any_more_comes_from_the_learner_unless_it_has_gone_on():
    async def scenario():
        table = Table(transport="broadcast")
        await table.publish(0)
        table.learner.version = 1
        assert not await table.publisher.add("d", Member())
        assert "not to be had any more" in table.publisher.behind["d"]
        await table.publish(1)
        assert table.publisher.may_sample("d")

    asyncio.run(scenario())


def test_a_member_that_joins_does_not_wait_for_a_version_that_is_not_handed_over_any_more():
    async def scenario():
        async def deliver(weights, members, awaited):
            if members == ["d"]:
                raise SyncError("version 0 cannot be handed over any more")
            return members

        table = Table(timeout_s=300.0, transport="broadcast", deliver=deliver)
        await table.publish(0)
        new = Member()
        new.hold.clear()
        assert not await asyncio.wait_for(table.publisher.add("d", new), 30)
        assert "version 0 cannot be handed over any more" in table.publisher.behind["d"] and new.loads == [0]
        new.hold.set()
        await table.publish(1)
        assert table.publisher.may_sample("d") and new.loads == [0, 1]

    asyncio.run(scenario())


def test_a_member_that_joins_during_a_publication_gets_its_version_afterwards():
    async def scenario():
        table = Table()
        await table.publish(0)
        table.members["a"].hold.clear()
        publication = asyncio.create_task(table.publish(1))
        while table.members["a"].loads != [0, 1]:
            await asyncio.sleep(0)
        new = Member()
        joining = asyncio.create_task(table.publisher.add("d", new))
        await asyncio.sleep(0)
        assert new.loads == [] and not table.publisher.may_sample("d")
        table.members["a"].hold.set()
        await publication
        assert await joining and new.loads == [1] and table.publisher.may_sample("d")

    asyncio.run(scenario())


def test_a_publication_takes_over_a_member_that_is_catching_up():
    async def scenario():
        table = Table()
        await table.publish(0)
        slow = Member()
        slow.hold.clear()
        joining = asyncio.create_task(table.publisher.add("d", slow))
        while slow.loads != [0]:
            await asyncio.sleep(0)
        publication = asyncio.create_task(table.publish(1))
        while slow.loads != [0, 1]:
            await asyncio.sleep(0)
        slow.hold.set()
        await publication
        await joining
        assert table.publisher.may_sample("d")

    asyncio.run(scenario())


def test_a_member_that_leaves_in_the_middle_of_its_load_is_not_waited_for():
    async def scenario():
        table = Table()
        await table.publish(0)
        table.members["b"].hold.clear()
        publication = asyncio.create_task(table.publish(1))
        while table.members["b"].loads != [0, 1]:
            await asyncio.sleep(0)
        await table.publisher.remove("b")
        await asyncio.wait_for(publication, 10)
        assert table.sampling() == "ac" and table.publisher.behind == {}
        await table.publisher.remove("b")

    asyncio.run(scenario())


def test_without_a_generator_a_publication_says_so():
    async def scenario():
        with pytest.raises(SyncError, match="no generator to take version 3"):
            learner = Learner()
            learner.version = 3
            await Publisher(learner, [], timeout_s=1).publish()

    asyncio.run(scenario())


def test_weights_of_a_collective_are_delivered_while_members_load_and_late_ones_are_not_waited_for():
    async def scenario():
        delivered = []

        async def deliver(weights, members, awaited):
            delivered.append((weights.record.version, list(members), list(awaited)))
            while not all(m.loads[-1:] == [weights.record.version] for m in table.members.values()):
                await asyncio.sleep(0)  # comes to an end only if all load at the same time
            return members

        table = Table(timeout_s=0.05, transport="broadcast", deliver=deliver)
        await table.publish(0)
        table.members["c"].hold.clear()
        await table.publish(1)
        await table.publish(2)
        assert delivered == [(0, list("abc"), list("abc")), (1, list("abc"), list("abc")), (2, list("abc"), list("ab"))]
        await table.publisher.close()

    asyncio.run(scenario())


def test_a_delivery_that_reaches_nobody_is_the_error_of_the_publication():
    async def scenario():
        async def deliver(weights, members, awaited):
            raise SyncError("version 0 reached no generator")

        table = Table(transport="broadcast", deliver=deliver)
        for member in table.members.values():
            member.error = SyncError("nothing came")
        with pytest.raises(SyncError, match="version 0 reached no generator"):
            await table.publish(0)

    asyncio.run(scenario())


def test_a_rollback_to_an_older_version_of_another_lineage_counts_as_another_one():
    async def scenario():
        table = Table()
        await table.publish(4)
        table.members["c"].error = ConnectionError("gone")
        plain = table.learner.weights

        async def other_lineage(parent):
            weights = await plain(parent)
            return replace(weights, record=replace(weights.record, lineage=1))

        table.learner.weights = other_lineage
        await table.publish(4)
        assert table.sampling() == "ab"

    asyncio.run(scenario())


def test_a_version_that_all_members_die_of_waits_for_those_that_come_in_their_place():
    async def scenario():
        table = Table(lost_come_back=True)
        for member in table.members.values():
            member.error = EngineError("it was lost")
        assert (await table.publish(3)).version == 3 and table.sampling() == ""
        for name in "abc":
            await table.publisher.remove(name)
        assert (await table.publish(4)).parent == 3
        assert await table.publisher.add("d", Member())

    asyncio.run(scenario())


def test_members_that_are_there_and_fail_end_the_publication_though_lost_ones_come_back():
    async def scenario():
        table = Table(lost_come_back=True)
        for member in table.members.values():
            member.error = EngineError("it was lost")
        table.members["a"].error = SyncError("'w' does not fit")
        with pytest.raises(SyncError, match="does not fit"):
            await table.publish(0)

    asyncio.run(scenario())


def test_weights_that_were_lost_with_their_sender_are_asked_for_once_more():
    async def scenario():
        table, asked = Table(), []
        plain = table.learner.weights

        async def weights(parent):
            asked.append(parent)
            for member in table.members.values():
                member.error = SyncError("gone") if len(asked) == 1 else None
            return await plain(parent)

        table.learner.weights = weights
        await table.publish(0)
        assert table.sampling() == "abc" and len(asked) == 2

    asyncio.run(scenario())


def test_other_weights_than_were_sent_are_not_asked_for_again():
    async def scenario():
        table = Table()
        for member in table.members.values():
            member.wrong = 1.0
        with pytest.raises(SyncError, match="'w'"):
            await table.publish(0)
        assert all(member.loads == [0] for member in table.members.values())

    asyncio.run(scenario())
