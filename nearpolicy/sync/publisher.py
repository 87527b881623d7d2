"""Publishing: export with digests, load on every generator, compare what each one shows.

The embedded engine compares by itself too, before it samples; here every generator is asked, whatever it is.

Generators are members that may miss a version. One that fails, shows other weights or takes too long is *behind*: it is
to get no new request (`may_sample`), and nobody waits for it. It gets the next version as all do, and the present one
by `catch_up` where the transport still has it. A publication fails only if no member took it, so that of a single
generator every error is the run's. Weights that were lost on their way with their sender are asked for once more.

    joined, or missed a version          showed the digests of the present version
              behind   ---------------------------->   current
                       <----------------------------
               load failed, other digests, beyond twice timeout_s, or a newer version published without it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from nearpolicy.errors import EngineError, SyncError, described
from nearpolicy.models.weights import require_held
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Generator, Weights
from nearpolicy.waits import waiting

FETCHED = ("shared_memory", "files", "object_store")
"""Transports whose receivers fetch a version by themselves, at any time until there is a newer one."""
Key = tuple[int, int]
"""Lineage and version."""
_TO_STOP_S = 1.0
"""How long a load that was cancelled may take to end."""
Deliver = Callable[[Weights, Sequence[str], Sequence[str]], Awaitable[Sequence[str]]]
"""Hands a version to these members while they load it, where a transport needs that (`Sender.deliver`)."""


class ExportsWeights(Protocol):
    async def weights(self, record_parent: int | None) -> Weights: ...


@dataclass(eq=False)
class _Member:
    """A generator, and what it has shown."""

    name: str
    generator: Generator
    holds: Key | None = None
    """What it has shown last; None while nobody knows."""
    reason: str = "it has just joined"
    """Why it does not hold the present version."""
    late: bool = False
    """It did not answer in time: nobody waits for it until it has."""
    mismatch: SyncError | None = None
    """It has shown other digests than were sent."""
    told: bool = False
    """That it is behind has been reported."""
    loading: asyncio.Task[Mapping[str, str] | Exception] | None = None
    """Its last load; ends with the digests that it has shown, or with the error."""

    @property
    def loaded(self) -> Mapping[str, str] | None:
        """What its last load has shown; None if it failed."""
        found = self._outcome
        return None if isinstance(found, Exception) else found

    @property
    def error(self) -> Exception | None:
        found = self._outcome
        return found if isinstance(found, Exception) else self.mismatch

    @property
    def _outcome(self) -> Mapping[str, str] | Exception:
        if not self.loading.done():
            return SyncError(f"{self.name} can neither load nor be stopped")
        if self.loading.cancelled():
            return SyncError(f"{self.name} has left")
        return self.loading.result()

    def failed(self, error: Exception) -> None:
        self.holds, self.reason = None, described(error)

    async def stop(self) -> None:
        """Give up a load that goes on; one that does not let itself be stopped is left to itself."""
        if self.loading is not None and not self.loading.done():
            self.loading.cancel()
            await asyncio.wait([self.loading], timeout=_TO_STOP_S)


class Publisher:
    """Implements `WeightSync` over generators that show digests of the memory they compute from."""

    def __init__(
        self,
        learner: ExportsWeights,
        generators: Sequence[Generator] | Mapping[str, Generator],
        *,
        timeout_s: float,
        adapter_only: bool = False,
        lost_come_back: bool = False,
        deliver: Deliver | None = None,
        on_event: Callable[..., None] | None = None,
        on_behind: Callable[[str, str], None] | None = None,
    ) -> None:
        """``generators``: by name; in a sequence they are called ``generator 0`` and so on.
        ``timeout_s``: bound on each of two phases that a generator goes through: its running sequences end
        (``generator.on_sync`` finish), then it loads. What is watched here is both together. ``adapter_only``: of a
        learner that trains an adapter send nothing else. ``lost_come_back``: for members that are lost (an
        `EngineError`) others are added, so that a version is published, and waits for them, even if all were lost.
        ``deliver``: for weights of a transport whose sender works
        while receivers receive. ``on_behind``: told name and reason when a member falls behind."""
        numbered = {f"generator {i}": g for i, g in enumerate(() if isinstance(generators, Mapping) else generators)}
        named = generators if isinstance(generators, Mapping) else numbered
        self._learner = learner
        self._members = {name: _Member(name, generator) for name, generator in named.items()}
        self._timeout_s = timeout_s
        self._adapter_only = adapter_only
        self._lost_come_back = lost_come_back
        self._deliver = deliver
        self._emit = on_event or (lambda *_, **__: None)
        self._on_behind = on_behind or (lambda *_: None)
        self._present: Weights | None = None
        """The last version that was published. Its tensors may have changed since."""
        self._incoming: Key | None = None
        self._idle = asyncio.Event()
        """Set while no publication goes on."""
        self._idle.set()

    @property
    def behind(self) -> dict[str, str]:
        """Members that are to get no new request, and why."""
        return {name: member.reason for name, member in self._members.items() if not self.may_sample(name)}

    def may_sample(self, name: str) -> bool:
        """Whether a member has shown the present version, or the one that is being published."""
        member = self._members.get(name)
        return member is not None and member.holds is not None and member.holds in (self._now, self._incoming)

    @property
    def _now(self) -> Key | None:
        return None if self._present is None else _key(self._present)

    async def publish(self) -> VersionRecord:
        self._idle.clear()
        try:
            return await self._publish()
        finally:
            self._incoming = None
            self._idle.set()
            self._report_changes()

    async def _publish(self) -> VersionRecord:
        begin = time.monotonic()
        weights = await self._learner.weights(None if self._present is None else self._present.record.version)
        if self._adapter_only and weights.shipment is None:
            weights = replace(weights, tensors={})
        size = weights.nbytes
        self._told("export", begin, weights, bytes=size)
        self._incoming = _key(weights)
        error = await self._handed_out(weights)
        if error is not None and self._may_have_lost_its_sender(weights):
            again = await self._again(weights)
            if again is not None:
                weights, error = again, await self._handed_out(again)
        if error is not None:
            raise error
        self._present = replace(weights, tensors={}, adapter=None)  # the tensors are the learner's, and change
        return weights.record

    async def _handed_out(self, weights: Weights) -> Exception | None:
        """Every member loads it, and what they show is compared; an error if nobody has it then, nor will."""
        begin = time.monotonic()
        try:
            awaited = await self._load_all(weights)
        except SyncError as error:
            return error
        if any(member.loaded is not None for member in awaited):
            self._told("load", begin, weights, bytes=weights.nbytes)
        begin = time.monotonic()
        for member in awaited:
            self._compare(member, weights)
        if awaited and all(member.error is not None for member in awaited) and not self._will_return(awaited):
            return awaited[0].error
        self._told("compare", begin, weights, tensors=len(weights.digests))
        return None

    def _will_return(self, members: Sequence[_Member]) -> bool:
        return self._lost_come_back and all(isinstance(member.error, EngineError) for member in members)

    def _may_have_lost_its_sender(self, weights: Weights) -> bool:
        """Whether members say that it is not to be had, and nothing worse."""
        return (
            weights.shipment is not None
            and bool(self._members)
            and not any(member.late or member.mismatch is not None for member in self._members.values())
        )

    async def add(self, name: str, generator: Generator) -> bool:
        """A new member. It may sample once it has shown the present version; whether it has. If not, for instance
        because the transport does not have that version any more, it is behind until the next publication."""
        if name in self._members:
            raise ValueError(f"there is a generator {name!r} already; remove it first")
        self._members[name] = _Member(name, generator)
        return await self.catch_up(name)

    async def remove(self, name: str) -> None:
        """A member that has left or died: it gets nothing more."""
        member = self._members.pop(name, None)
        if member is not None:
            await member.stop()

    async def catch_up(self, name: str) -> bool:
        """Give a member that is behind the present version; whether it has it now. Never raises for the member. A
        publication that goes on is let end first, since it may bring the version; one that begins meanwhile takes over.

        Where the version is not to be had any more (a collective, a learner that died) the learner is asked for it
        again, and has it unless it has gone on; the member then gets the next one.
        """
        await self._idle.wait()
        member, weights = self._members.get(name), self._present
        if member is None or self.may_sample(name):
            return member is not None
        is_lost = True
        if weights is None:
            member.reason, is_lost = "nothing has been published yet", False
        elif weights.shipment is not None and weights.shipment.transport in FETCHED:
            await self._bring(member, weights)
            is_lost = isinstance(member.error, SyncError) and member.mismatch is None and not member.late
        if is_lost and not self.may_sample(name):
            again = await self._again(weights)
            if again is not None and self._members.get(name) is member and self._now == _key(again):
                await self._bring(member, again)
            elif not self.may_sample(name):
                member.reason = f"version {weights.record.version} is not to be had any more; it gets the next one"
        self._report_changes()
        return self.may_sample(name)

    async def _bring(self, member: _Member, weights: Weights) -> None:
        await self._start(member, weights)
        mine = member.loading
        delivery = asyncio.create_task(self._delivered(weights, [member], [member]))
        limit_s = self._timeout_s * 2 + _TO_STOP_S
        try:
            await asyncio.wait({mine, delivery}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            failed = _error_of(delivery)
            if failed is None:
                await asyncio.wait([mine], timeout=limit_s)
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
        if member.loading is not mine:
            return
        if failed is None or mine.done():
            self._compare(member, weights)
        else:  # what it waits for does not come
            await member.stop()
            member.failed(failed)

    async def _again(self, weights: Weights) -> Weights | None:
        """The same version from the learner, if that is what it holds."""
        try:
            again = await self._learner.weights(weights.record.parent)
        except Exception as error:
            self._emit("export", seconds=0.0, version=weights.record.version, error=described(error))
            return None
        same = _key(again) == _key(weights) and again.digests == weights.digests
        return again if same else None

    async def close(self) -> None:
        """Nobody is given anything any more."""
        await asyncio.gather(*(member.stop() for member in self._members.values()))

    async def _load_all(self, weights: Weights) -> list[_Member]:
        """Have every member load; the members that were waited for, which have all ended."""
        members = list(self._members.values())
        if not members and self._lost_come_back:
            return members
        if not members:
            raise SyncError(f"there is no generator to take version {weights.record.version}")
        await asyncio.gather(*(self._start(member, weights) for member in members))
        awaited = [member for member in members if not member.late] or members
        for member in members:
            if member not in awaited:
                member.loading.add_done_callback(partial(self._compare_later, member, weights))
        loads = {member.loading for member in awaited}
        delivery = asyncio.create_task(self._delivered(weights, awaited, members))
        try:
            await asyncio.wait({delivery, *loads}, timeout=self._timeout_s * 2 + _TO_STOP_S)
            failed = _error_of(delivery)
            nobody = all(member.loaded is None for member in awaited)
            if failed is not None and nobody and not self._will_return(awaited):
                raise failed
        except BaseException:
            for member in awaited:
                await member.stop()
            raise
        finally:
            delivery.cancel()
        return awaited

    async def _delivered(self, weights: Weights, awaited: Sequence[_Member], members: Sequence[_Member]) -> None:
        if self._deliver is not None and weights.shipment is not None and weights.shipment.transport not in FETCHED:
            with waiting("publication", f"the delivery of version {weights.record.version}"):
                await self._deliver(weights, [m.name for m in members], [m.name for m in awaited])

    async def _start(self, member: _Member, weights: Weights) -> None:
        await member.stop()
        member.mismatch = None
        member.loading = asyncio.create_task(self._load(member, weights))

    async def _load(self, member: _Member, weights: Weights) -> Mapping[str, str] | Exception:
        shown: Mapping[str, str] | None = None
        late = False
        try:
            async with asyncio.timeout(self._timeout_s * 2):
                with waiting("publication", f"{member.name} to take version {weights.record.version}"):
                    shown = await member.generator.load(weights)
        except TimeoutError:
            late = True
            error = SyncError(
                f"{member.name} did not take version {weights.record.version} within {self._timeout_s * 2:g} s "
                "(twice sync.timeout_s)"
            )
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            error = SyncError(f"{member.name} gave up its load of version {weights.record.version}")
        except Exception as raised:
            error = raised
        if member.loading is asyncio.current_task():  # not one that could not be stopped
            member.late = late
            if shown is None:
                member.failed(error)  # at once: others may go on loading for long
        return error if shown is None else shown

    def _compare(self, member: _Member, weights: Weights) -> None:
        if member.loaded is None:
            member.late = member.late or not member.loading.done()
            member.failed(member.error)
            return
        try:
            require_held(member.name, weights.record.version, weights.digests, member.loaded)
            member.holds = _key(weights)
        except SyncError as error:
            member.mismatch = error
            member.failed(error)

    def _compare_later(self, member: _Member, weights: Weights, loading: asyncio.Task[object]) -> None:
        """Of a member that nobody waited for."""
        if not loading.cancelled() and loading is member.loading:
            self._compare(member, weights)
            self._report_changes()

    def _report_changes(self) -> None:
        for member in self._members.values():
            is_behind = not self.may_sample(member.name)
            if is_behind and not member.told:
                self._on_behind(member.name, member.reason)
            member.told = is_behind

    def _told(self, phase: str, begin: float, weights: Weights, **numbers: float) -> None:
        self._emit(phase, seconds=time.monotonic() - begin, version=weights.record.version, **numbers)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _key(weights: Weights) -> Key:
    return weights.record.lineage, weights.record.version
