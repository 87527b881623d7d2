"""Members that come, go, die, repeat themselves and come too late: every sample comes back once, and says the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest
from driving import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.errors import ConfigError, EngineError, RunFolderError, SyncError
from nearpolicy.generator.fleet import Fleet, Link
from nearpolicy.records import Finish, VersionRecord
from nearpolicy.roles import Capabilities, Completion, Load, Placed, Request, Told, Weights
from nearpolicy.waits import waits

BOUND_S = 60
HELD = (0, 0)
DIGESTS = {"w": "1"}


def token_of(request: Request, sample: int, position: int) -> int:
    """What exact numerics say, whoever computes it."""
    return hash((request.seed, request.admission, sample, position)) % 1000


class FakeMember:
    """Does what a test says, one token or one call at a time."""

    def __init__(self, name: str = "m", *, slots: int = 100, numerics: str = "exact", resumable: bool = True) -> None:
        self.name, self.num_replicas = name, 1
        self.slots, self.numerics, self.resumable = slots, numerics, resumable
        self.running: dict[tuple[int, int], tuple[Request, list[int]]] = {}
        """By ticket and sample: the request, the tokens."""
        self.submitted: list[Placed] = []
        self.calls: list[str] = []
        self.drawn = 0
        self.version = 0
        self.shows = DIGESTS
        self.error: Exception | None = None
        self.deaf = False
        self._told: list[tuple[int, Completion]] = []
        self._news = asyncio.Event()

    async def submit_many(self, placed):
        self._call("submit_many")
        self.submitted += placed
        for each in placed:
            for sample in range(each.request.n):
                begun = each.request.begun.get(sample)
                tokens = [] if begun is None else begun.token_ids.tolist()
                assert tokens == [token_of(each.request, sample, i) for i in range(len(tokens))]
                self.running[each.ticket, sample] = each.request, tokens
                if len(tokens) == each.request.sampling.max_tokens:  # it had ended before
                    self.end(each.ticket, sample, Finish.LENGTH)

    async def abort_many(self, tickets):
        self._call("abort_many")
        for key in [key for key in self.running if key[0] in tickets]:
            self.end(*key, Finish.ABORTED)

    async def collect(self, spacing_s):
        self._call("collect")
        await self._news.wait()
        self._news.clear()
        if self.error is not None:
            raise self.error
        told, self._told = self._told, []
        load = Load(slots=self.slots, running=len(self.running), sampled=self.drawn, busy_s=float(self.drawn))
        return Told(completions=told, loads={0: load})

    async def pause(self):
        self._call("pause")

    async def sleep(self):
        self._call("sleep")

    async def resume(self):
        self._call("resume")

    async def load(self, weights):
        self._call("load")
        self.version = weights.record.version
        return self.shows

    def capabilities(self):
        return Capabilities(
            numerics=self.numerics,
            seeded=True,
            batch_invariant=True,
            resumable=self.resumable,
            in_flight_update=True,
            prefix_cache=True,
            adapters=True,
            proof="fingerprint",
        )

    def step(self) -> None:
        """A token for everybody."""
        for (ticket, sample), (request, tokens) in list(self.running.items()):
            tokens.append(token_of(request, sample, len(tokens)))
            self.drawn += 1
            if len(tokens) == request.sampling.max_tokens:
                self.end(ticket, sample, Finish.LENGTH)
        self._news.set()

    def end(self, ticket: int, sample: int, finish: Finish) -> None:
        request, tokens = self.running.pop((ticket, sample))
        count = len(tokens)
        completion = Completion(
            request=request.id,
            sample=sample,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(count, -1, np.float32),
            versions=np.zeros(count, np.int32),
            finish=finish,
        )
        self.tell(ticket, completion)

    def tell(self, ticket: int, completion: Completion) -> None:
        self._told.append((ticket, completion))
        self._news.set()

    def die(self, error: Exception) -> None:
        self.error = error
        self._news.set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error


class Scene:
    """A fleet, and everything that was asked of it."""

    def __init__(self, **options) -> None:
        self.events: list[tuple[str, dict]] = []
        self.fleet = Fleet(on_event=lambda kind, **fields: self.events.append((kind, fields)), **options)
        self.came: dict[str, list[Completion]] = {}
        self.tasks: dict[str, asyncio.Task] = {}

    def join(self, member: FakeMember, holds=HELD) -> Link:
        return self.fleet.join(member, holds=holds)

    def ask(self, index: int, **options) -> Request:
        request = make_request(8, id=str(index), admission=index, **{"n": 2, "max_tokens": 4, **options})
        self.came[request.id] = []

        async def collect() -> None:
            async for completion in self.fleet.submit(request):
                self.came[request.id].append(completion)

        self.tasks[request.id] = asyncio.create_task(collect())
        return request

    async def settle(self) -> None:
        """Until nothing moves without the members."""
        for _ in range(30):
            await asyncio.sleep(0)
        while self.fleet._flush_planned:  # requests that keep coming are gathered for two milliseconds
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

    async def run_out(self, *members: FakeMember) -> None:
        for _ in range(200):
            await self.settle()
            if all(task.done() for task in self.tasks.values()):
                return
            for member in members:
                member.step()
        pytest.fail("requests do not end")

    def finishes(self, index: int) -> list[Finish]:
        return [completion.finish for completion in self.came[str(index)]]

    def require_whole(self, request: Request) -> None:
        came = self.came[request.id]
        assert sorted(c.sample for c in came) == list(range(request.n))
        for completion in came:
            assert completion.finish is Finish.LENGTH, completion.reason
            expected = [token_of(request, completion.sample, i) for i in range(request.sampling.max_tokens)]
            assert completion.token_ids.tolist() == expected


def playing(scene: Callable, **options) -> None:
    async def within_the_bound() -> None:
        stage = Scene(**options)
        try:
            async with asyncio.timeout(BOUND_S):
                await scene(stage)
        finally:
            await stage.fleet.close()
            await asyncio.gather(*stage.tasks.values(), return_exceptions=True)

    asyncio.run(within_the_bound())
    assert not [wait for wait in waits() if wait.who == "requests"]


def test_requests_of_one_turn_go_out_in_one_call_to_each_member():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        stage.join(first), stage.join(second)
        asked = [stage.ask(index) for index in range(20)]
        await stage.settle()
        assert first.calls.count("submit_many") == second.calls.count("submit_many") == 1
        assert len(first.submitted) == len(second.submitted) == 10
        await stage.run_out(first, second)
        for request in asked:
            stage.require_whole(request)
        assert stage.fleet.calls < 20

    playing(scene)


def test_a_lost_member_s_requests_go_on_elsewhere_and_what_was_delivered_is_not_made_again():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        link = stage.join(first)
        request = stage.ask(0, n=3)
        await stage.settle()
        first.step()
        [placed] = first.submitted
        for position in range(1, 4):
            first.running[placed.ticket, 1][1].append(token_of(request, 1, position))
        first.end(placed.ticket, 1, Finish.LENGTH)
        await stage.settle()
        assert len(stage.came["0"]) == 1
        stage.join(second)
        first.die(RuntimeError("the actor died"))
        await stage.settle()
        assert not link.is_there and stage.fleet.num_reissued == 1
        assert list(second.submitted[0].request.begun) == [1]
        await stage.run_out(second)
        stage.require_whole(request)
        assert second.drawn == 8  # two samples of four tokens
        assert [(kind, fields["name"], fields["again"]) for kind, fields in stage.events if kind == "lost"] == [
            ("lost", "a", 1)
        ]

    playing(scene)


def test_where_generators_cannot_go_on_from_tokens_all_is_made_again_and_delivered_once():
    async def scene(stage):
        first, second = FakeMember("a", resumable=False), FakeMember("b", resumable=False)
        stage.join(first)
        request = stage.ask(0)
        await stage.settle()
        first.running[first.submitted[0].ticket, 0][1].extend(token_of(request, 0, i) for i in range(4))
        first.end(first.submitted[0].ticket, 0, Finish.LENGTH)
        await stage.settle()
        stage.join(second)
        first.die(RuntimeError("gone"))
        await stage.run_out(second)
        stage.require_whole(request)
        assert not second.submitted[0].request.begun and stage.fleet.num_ignored == 1

    playing(scene)


def test_what_comes_twice_or_from_a_member_thought_dead_is_ignored():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        link = stage.join(first)
        request = stage.ask(0, n=1)
        await stage.settle()
        stage.fleet.lost(link, "a test says so")
        again = stage.join(first)  # it was alive: it comes back, and tells what nobody waits for any more
        stage.fleet.lost(again, "once more")
        stage.join(second)
        await stage.settle()
        [placed] = second.submitted
        stale = first.submitted[0].ticket
        assert stale != placed.ticket
        second.step()
        copy = second.running[placed.ticket, 0][1]
        second.tell(stale, Completion(**_fields(request, [1, 2])))
        await stage.settle()
        assert stage.came["0"] == [] and stage.fleet.num_ignored == 1
        await stage.run_out(second)
        second.tell(placed.ticket, Completion(**_fields(request, copy)))
        await stage.settle()
        stage.require_whole(request)
        assert stage.fleet.num_ignored == 2

    playing(scene)


def _fields(request: Request, tokens: list[int]) -> dict:
    count = len(tokens)
    arrays = {"token_ids": np.array(tokens), "logprobs": np.zeros(count), "versions": np.zeros(count)}
    return {"request": request.id, "sample": 0, "finish": Finish.STOP, **arrays}


def test_a_request_that_kills_whoever_takes_it_fails_by_name_after_some_tries():
    async def scene(stage):
        stage.ask(0)
        for index in range(4):
            member = FakeMember(f"m{index}")
            stage.join(member)
            await stage.settle()
            assert len(member.submitted) == 1
            member.die(RuntimeError("out of memory"))
            await stage.settle()
        assert stage.finishes(0) == [Finish.FAILED] * 2
        reason = stage.came["0"][0].reason
        assert "issued 4 times" in reason and "m3 was lost" in reason and "out of memory" in reason

    playing(scene)


def test_a_request_that_nobody_can_take_waits_under_a_name_and_then_fails():
    async def scene(stage):
        stage.ask(0, version=3)
        await stage.settle()
        assert [wait.what for wait in waits() if wait.who == "requests"] == ["a generator that holds version 3"]
        await stage.tasks["0"]
        assert stage.finishes(0) == [Finish.FAILED] * 2
        assert "a generator that holds version 3 for 0.01 s: none is there" in stage.came["0"][0].reason

    playing(scene, patience_s=0.01)


def test_nobody_waits_under_a_name_for_a_request_that_was_aborted_or_left():
    async def scene(stage):
        stage.ask(0), stage.ask(1)
        await stage.settle()
        assert [wait.what for wait in waits() if wait.who == "requests"] == ["a generator"]
        await stage.fleet.abort(["0"])
        stage.tasks["1"].cancel()
        await stage.settle()
        assert stage.finishes(0) == [Finish.ABORTED] * 2
        assert not [wait for wait in waits() if wait.who == "requests"]

    playing(scene)


def test_a_request_pinned_to_a_version_that_is_over_fails_at_once():
    async def scene(stage):
        stage.join(FakeMember(), holds=(0, 5))
        stage.ask(0, version=3)
        await stage.settle()
        assert "version 3 was asked for" in stage.came["0"][0].reason

    playing(scene)


def test_a_member_that_missed_a_version_gets_nothing_new_and_ends_what_it_has():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        behind, ahead = stage.join(first), stage.join(second)
        old = [stage.ask(index) for index in range(2)]
        await stage.settle()
        assert len(first.submitted) == len(second.submitted) == 1
        await ahead.load(weights(1))
        new = [stage.ask(index) for index in range(2, 6)]
        await stage.settle()
        assert len(first.submitted) == 1 and len(second.submitted) == 5
        pinned = stage.ask(9, version=0)  # its episode was admitted under a version that the first one holds
        await stage.settle()
        assert len(first.submitted) == 2
        await stage.run_out(first, second)
        for request in [*old, *new, pinned]:
            stage.require_whole(request)
        await behind.load(weights(1))
        stage.ask(10)
        stage.ask(11)
        await stage.settle()
        assert len(first.submitted) == 3

    playing(scene)


def test_a_member_that_shows_other_weights_gives_back_what_it_has():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        link, _ = stage.join(first), stage.join(second)
        asked = [stage.ask(index) for index in range(4)]
        await stage.settle()
        first.shows = {"w": "2"}
        with pytest.raises(SyncError, match="a does not hold version 1"):
            await link.load(weights(1))
        await stage.settle()
        assert not first.running
        await stage.run_out(second)
        for request in asked:
            stage.require_whole(request)
        stage.ask(9)
        await stage.settle()
        assert len(first.submitted) == 2

    playing(scene)


def test_a_member_that_dies_in_a_load_is_lost_and_says_so():
    async def scene(stage):
        first = FakeMember("a")
        link = stage.join(first)
        first.error = RuntimeError("the actor died")
        with pytest.raises(EngineError, match="a was lost: RuntimeError: the actor died"):
            await link.load(weights(1))
        assert stage.fleet.links == ()

    playing(scene)


def test_a_silent_member_is_lost_after_a_bound():
    async def scene(stage):
        silent, other = FakeMember("a"), FakeMember("b")
        stage.join(silent)
        request = stage.ask(0)
        while stage.fleet.links:
            await asyncio.sleep(0.001)
        assert "no answer within 0.02 s" in next(f["reason"] for kind, f in stage.events if kind == "lost")
        stage.fleet._silence_s = BOUND_S
        stage.join(other)
        await stage.run_out(other)
        stage.require_whole(request)

    playing(scene, silence_s=0.02)


def test_an_abort_ends_what_waits_what_runs_and_what_is_issued_again():
    async def scene(stage):
        member = FakeMember("a", slots=1)
        link = stage.join(member)
        member.step()
        await stage.settle()
        for index in range(3):
            stage.ask(index)
        await stage.settle()
        assert len(member.submitted) < 3
        await stage.fleet.abort(["2", "unknown"])
        await stage.settle()
        assert stage.finishes(2) == [Finish.ABORTED] * 2
        member.step()
        await stage.fleet.abort(["0"])
        await stage.settle()
        assert stage.finishes(0) == [Finish.ABORTED] * 2
        assert [len(c.token_ids) for c in stage.came["0"]] == [1, 1]
        await stage.settle()
        abort = asyncio.create_task(stage.fleet.abort(["1"]))
        await asyncio.sleep(0)
        stage.fleet.lost(link, "meanwhile")
        await abort
        await stage.settle()
        assert stage.finishes(1) == [Finish.ABORTED] * 2
        assert stage.fleet.num_reissued == 0

    playing(scene)


def test_leaving_the_iterator_early_aborts_what_is_left():
    async def scene(stage):
        member = FakeMember()
        stage.join(member)
        stage.ask(0)
        await stage.settle()
        stage.tasks["0"].cancel()
        await stage.settle()
        assert not member.running and member.calls.count("abort_many") == 1
        request = stage.ask(0)  # its name is free again
        await stage.run_out(member)
        stage.require_whole(request)

    playing(scene)


def test_a_member_that_leaves_ends_what_it_can_and_gives_back_the_rest():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        link = stage.join(first)
        short, long = stage.ask(0, n=1, max_tokens=2), stage.ask(1, n=2, max_tokens=30)
        await stage.settle()
        stage.join(second)
        leaving = asyncio.create_task(stage.fleet.leave(link, within_s=0.05))
        await stage.settle()
        stage.ask(2)
        first.step(), first.step()
        await leaving
        assert stage.fleet.links[0].member is second and len(first.submitted) == 2
        await stage.run_out(second)
        stage.require_whole(short), stage.require_whole(long)
        assert first.drawn == 2 + 4 and second.drawn == 2 * 28 + 2 * 4

    playing(scene)


def test_pause_reaches_all_members_and_holds_back_what_has_not_gone_out():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        stage.join(first), stage.join(second)
        await stage.fleet.pause()
        request = stage.ask(0)
        await stage.settle()
        assert first.calls.count("pause") == second.calls.count("pause") == 1
        assert not first.submitted and not second.submitted
        first.error = RuntimeError("dead")  # one that is lost samples nothing either
        await stage.fleet.resume()
        await stage.run_out(second)
        stage.require_whole(request)

    playing(scene)


def test_all_promise_what_the_weakest_does_and_none_may_join_that_promises_less():
    async def scene(stage):
        stage.join(FakeMember("a")), stage.join(FakeMember("b", resumable=False))
        assert not stage.fleet.capabilities().resumable
        stage.join(FakeMember("c"))
        with pytest.raises(ConfigError, match="d promises less"):
            stage.join(FakeMember("d", numerics="fast"))

    playing(scene)


def test_an_error_that_a_person_can_repair_ends_all():
    async def scene(stage):
        member = FakeMember()
        stage.join(member)
        stage.ask(0)
        await stage.settle()
        member.die(RunFolderError("the disk is full"))
        with pytest.raises(RunFolderError, match="the disk is full"):
            await stage.tasks["0"]
        with pytest.raises(RunFolderError):
            await anext(stage.fleet.submit(make_request(4, id="x")))

    playing(scene)


def test_a_probe_goes_out_before_what_waits():
    async def scene(stage):
        member = FakeMember(slots=1)
        stage.join(member)
        member.step()
        await stage.settle()
        for index in range(5):
            stage.ask(index, n=1)
        await stage.settle()
        stage.ask(99, n=1, purpose="probe")
        await stage.settle()
        taken = len(member.submitted)
        while len(member.submitted) == taken:
            member.step()
            await stage.settle()
        assert member.submitted[taken].request.id == "99"

    playing(scene)


def weights(version: int, lineage: int = 0) -> Weights:
    record = VersionRecord(
        lineage=lineage, version=version, updates=version, fingerprint=f"{lineage}.{version}", parent=None
    )
    return Weights(record=record, tensors={}, digests=DIGESTS)


def test_versions_of_an_older_lineage_are_none():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        stage.join(first, holds=(0, 7))
        link = stage.join(second, holds=(0, 7))
        await link.load(weights(3, lineage=1))
        for index in range(4):
            stage.ask(index)
        await stage.settle()
        assert (len(first.submitted), len(second.submitted)) == (0, 4)

    playing(scene)


def test_after_a_rollback_an_earlier_version_is_the_newest():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        link, other = stage.join(first), stage.join(second)
        await asyncio.gather(link.load(weights(3)), other.load(weights(3)))
        await link.load(weights(2))
        assert stage.fleet.up_to_date == [link]
        for index in range(4):
            stage.ask(index)
        await stage.settle()
        assert (len(first.submitted), len(second.submitted)) == (4, 0)

    playing(scene)


def test_a_version_that_is_shown_late_is_not_the_newest():
    async def scene(stage):
        first, second = FakeMember("a"), FakeMember("b")
        link, other = stage.join(first), stage.join(second)
        late, goes_on = second.load, asyncio.Event()

        async def load(taken):
            await goes_on.wait()
            return await late(taken)

        second.load = load
        loading = asyncio.create_task(other.load(weights(1)))
        await stage.settle()
        await link.load(weights(2))
        goes_on.set()
        await loading
        assert stage.fleet.up_to_date == [link]

    playing(scene)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_history_of_losses_joins_leaves_and_aborts_gives_every_sample_once(seed):
    async def scene(stage):
        chance = random.Random(seed)
        names = iter(range(1000))
        live: list[tuple[FakeMember, Link]] = []
        asked: dict[str, Request] = {}
        aborted: set[str] = set()

        def arrive() -> None:
            member = FakeMember(f"m{next(names)}", slots=chance.choice([1, 4, 100]))
            live.append((member, stage.join(member)))

        arrive()
        leaving = []
        for index in range(chance.randint(5, 40)):
            action = chance.choice(["ask", "ask", "step", "step", "lose", "kill", "join", "leave", "abort", "settle"])
            live = [(member, link) for member, link in live if link.is_there]
            if action == "ask":
                request = stage.ask(index, n=chance.randint(1, 3), max_tokens=chance.randint(1, 6))
                asked[request.id] = request
            elif action == "join":
                arrive()
            elif action == "abort" and asked:
                name = chance.choice(sorted(asked))
                if not stage.tasks[name].done():
                    aborted.add(name)
                    stage.tasks[f"abort {index}"] = asyncio.create_task(stage.fleet.abort([name]))
            elif action == "settle":
                await stage.settle()
            elif live:
                member, link = chance.choice(live)
                if action == "step":
                    member.step()
                elif action == "lose":
                    stage.fleet.lost(link, "by chance")
                elif action == "kill":
                    member.die(RuntimeError("by chance"))
                elif action == "leave":
                    leaving.append(asyncio.create_task(stage.fleet.leave(link, within_s=0.0)))
        arrive()
        for _ in range(300):
            await stage.settle()
            if all(task.done() for task in stage.tasks.values()):
                break
            for member, link in live:
                if link.is_there:
                    member.step()
            if not any(link.is_there and not link.is_leaving and member.error is None for member, link in live):
                arrive()
        await asyncio.gather(*leaving)
        for name, request in asked.items():
            assert stage.tasks[name].done(), name
            came = stage.came[name]
            assert sorted(c.sample for c in came) == list(range(request.n))
            for completion in came:
                tokens = completion.token_ids.tolist()
                assert tokens == [token_of(request, completion.sample, i) for i in range(len(tokens))]
                if completion.finish is Finish.LENGTH:
                    assert len(tokens) == request.sampling.max_tokens
                elif completion.finish is Finish.ABORTED:
                    assert name in aborted
                else:
                    assert "issued" in completion.reason  # lost more often than it is issued again
        assert not stage.fleet._asked and not stage.fleet._lanes

    playing(scene)


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_who_joins_while_others_are_still_is_so_too_until_all_go_on(how):
    async def play() -> None:
        first, late = FakeMember("first"), FakeMember("late")
        fleet = Fleet([first])
        await getattr(fleet, how)()
        await fleet.as_still_as_others(fleet.join(late))
        assert how in late.calls and "resume" not in late.calls
        await fleet.resume()
        assert late.calls.index(how) < late.calls.index("resume")
        latest = FakeMember("latest")
        await fleet.as_still_as_others(fleet.join(latest))
        assert how not in latest.calls
        await fleet.close()

    asyncio.run(play())
