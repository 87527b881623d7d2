"""The queue: asyncio waits around the ledger. Every slot given out comes back exactly once.

reserve -> Slot       waits for a free slot              woken by retire, and by fill of a failed group
fill(slot, group)     never waits                        wakes take
peek(n) -> groups     waits for a further group that is sure to be in the next batch
take(n) -> groups     waits for a batch                  woken by fill; an error if nothing but failures comes
complete, retire      never wait                         retire wakes reserve
expire                never waits                        wakes reserve
roll_back             never waits                        nothing is admitted until the next retire
close                 never waits                        the end: nothing more is admitted, what comes is aborted
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from nearpolicy.errors import RolloutsError, StandstillError
from nearpolicy.records import Admission, Fate, Group, Position
from nearpolicy.roles import PromptSource, RunStore, Slot
from nearpolicy.rollout_queue.failures import Failures
from nearpolicy.rollout_queue.ledger import Ledger, State
from nearpolicy.rollout_queue.pace import NEVER_WAITS, WAITS_TOO_LONG, Pace
from nearpolicy.rollout_queue.prompts import Asked, PromptLine
from nearpolicy.waits import waiting

ENDED = "the run ended before a step used it"
_NOTHING: Mapping[int, int] = MappingProxyType({})


class StalenessBoundedQueue:
    """Implements `RolloutQueue` for one event loop; not for threads."""

    def __init__(
        self,
        ledger: Ledger,
        prompts: PromptSource,
        store: RunStore,
        *,
        seed: int,
        num_groups: int | None = None,
        stall_timeout_s: float = 900.0,
        left_out: Callable[[Group], str | None] | None = None,
        max_rounds: int = 10,
        requeue: bool = False,
        give_up: Callable[[int, str], None] | None = None,
        adaptive: bool = False,
        fewest_slots: int = 0,
        may_roll_back: bool = False,
        on_event: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``num_groups``: groups the run needs in all; no more are admitted, but for those given up. Once steps have
        used so many, the queue closes by itself.

        ``left_out``: dynamic sampling. Groups it gives a reason for end as filtered and later prompts take their place,
        as long as the next batch is found among ``max_rounds`` times its size consecutive admissions.

        ``give_up`` is told which groups that still run are not wanted any more, and why: those beyond the bound, where
        the ledger drops them, and those left when the queue closes. With ``requeue`` the prompts of groups beyond the
        bound are admitted once more.

        ``adaptive``: fewer slots for new admissions while the learner is the bottleneck, never below ``fewest_slots``
        (less than the groups between two publications stands still).

        ``may_roll_back``: steps may be undone. Then the queue does not close by itself with the last step, and
        `reserve` waits where no prompt is left.
        """
        self._may_roll_back = may_roll_back
        self._holds = False
        """Nothing is admitted: the weights of a rollback are not published yet, or the run is to pause."""
        self._cut_off: dict[int, str] = {}
        """Admissions that run and are to begin anew -> why."""
        self.num_undone = 0
        """Groups of steps that were rolled back."""
        self._adaptive = adaptive
        self._fewest_slots = fewest_slots
        self._pace = Pace(clock)
        self._prompts = PromptLine(prompts, requeues=requeue)
        self._give_up = give_up or (lambda admission, reason: None)
        self._begin_anew: dict[int, Admission] = {}
        """By index: admissions that hold a slot and wait to be handed out once more."""
        self._expired_running: dict[int, str] = {}
        """Admissions given up while they run -> why."""
        self._left_out = left_out or (lambda group: None)
        self._max_rounds = None if left_out is None else max_rounds
        self._search_from = 0
        """First admission that may belong to the next batch."""
        self._reasons: dict[int, str] = {}
        """Of the groups filtered since the last batch, by admission."""
        self.num_filtered = 0
        """Groups filtered since the start of the run."""
        self._ledger = ledger
        self._store = store
        self._seed = seed
        self._num_groups = num_groups
        self._stall_timeout_s = stall_timeout_s
        self._emit = on_event or (lambda *_, **__: None)
        self._groups: dict[int, Group] = {}
        self._changed = asyncio.Event()
        """For the learner; set with every change."""
        self._producers: deque[asyncio.Future[None]] = deque()
        """Those that wait for a slot, the longest first. They are thousands: only as many are woken as may go on."""
        self._num_taken = 0
        self._between_steps = False
        """A step is done, and neither is it published nor has the next one begun."""
        self._closed = False
        self._failures = Failures()
        self.num_expired = 0
        """Groups that were beyond the bound before they could be consumed."""

    @property
    def num_failed(self) -> int:
        return self._failures.total

    def restore(self, found: Position, *, published: int, begun: Mapping[int, int] = _NOTHING) -> None:
        """Stand where a run stood, with its first ``published`` steps in the generators' weights. Admissions that came
        to nothing are handed out again before new ones. ``begun``: those that go on from tokens they have -> the oldest
        version among these."""
        versions = {a.index: begun.get(a.index, published) for a in found.unfinished}
        self._ledger.restore(
            completed=found.steps,
            published=published,
            next_index=found.next_index,
            running=versions,
            ready={group.index: group.oldest_version for group in found.ready},
            consumed={index: step for index, step in found.consumed.items() if step >= published},
        )
        for admission in found.unfinished:
            self._anew(admission, versions[admission.index])
        self._groups = {group.index: group for group in found.ready}
        unfinished = (*found.unfinished, *(group.admission for group in found.ready))
        self._prompts.restore(found.num_prompts, unfinished, found.expired_prompts)
        self._num_taken, self.num_undone = found.num_consumed, found.num_undone
        self._failures = Failures(found.num_failed, has_worked=bool(found.num_consumed or found.ready))
        self.num_expired = found.num_expired
        self.num_filtered, self._reasons = found.num_filtered, dict(found.filtered)
        behind = [] if found.last_consumed is None else [found.last_consumed]
        self._search_from = min([*self._left(), *self._reasons, *(index + 1 for index in behind)], default=0)
        self.expire()

    async def reserve(self) -> Slot | None:
        while (asked := await self._next_prompt()) is None:
            if self._no_more:
                return None
            if self._may_begin_anew:
                admission = self._begin_anew.pop(min(self._begin_anew))
                self._emit("admit", admission=admission.index, version=admission.version)
                return Slot(admission=admission)
        held = self._ledger.admit()
        self._prompts.admitted(held.index, asked)
        admission = Admission(
            index=held.index,
            prompt=asked.prompt,
            seed=self._seed,
            version=held.version,
            prompt_index=None if asked.place == held.index else asked.place,
        )
        self._store.admitted(admission)
        self._emit("admit", admission=held.index, version=held.version)
        return Slot(admission=admission)

    async def _next_prompt(self) -> Asked | None:
        """Waits until it may be admitted; None if there is none at the moment, or if an admission that begins anew
        comes first."""
        with waiting("a producer", "a free slot"):
            await self._until_admitted()
        if self._no_more or self._may_begin_anew:
            return None
        asked = self._prompts.next()
        if asked is None:
            self._wake()
        return asked

    def fill(self, slot: Slot, group: Group) -> None:
        index = slot.admission.index
        if group.index != index:
            raise ValueError(
                f"the slot of admission {index} was filled with the group of admission {group.index}: "
                "an environment must return a group of the admission it was given"
            )
        if index in self._cut_off:  # the next attempt has none of its tokens, even if the run has ended meanwhile
            self._store.retried(group, Fate.ABORTED, self._cut_off.pop(index))
            self._anew(group.admission, self._ledger.version(index))
            if self._closed:
                self._abort_waiting()
            self._wake()
            return
        if index in self._expired_running:  # its slot is free already
            self._store.discarded(group, Fate.EXPIRED, self._expired_running.pop(index))
        elif self._closed:
            self._ledger.drop(index)
            self._store.discarded(group, Fate.ABORTED, group.failure or ENDED)
        elif group.failure is not None:
            self._ledger.drop(index)
            self._failures.failed(group.failure)
            self._store.discarded(group, Fate.FAILED, group.failure)
            self._emit("fail", admission=index, reason=group.failure)
        elif (reason := self._left_out(group)) is not None:
            self._failures.worked()
            self._ledger.drop(index)
            self.num_filtered += 1
            self._reasons[index] = reason
            self._store.discarded(group, Fate.FILTERED, reason)
            self._emit("filter", admission=index, reason=reason)
        else:
            self._failures.worked()
            self._ledger.ready(index, group.oldest_version)
            self._groups[index] = group
            self._store.filled(group)
            self._emit("ready", admission=index, version=group.oldest_version)
            self.expire()
        if index in self._groups:  # no slot is free for it, and no producer has anything to hear
            self._changed.set()
            return
        self._prompts.finished(index)
        self._wake()

    async def peek(self, count: int, known: int) -> Sequence[Group]:
        await self._wait_for_batch(count, or_when=lambda: len(self._ledger.certain(count)) > known)
        return [self._groups[index] for index in self._ledger.certain(count)]

    async def take(self, count: int) -> Sequence[Group]:
        await self._wait_for_batch(count)
        if self._is_hopeless:
            raise RolloutsError(
                f"{self._failures.in_a_row} groups in a row failed, the last because: {self._failures.last}"
            )
        indices = self._ledger.batch(count)
        if indices is None and self._is_searched and not self._nothing_follows:
            raise RolloutsError(
                f"{self._ledger.next_index - self._search_from} prompts gave {len(self._groups)} of the {count} groups "
                f"of a step (queue.max_rounds={self._max_rounds}); the others were left out: "
                + ", ".join(f"{n} {reason}" for reason, n in Counter(self._reasons.values()).most_common())
            )
        if indices is None:
            indices = sorted(self._groups)
        self._ledger.consume(indices)
        self._num_taken += len(indices)
        self._emit("take", groups=len(indices))
        for index in indices:
            self._prompts.finished(index)
        self._begin_search(indices)
        return [self._groups.pop(index) for index in indices]

    async def _wait_for_batch(self, count: int, or_when: Callable[[], bool] = lambda: False) -> None:
        """Until `take` has an answer, which may be an error."""
        self._admit_again()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                with self._pace.waits(), waiting("the learner", f"a batch of {count} groups"):
                    await self._until(
                        lambda: (
                            or_when()
                            or self._ledger.batch(count) is not None
                            or self._nothing_follows
                            or self._is_hopeless
                            or self._is_searched
                        )
                    )
        except TimeoutError:
            raise StandstillError(self._who_waits(count)) from None

    def complete(self, step: int) -> None:
        if step != self._ledger.completed_steps:
            raise ValueError(f"step {step} completed, but {self._ledger.completed_steps} was in progress")
        self._ledger.complete()
        self._between_steps = True
        self.expire()
        if self._num_groups is not None and self._num_taken >= self._num_groups and not self._may_roll_back:
            self.close()

    def roll_back(self, version: int, num_taken: int, reason: str) -> tuple[Group, ...]:
        """Steps from ``version`` on have not happened; those before it took ``num_taken`` groups. Nothing is admitted
        until weights with that many steps are published (`retire`).

        Running groups are cut off. They and the groups given back, which were ready and hold tokens of the steps
        undone, begin anew: same admission, prompt and random numbers, under the weights that are published then.
        """
        stale = [group for group in self.ready if group.newest_version > version]
        running = [index for index in self._ledger.indices(State.RUNNING) if index not in self._begin_anew]
        self._ledger.roll_back(version, [group.index for group in stale])
        self.num_undone += self._num_taken - num_taken
        self._num_taken, self._holds, self._between_steps = num_taken, True, False
        self._begin_anew = {index: replace(a, version=version) for index, a in self._begin_anew.items()}
        self.begin_anew(stale, version)
        for index in running:
            self._cut_off[index] = reason
            self._give_up(index, reason)
        self._begin_search([])
        self._pace.begin_anew()
        return tuple(stale)

    @property
    def ready(self) -> list[Group]:
        """Groups that wait for a step, by index."""
        return [self._groups[index] for index in sorted(self._groups)]

    def begin_anew(self, groups: Sequence[Group], version: int) -> None:
        """These, which were ready, are of weights that do not count; in the store they have expired."""
        for group in groups:
            self._ledger.again(group.index, version)
            self._anew(self._groups.pop(group.index).admission, version)

    def _anew(self, ended: Admission, version: int) -> None:
        """The next attempt, under weights of now; who is asked for a slot next gets the lowest index."""
        self._begin_anew[ended.index] = replace(ended, version=version, attempt=ended.attempt + 1)

    def hold(self, on: bool) -> None:
        """Whether to admit nothing at the moment; what runs goes on."""
        self._holds = on
        self._wake()

    def expire(self) -> None:
        """Give up groups beyond the bound: counted, never consumed, replaced by later prompts or asked again.

        After a step their slots stay empty until it is published, or the next one begins without that: who is admitted
        sooner counts from the older weights, and expires the sooner for it."""
        for index in self._ledger.overdue():
            self.num_expired += 1
            done, bound = self._ledger.completed_steps, self._ledger.max_staleness
            reason = (
                f"version {self._ledger.version(index)} with {done} steps completed, queue.max_staleness is {bound}"
            )
            is_ready = self._ledger.state(index) is State.READY
            waits = self._begin_anew.pop(index, None)
            self._ledger.give_up(index)
            self._cut_off.pop(index, None)
            self._prompts.expired(index)
            self._emit("expire", admission=index, reason=reason, finished=is_ready)
            if is_ready:
                self._store.discarded(self._groups.pop(index), Fate.EXPIRED, reason)
            elif waits is not None:  # nobody has been given it
                self._store.discarded(Group(admission=waits, failure=reason), Fate.EXPIRED, reason)
            else:
                self._expired_running[index] = reason
                self._give_up(index, reason)
            self._search_from = max(self._search_from, self._oldest_left)
            self._wake()

    def close(self) -> None:
        """The run ends: nothing more is admitted, and groups that no step has used are aborted, those too that are
        filled later."""
        if self._closed:
            return
        self._closed = True
        for index in self._ledger.indices(State.RUNNING):
            self._give_up(index, ENDED)
        self._abort_waiting()
        for index in sorted(self._groups):
            self._ledger.give_up(index)
            self._store.discarded(self._groups.pop(index), Fate.ABORTED, ENDED)
        self._wake()

    def _abort_waiting(self) -> None:
        for admission in self._begin_anew.values():
            self._store.discarded(Group(admission=admission, failure=ENDED), Fate.ABORTED, ENDED)
        self._begin_anew.clear()

    def retire(self, version: int) -> None:
        self._ledger.retire(version)
        self._holds = False
        self._admit_again()
        waiting_share = self._pace.begin_anew()
        if self._adaptive and waiting_share is not None:
            self._adapt(waiting_share)
        self._wake()

    @property
    def may_admit_fewer(self) -> bool:
        """Whether there is room below the slots there are."""
        return self._ledger.num_slots > self._fewest_slots > 0

    @property
    def slots(self) -> int:
        """That may be held by new admissions."""
        return self._ledger.limit

    def admit_fewer(self) -> bool:
        """One batch of slots less for new admissions; False if there are as few as may be."""
        return self._ledger.lower(self._fewest_slots)

    def admit_more(self) -> bool:
        """One batch of slots more; False if all are given out."""
        more = self._ledger.heighten()
        self._wake()
        return more

    def _adapt(self, waiting_share: float) -> None:
        """By the share of its time that the learner waited for batches, and the groups that wait for it."""
        if waiting_share > WAITS_TOO_LONG:
            self.admit_more()
        elif waiting_share < NEVER_WAITS and self._ledger.count(State.READY) >= self._ledger.prompts_per_step:
            self.admit_fewer()

    def _admit_again(self) -> None:
        if self._between_steps:
            self._between_steps = False
            self._wake()

    @property
    def _no_more(self) -> bool:
        """Nothing will be admitted any more; groups that run or wait may still expire, and their prompts come again."""
        unfinished = self._prompts.may_come_again or self._begin_anew or self._may_roll_back
        return self._closed or not (self._prompts.has_next or unfinished)

    @property
    def _may_begin_anew(self) -> bool:
        return bool(self._begin_anew) and not self._holds

    @property
    def _may_admit(self) -> bool:
        waits = self._between_steps and self._ledger.drops_at_bound
        return self._ledger.can_admit and self._more_are_needed and not waits and not self._holds

    @property
    def _more_are_needed(self) -> bool:
        given_up = self.num_failed + self.num_expired + self.num_filtered + self.num_undone
        spare = self._ledger.num_slots - (self._ledger.max_staleness + 1) * self._ledger.prompts_per_step
        wanted = self._num_groups is None or self._ledger.next_index - given_up < self._num_groups + spare
        return wanted and not self._window_is_used_up

    def _begin_search(self, consumed: Sequence[int]) -> None:
        """The next batch is sought behind this one, among groups that may have ended already."""
        self._search_from = min([*self._left(), *(index + 1 for index in consumed[-1:])], default=self._search_from)
        self._reasons = {index: reason for index, reason in self._reasons.items() if index >= self._search_from}
        self._wake()

    @property
    def _oldest_left(self) -> int:
        """First admission that may belong to the next batch, or was left out of it."""
        return min([*self._left(), *self._reasons], default=self._ledger.next_index)

    def _left(self) -> list[int]:
        """The first admission that no step has used, if there is one."""
        oldest = self._ledger.oldest_left
        return [] if oldest is None else [oldest]

    @property
    def _window_is_used_up(self) -> bool:
        """Whether the next batch may not be sought any further."""
        if self._max_rounds is None:
            return False
        return self._ledger.next_index >= self._search_from + self._max_rounds * self._ledger.prompts_per_step

    @property
    def _is_searched(self) -> bool:
        """No further prompt may be asked for the next batch, and none is running."""
        return self._window_is_used_up and self._ledger.count(State.RUNNING) == 0

    @property
    def _is_hopeless(self) -> bool:
        return self._failures.are_hopeless(self._ledger.num_slots)

    @property
    def _nothing_follows(self) -> bool:
        return not self._prompts.has_next and self._ledger.count(State.RUNNING) == 0

    def _wake(self) -> None:
        self._changed.set()
        self._wake_producers()

    def _wake_producers(self) -> None:
        if not self._producers:
            return
        going_on = len(self._producers) if self._no_more else len(self._begin_anew) if self._may_begin_anew else 0
        if self._prompts.has_next and self._may_admit:
            going_on += self._ledger.num_free
        while self._producers and going_on > 0:
            producer = self._producers.popleft()
            if not producer.done():
                producer.set_result(None)
                going_on -= 1

    async def _until_admitted(self) -> None:
        """Until there is a slot to give out, or none will ever be. Whoever is woken and does not come to it, because
        another one was there before or it is cancelled, leaves the next one no worse off."""
        while not (self._no_more or self._may_begin_anew or (self._prompts.has_next and self._may_admit)):
            producer = asyncio.get_running_loop().create_future()
            self._producers.append(producer)
            try:
                await producer
            except asyncio.CancelledError:
                self._wake_producers()
                raise

    async def _until(self, condition: Callable[[], bool]) -> None:
        """No await lies between a false condition and the wait, so no wake-up is lost."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _who_waits(self, count: int) -> str:
        count_of, running, failed = self._ledger.count, self._ledger.indices(State.RUNNING), self._failures
        oldest = ", ".join(map(str, running[:5])) + (", ..." if len(running) > 5 else "")
        named = f" (admission{'s' if len(running) > 1 else ''} {oldest})" if running else ""
        return (
            f"the learner has waited {self._stall_timeout_s:g} s (queue.stall_timeout_s) for a batch of {count} "
            f"groups: {count_of(State.READY)} are ready, {len(running)} are still running{named}, "
            f"{count_of(State.CONSUMED)} of {self._ledger.num_slots} slots wait for a publication"
            + (f"; {failed.total} have failed, the last because: {failed.last}" if failed.total else "")
        )
