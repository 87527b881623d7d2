"""Many generators as one: requests are spread over members, which come and go while the run goes on.

    environment -- submit --> lanes --(Dispatch)--> one outbox per member -- submit_many --> member
               <-- completions, by ticket -------------------------------- collect ---------

Promises
- Every sample of a request comes back exactly once, whatever becomes of the members: what a lost one had taken on is
  issued again elsewhere, with the same seed and numbers. Samples that have been delivered are not made again where
  generators can go on from tokens, and never delivered twice. With exact numerics the tokens depend neither on how many
  members there are nor on who computes what.
- A *ticket* names one placement of a request. Whatever comes under one that does not count any more, from a member
  thought dead, say, is ignored.
- A member gets new requests only while it holds the newest version that any has shown, or the one that a request is
  pinned to. The newest is the one that was published last: after a rollback it has a smaller number than others.
- Calls carry what has gathered: requests of one turn of the loop go out together, and answers are asked for so seldom
  that all members together answer at most `CALLS_PER_S` times a second. A lone request or answer waits for nobody.
- Every wait has a bound and a name: a request that nobody can take fails after ``patience_s``, one that is issued again
  too often fails with the last reason. Such failures are completions; errors are what ends every member.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nearpolicy.errors import ConfigError, EngineError, NearpolicyError, RecordLost, SyncError, UserError, described
from nearpolicy.generator.dispatch import Dispatch
from nearpolicy.generator.host import ended, weakest
from nearpolicy.generator.usage import Usage
from nearpolicy.models.weights import require_held
from nearpolicy.records import Finish
from nearpolicy.roles import Begun, Capabilities, Completion, Member, Placed, Request, Told, Weights
from nearpolicy.waits import waiting

CALLS_PER_S = 100.0
"""Answers that all members together give in a second. Each costs the controller about a millisecond."""
SPACING_S = 0.25
"""Never more seldom than this while there is something to tell."""
GIVES_BACK_S = 10.0
"""What a member that leaves gets to hand over what it has not ended."""
GATHERS_S = 0.002
"""How long requests that keep coming are gathered."""
RETRIES = 3
"""Times that a request is issued again after its member was lost."""
PROBE = "probe"

Held = tuple[int, int]
"""Lineage and version."""


class _Inbox:
    """A queue for one reader; there is one for each of thousands of requests, and `asyncio.Queue` takes several times
    as long to make."""

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: deque[Completion | NearpolicyError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Completion | NearpolicyError) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Completion | NearpolicyError:
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()


@dataclass(slots=True, eq=False)
class _Asked:
    """A request on its way to its completions."""

    request: Request
    inbox: _Inbox
    missing: set[int]
    """Samples that have not been delivered."""
    begun: dict[int, Begun]
    """What samples were asked for with, or were given back as."""
    delivered: list[Completion] = field(default_factory=list)
    ticket: int | None = None
    """Where it is at the moment; None in its lane."""
    link: Link | None = None
    losses: int = 0
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class _Placement:
    asked: _Asked | None
    """None once nobody waits for it any more."""
    request: Request
    """As it was issued."""
    number: int
    """Of the replica, as dispatch counts."""
    missing: set[int]


@dataclass(slots=True, eq=False)
class _Lane:
    """Requests that wait for a replica, in the order they go out."""

    version: int | None
    requests: deque[_Asked] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    """Runs while nobody could take any of them."""
    wait: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Fleet:
    """Implements `Generator` over members; belongs to one event loop."""

    def __init__(
        self,
        members: Iterable[Member] = (),
        *,
        patience_s: float = 120.0,
        silence_s: float = 60.0,
        retries: int = RETRIES,
        calls_per_s: float = CALLS_PER_S,
        on_event: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``members``: those of the beginning; they get requests as soon as they have shown a version (`Link.load`).

        ``patience_s``: how long a request waits while no member could take it. ``silence_s``: after this long without
        an answer a member is lost. ``on_event``: takes kind and fields; ``instance`` is the number of the replica."""
        self._dispatch = Dispatch()
        self._patience_s, self._silence_s, self._retries = patience_s, silence_s, retries
        self._calls_per_s = calls_per_s
        self._emit = on_event or (lambda *_, **__: None)
        self._usage = Usage()
        self._clock = clock
        self._links: list[Link] = []
        self._link_of: dict[int, Link] = {}
        """By replica."""
        self._asked: dict[str, _Asked] = {}
        self._lanes: dict[tuple[bool, int | None], _Lane] = {}
        """By whether they go first, and version."""
        self._newest: Held | None = None
        self._newest_number = 0
        self._published: Held | None = None
        """What members were asked last to load."""
        self._num_published = 0
        self._tickets = 0
        self._flush_planned = False
        self._arrivals, self._flush_by = 0, 0.0
        self._stilled: Callable[[Member], Awaitable[None]] | None = None
        """What members were told that are to sample nothing."""
        self._stilling = asyncio.Lock()
        """They are told one thing after the other."""
        self._error: NearpolicyError | None = None
        self._last_loss = ""
        self._promised: Capabilities | None = None
        self.calls = 0
        """Made to members since the start."""
        self.num_reissued = 0
        """Requests issued again since the start."""
        self.num_ignored = 0
        """Completions that came when they did not count any more."""
        for member in members:
            self.join(member)

    # Who belongs to it.

    @property
    def links(self) -> tuple[Link, ...]:
        """The members as a publisher sees them: each takes weights by itself. Ask again for every publication."""
        return tuple(self._links)

    @property
    def up_to_date(self) -> list[Link]:
        """Members that hold the newest version."""
        return [link for link in self._links if link.held is not None and link.held == self._newest]

    def join(self, member: Member, *, holds: Held | None = None) -> Link:
        """From now on this member counts; it gets requests once it has shown the present version by `Link.load`.
        ``holds``: lineage and version that it has shown already."""
        found = member.capabilities()
        if self._promised is not None and weakest([self._promised, found]) != self._promised:
            raise ConfigError(
                f"{member.name} promises less than the generators that the run began with: {found} there, "
                f"{self._promised} here. Start it with the same settings"
            )
        link = Link(self, member, [self._dispatch.add() for _ in range(member.num_replicas)])
        self._links.append(link)
        self._link_of |= dict.fromkeys(link.numbers, link)
        self._emit("join", instance=link.numbers[0], name=member.name, replicas=member.num_replicas)
        if holds is not None:
            is_newer = self._newest is None or holds > self._newest
            self._shown(link, holds, self._number_of(holds) if is_newer else 0)
        self._plan_flush()
        return link

    async def leave(self, link: Link, *, within_s: float = 30.0) -> None:
        """The member gets nothing more, ends what it has within this time, and gives the rest back, which goes on
        elsewhere, from its tokens where that is possible. It does not belong to the fleet when this returns."""
        if not link.is_there:
            return
        link.is_leaving = True
        for number in link.numbers:
            self._dispatch.takes(number, False)
        try:
            with waiting("a generator that leaves", f"what runs on {link.member.name} to end"):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await link.until_empty()
                if link.placements and link.is_there:
                    await link.abort(list(link.placements))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(GIVES_BACK_S):
                            await link.until_empty()
        finally:
            self._remove(link, "leave", reason="it left")

    def lost(self, link: Link, reason: str) -> None:
        """The member is gone, with all that it had not told; what it had taken on is issued again."""
        if link.is_there:
            self._last_loss = f"{link.member.name} was lost: {reason}"
            self._remove(link, "lost", reason=reason)

    def _remove(self, link: Link, kind: str, **fields: Any) -> None:
        if not link.is_there:
            return
        link.end()
        self._links.remove(link)
        for number in link.numbers:
            self._dispatch.remove(number)
            self._usage.forget(number)
            del self._link_of[number]
        left = [placement.asked for placement in link.placements.values() if placement.asked is not None]
        link.placements.clear()
        self._emit(kind, instance=link.numbers[0], name=link.member.name, again=len(left), **fields)
        for asked in reversed(left):  # the first of them is to stand first in its lane
            asked.losses += 1
            self._issue_again(asked, self._last_loss)

    # What a generator does.

    async def submit(self, request: Request) -> AsyncIterator[Completion]:
        """Completions as they end. Leaving the iterator early aborts what is left."""
        asked = self._take_on(request)
        left = request.n
        try:
            while left:
                item = await asked.inbox.get()
                if isinstance(item, NearpolicyError):
                    raise type(item)(*item.args) from item.__cause__
                left -= 1
                yield item
        finally:
            if self._asked.get(request.id) is asked:
                self._forget(asked)

    async def abort(self, request_ids: Iterable[str]) -> None:
        sent = []
        for name in request_ids:
            asked = self._asked.get(name)
            if asked is None or asked.is_aborted:
                continue
            asked.is_aborted = True
            if asked.link is None:
                self._end_missing(asked, Finish.ABORTED)
                self._plan_flush()  # its lane may wait for nothing now
            else:
                sent.append(asked.link.abort([asked.ticket]))
        await asyncio.gather(*sent)

    async def pause(self) -> None:
        """What has not gone out waits here; a member that is lost meanwhile samples nothing that counts."""
        await self._still(lambda member: member.pause())

    async def sleep(self) -> None:
        """As `pause`, and members give the memory of keys and values back."""
        await self._still(lambda member: member.sleep())

    async def resume(self) -> None:
        self._stilled = None
        async with self._stilling:
            await self._all_answer(lambda member: member.resume())
        self._plan_flush()

    async def _still(self, how: Callable[[Member], Awaitable[None]]) -> None:
        self._stilled = how
        async with self._stilling:
            await self._all_answer(how)

    async def as_still_as_others(self, link: Link) -> None:
        """For a member that has joined while the others pause or sleep."""
        async with self._stilling:
            if self._stilled is not None and link.is_there:
                await link.ask(self._stilled(link.member))

    async def _all_answer(self, call: Callable[[Member], Awaitable[None]]) -> None:
        """Every member that is there; one that is lost meanwhile samples nothing more."""
        links = self.links
        answers = await asyncio.gather(*(link.ask(call(link.member)) for link in links), return_exceptions=True)
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, BaseException) and link.is_there:
                raise answer

    async def load(self, weights: Weights) -> Mapping[str, str]:
        """In every member; a publisher that bounds and names each one's load goes through `links`."""
        shown = await asyncio.gather(*(link.load(weights) for link in self.links))
        if not shown:
            raise SyncError(f"no generator is left to take version {weights.record.version}. {self._last_loss}")
        return shown[0]

    def capabilities(self) -> Capabilities:
        """Of the weakest member; none that joins later may promise less."""
        if self._promised is None:
            if not self._links:
                raise EngineError("generators without a member promise nothing; let one join first")
            self._promised = weakest([link.member.capabilities() for link in self._links])
        return self._promised

    def usage(self) -> dict[str, float]:
        """Metrics of the replicas since the last call; names as in `nearpolicy.telemetry.metrics`."""
        counts = {"generator/replicas": float(len(self._link_of)), "generator/reissued": float(self.num_reissued)}
        return self._usage.metrics() | counts

    async def close(self) -> None:
        """End the calls to members; whoever waits gets an error. The members themselves are their owners' to close."""
        self._end(EngineError("the generators are closed"))
        await asyncio.gather(*(link.until_ended() for link in self.links), return_exceptions=True)

    # Requests on their way.

    def _take_on(self, request: Request) -> _Asked:
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if request.id in self._asked:
            raise ValueError(f"request {request.id!r} is already running")
        asked = _Asked(request, _Inbox(), set(range(request.n)), dict(request.begun))
        self._asked[request.id] = asked
        self._lane(asked).requests.append(asked)
        self._plan_flush()
        return asked

    def _lane(self, asked: _Asked) -> _Lane:
        key = asked.request.purpose != PROBE, asked.request.version  # False sorts first: somebody stands still for it
        if key not in self._lanes:
            self._lanes[key] = _Lane(asked.request.version)
        return self._lanes[key]

    def _plan_flush(self) -> None:
        """Soon, together with what comes in the same turn of the loop, and in those right behind it."""
        self._arrivals += 1
        if not self._flush_planned:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # members that join before the loop runs; there is nothing to send yet
            self._flush_planned = True
            self._flush_by = loop.time() + GATHERS_S
            loop.call_soon(self._flush_unless_more_comes, self._arrivals)

    def _flush_unless_more_comes(self, seen: int) -> None:
        loop = asyncio.get_running_loop()
        if self._arrivals != seen and loop.time() < self._flush_by:
            loop.call_soon(self._flush_unless_more_comes, self._arrivals)
            return
        self._flush_planned = False
        if self._stilled is not None:
            return
        try:
            self._flush()
        except Exception as error:  # the loop would only log it, and everybody would wait
            failure = EngineError(f"requests cannot be given out: {described(error)}")
            failure.__cause__ = error
            self._end(failure)

    def _flush(self) -> None:
        """What waits goes to those that have room."""
        for key in sorted(self._lanes, key=lambda key: (key[0], -1 if key[1] is None else key[1])):
            lane = self._lanes[key]
            while lane.requests:
                asked = lane.requests[0]
                if asked.ticket is not None or not asked.missing or self._asked.get(asked.request.id) is not asked:
                    lane.requests.popleft()  # aborted or left meanwhile
                    continue
                number = self._dispatch.choose(asked.request)
                if number is None:
                    break
                lane.requests.popleft()
                self._place(asked, number)
            self._mind(lane)
            if not lane.requests:
                del self._lanes[key]
        self._usage.waits(any(lane.requests for lane in self._lanes.values()), self._clock())

    def _as_issued(self, asked: _Asked, link: Link) -> Request:
        """With what its samples have become: a sample that has been delivered comes back at once."""
        if not asked.delivered and asked.begun == asked.request.begun:
            return asked.request
        if not link.member.capabilities().resumable:
            return asked.request
        done = {
            c.sample: Begun(token_ids=c.token_ids, logprobs=c.logprobs, versions=c.versions, extras=c.extras)
            for c in asked.delivered
            if c.finish in (Finish.STOP, Finish.LENGTH)
        }
        return replace(asked.request, begun=asked.begun | done)

    def _place(self, asked: _Asked, number: int) -> None:
        link = self._link_of[number]
        issued = self._as_issued(asked, link)
        self._tickets += 1
        asked.ticket, asked.link = self._tickets, link
        link.placements[self._tickets] = _Placement(asked, issued, number, set(range(issued.n)))
        self._dispatch.placed(number, issued)
        link.send(Placed(ticket=self._tickets, replica=link.places[number], request=issued))

    def _mind(self, lane: _Lane) -> None:
        """A lane that nobody could serve fails in time."""
        stranded = bool(lane.requests) and not self._dispatch.serves(lane.version)
        if stranded and self._is_outdated(lane.version):
            self._fail_lane(lane, f"version {lane.version} was asked for, and every generator holds a newer one")
        elif stranded and lane.timer is None:
            lane.wait.enter_context(waiting("requests", self._wanted(lane)))
            loop = asyncio.get_running_loop()
            lane.timer = loop.call_later(self._patience_s, self._out_of_patience, lane)
        elif not stranded and lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
            lane.wait.close()

    def _is_outdated(self, version: int | None) -> bool:
        """Whether no member can come to hold it any more."""
        newest = self._dispatch.newest
        return (
            version is not None
            and newest is not None
            and newest > version
            and all(link.held == self._newest for link in self._links)
        )

    def _wanted(self, lane: _Lane) -> str:
        return "a generator" if lane.version is None else f"a generator that holds version {lane.version}"

    def _out_of_patience(self, lane: _Lane) -> None:
        lane.timer = None
        lane.wait.close()
        there = f"{len(self._links)} of them are there" if self._links else "none is there"
        reason = f"no request could go to {self._wanted(lane)} for {self._patience_s:g} s: {there}"
        self._fail_lane(lane, ". ".join(filter(None, [reason, self._last_loss])))

    def _fail_lane(self, lane: _Lane, reason: str) -> None:
        while lane.requests:
            asked = lane.requests.popleft()
            if asked.ticket is None and asked.missing and self._asked.get(asked.request.id) is asked:
                self._end_missing(asked, Finish.FAILED, reason)

    def _issue_again(self, asked: _Asked, reason: str) -> None:
        asked.ticket = asked.link = None
        if asked.is_aborted:
            self._end_missing(asked, Finish.ABORTED)
        elif asked.losses > self._retries:
            self._end_missing(asked, Finish.FAILED, f"issued {asked.losses} times without an end: {reason}")
        else:
            self.num_reissued += 1
            self._lane(asked).requests.appendleft(asked)
            self._plan_flush()

    def _end_missing(self, asked: _Asked, finish: Finish, reason: str = "") -> None:
        """What is left of it ends here, with what it had become."""
        request = replace(asked.request, begun=asked.begun)
        for sample in sorted(asked.missing):
            self._deliver(asked, ended(request, sample, finish, reason))

    def _deliver(self, asked: _Asked, completion: Completion) -> None:
        asked.missing.discard(completion.sample)
        asked.inbox.put(completion)
        if asked.missing:
            asked.delivered.append(completion)
        elif self._asked.get(asked.request.id) is asked:
            del self._asked[asked.request.id]

    def _forget(self, asked: _Asked) -> None:
        """Nobody waits for it any more."""
        del self._asked[asked.request.id]
        self._plan_flush()
        if asked.link is not None and (placement := asked.link.placements.get(asked.ticket)) is not None:
            placement.asked = None
            asked.link.abort([asked.ticket])

    # What members tell.

    def _told(self, link: Link, told: Told) -> None:
        if not link.is_there:
            self.num_ignored += len(told.completions)
            return
        for ticket, completion in told.completions:
            self._came(link, ticket, completion)
        for place, load in told.loads.items():
            self._dispatch.observe(link.numbers[place], load)
            self._usage.observe(link.numbers[place], load, self._clock())
        for place, kind, fields in told.events:
            self._emit(kind, instance=link.numbers[place], **fields)
        link.look_whether_empty()
        if self._lanes:
            self._plan_flush()

    def _came(self, link: Link, ticket: int, completion: Completion) -> None:
        placement = link.placements.get(ticket)
        sample = completion.sample
        if placement is None or sample not in placement.missing:
            self.num_ignored += 1
            return
        placement.missing.discard(sample)
        begun = placement.request.begun.get(sample)
        length = len(completion.token_ids)
        whole = completion.finish in (Finish.STOP, Finish.LENGTH)
        drawn = length - (0 if begun is None else len(begun.token_ids))
        self._dispatch.ended(placement.number, placement.request, drawn, length, whole=whole and drawn > 0)
        asked = placement.asked
        if not placement.missing:
            del link.placements[ticket]
        if asked is None:
            return
        if sample not in asked.missing:
            self.num_ignored += 1
        elif completion.finish is Finish.ABORTED and not asked.is_aborted:
            self._given_back(asked, completion)
        else:
            self._deliver(asked, completion)
        if not placement.missing and asked.missing:
            asked.losses += not link.is_leaving
            self._issue_again(asked, f"{link.member.name} gave it back")

    def _given_back(self, asked: _Asked, completion: Completion) -> None:
        """A sample that its member did not end, and that goes on elsewhere."""
        if len(completion.token_ids):
            asked.begun[completion.sample] = Begun(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                extras=completion.extras,
            )

    def _number_of(self, held: Held) -> int:
        """Of a publication: members are asked to load one after the other, and may show them in any order."""
        if held != self._published:
            self._published, self._num_published = held, self._num_published + 1
        return self._num_published

    def _shown(self, link: Link, held: Held, number: int) -> None:
        """The member holds the weights of this publication, and has proved it."""
        if number > self._newest_number:
            self._newest_number = number
            self._newest, self._dispatch.newest = held, held[1]
            changed = self._links if link.held is None or link.held[0] != held[0] else [link]
        else:
            changed = [link]
        link.held = held
        for each in changed:  # versions of a lineage that is over are none
            counts = each.held is not None and each.held[0] == self._newest[0]
            for number in each.numbers:
                self._dispatch.holds(number, each.held[1] if counts else None)
        self._plan_flush()

    def _unproved(self, link: Link) -> None:
        """Nobody knows what it holds: it gives back what it has, and gets nothing until it has shown a version."""
        link.held = None
        for number in link.numbers:
            self._dispatch.holds(number, None)
        again = dict(link.placements)
        link.placements.clear()
        for placement in again.values():
            for _ in placement.missing:
                self._dispatch.ended(placement.number, placement.request, 0, 0, whole=False)
        link.abort(list(again))
        for placement in reversed(again.values()):
            if placement.asked is not None:
                placement.asked.losses += 1
                self._issue_again(placement.asked, f"{link.member.name} failed to take weights")

    def _end(self, error: NearpolicyError) -> None:
        """Nothing goes on; everybody who waits gets the error."""
        if self._error is not None:
            return
        self._error = error
        for lane in self._lanes.values():
            lane.wait.close()
            if lane.timer is not None:
                lane.timer.cancel()
        self._lanes.clear()
        for asked in list(self._asked.values()):
            asked.inbox.put(error)
        for link in self._links:
            link.end()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, NearpolicyError) else described(error)


class Link:
    """One member as the fleet sees it: what is on its way there, what it holds, and the two tasks that talk to it."""

    def __init__(self, fleet: Fleet, member: Member, numbers: list[int]) -> None:
        self.member = member
        self.numbers = numbers
        """Of its replicas, as dispatch and the time line count them."""
        self.places = {number: place for place, number in enumerate(numbers)}
        self.held: Held | None = None
        """Lineage and version that it has shown."""
        self.is_leaving = False
        self.is_there = True
        """False once it has left or was lost."""
        self.placements: dict[int, _Placement] = {}
        """By ticket: what it has taken on and not told the end of."""
        self._fleet = fleet
        self._outbox: list[Placed] = []
        self._aborts: list[int] = []
        self._sent: list[asyncio.Future[None]] = []
        """Whoever waits for the next calls to be made."""
        self._mail, self._empty = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        with contextlib.suppress(RuntimeError):  # no loop runs yet: the first call starts them
            self.start()

    async def load(self, weights: Weights) -> Mapping[str, str]:
        """As `Generator.load`. What it shows is compared before it gets a request; after a load that failed its
        requests go on elsewhere, and after one that was cancelled (it took too long) it ends what it has, and gets
        nothing new."""
        self._settle(False)
        version = weights.record.version
        held = weights.record.lineage, version
        number = self._fleet._number_of(held)
        try:
            shown = await self.ask(self.member.load(weights))
            require_held(self.member.name, version, weights.digests, shown)
        except Exception:
            if self.is_there:
                self._fleet._unproved(self)
            raise
        finally:
            self._settle(True)
        if self.is_there:
            self._fleet._shown(self, held, number)
        return shown

    async def ask(self, call: Any) -> Any:
        """The answer to a call. An `EngineError`, and anything that is not raised on purpose, means that it is lost;
        the rest (weights that do not fit) is the caller's."""
        self.start()
        self._fleet.calls += 1
        try:
            return await call
        except Exception as error:
            if isinstance(error, NearpolicyError) and not isinstance(error, EngineError):
                raise
            self._fleet.lost(self, _reason(error))
            raise EngineError(f"{self.member.name} was lost: {_reason(error)}") from error

    def send(self, placed: Placed) -> None:
        self._empty.clear()
        self.start()
        self._outbox.append(placed)
        self._mail.set()

    def abort(self, tickets: list[int]) -> asyncio.Future[None]:
        """Done when the member has been told."""
        sent = asyncio.get_running_loop().create_future()
        if not self.is_there:
            sent.set_result(None)
            return sent
        self._aborts += tickets
        self._sent.append(sent)
        self._mail.set()
        return sent

    def look_whether_empty(self) -> None:
        if not self.placements:
            self._empty.set()

    async def until_empty(self) -> None:
        """Until it has told the end of all it took on, or is lost."""
        if self.placements:
            self._empty.clear()
            await self._empty.wait()

    async def until_ended(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self) -> None:
        self.is_there = False
        current = None
        with contextlib.suppress(RuntimeError):
            current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._empty.set()
        for sent in self._sent:
            if not sent.done():
                sent.set_result(None)

    def _settle(self, settled: bool) -> None:
        for number in self.numbers if self.is_there else ():  # else they may be another one's by now
            self._fleet._dispatch.settled(number, settled)

    def start(self) -> None:
        """In a running loop."""
        loop = asyncio.get_running_loop()
        if self._tasks or not self.is_there:
            return
        talking = [(self._sending, "requests to"), (self._collecting, "answers of")]
        self._tasks = [loop.create_task(self._talk(what), name=f"{name} {self.member.name}") for what, name in talking]

    async def _talk(self, what: Callable[[], Any]) -> None:
        """Until it ends; an error is the member's, unless it is the record's, or one that a person can repair."""
        try:
            await what()
        except (UserError, RecordLost) as error:
            self._fleet._end(error)
        except Exception as error:
            self._fleet.lost(self, _reason(error))

    async def _sending(self) -> None:
        while True:
            await self._mail.wait()
            self._mail.clear()
            placed, aborts, sent = self._outbox, self._aborts, self._sent
            self._outbox, self._aborts, self._sent = [], [], []
            with self._all_told(sent):
                if placed:
                    self._fleet.calls += 1
                    await self._answered(self.member.submit_many(placed))
                if aborts:
                    self._fleet.calls += 1
                    await self._answered(self.member.abort_many(aborts))

    async def _collecting(self) -> None:
        while True:
            spacing = min(SPACING_S, len(self._fleet._links) / self._fleet._calls_per_s)
            self._fleet.calls += 1
            self._fleet._told(self, await self._answered(self.member.collect(spacing)))

    async def _answered(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._fleet._silence_s) as limit:
                return await call
        except TimeoutError:
            if limit.expired():
                raise EngineError(f"no answer within {self._fleet._silence_s:g} s") from None
            raise

    @contextlib.contextmanager
    def _all_told(self, sent: list[asyncio.Future[None]]) -> Iterator[None]:
        try:
            yield
        finally:
            for future in sent:
                if not future.done():
                    future.set_result(None)
