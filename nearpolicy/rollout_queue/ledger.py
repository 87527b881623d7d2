"""Staleness arithmetic, pure: who holds a slot, who may be consumed, and why the bound cannot be passed.

A *slot* is held from admission until the step that used its group is published, or until the group fails. At most
``(max_staleness + 1) * prompts_per_step`` are held (``generator.oversample`` times that). Write B for
prompts_per_step, eta for max_staleness.

Bound, consumption in admission order, any publication period. Let a group g be admitted when v steps are published and
s >= v are consumed. The s - v consumed but unpublished steps hold (s - v) B slots, so g finds at most
(eta + 1) B - (s - v) B - 1 unconsumed groups before it; consuming these B at a time, g is consumed after at most eta
further steps beyond v: its staleness, steps completed minus its oldest version (at least v), is at most eta.

Bound, consumption when ready. Let N(u) be the unconsumed groups of version <= u, running ones counted under the
version they were admitted under. With s steps completed and none in progress, N(u) <= (u + eta + 1 - s) B for every u:
those groups fit into the steps s .. u + eta that may still use them. It holds at the start. It survives an admission
under version v, because N(u) for u >= v is at most all unconsumed groups, (eta + 1) B - (s - v) B by the count of
slots. (While a step is in progress its groups count as consumed, and s + 1 stands for s.) It survives the end of a
group, which can only raise its version or take it away. And a batch is taken only if the rest satisfies it for s + 1
(`remaining_fit`); else the learner waits for groups still running. A group of version v that is consumed makes N(v) at
least 1, so s - v <= eta.

Dropped at the bound (``at_bound`` drop or requeue). The learner waits for nobody: after every step all groups beyond
the bound, finished or not, expire and free their slots, so that none of them can be consumed. A batch then needs B
groups that are ready, and more slots than (eta + 1) B may be given out: what they add is more groups to choose from.

Fewer slots for new admissions (`lower`) are those of a smaller bound: nothing above needs that all are given out. With
fewer than weight_sync_steps * B the last paragraph would not hold, so that is the floor.

Steps undone (`roll_back` to s of t completed steps). What consumed groups held is free, and of those unconsumed none
has a token of a version above s: such groups begin anew under s, at their old places. In admission order a group of
version v and those before it were at most (v + eta + 1 - t) B, and nothing is put before it: it is consumed by step
v + eta - (t - s). When ready, N(u) <= (u + eta + 1 - t) B for u < s, where s stands for t now; for u >= s all slots are
no more than that.

Taken up again (`restore`). Who holds a slot is who held one when the run ended, at the same place, but for slots that a
newer publication has freed. A group that begins anew counts under the weights of now. One that goes on from tokens that
it had counts under the oldest of these, and none is older than what it counted under before, running or ready. So in
admission order those before a group are those that were, and when ready N(u) is what it was, or less, for every u: both
bounds hold as if the run had not ended. (Where groups are dropped at the bound, what is beyond it is not gone on from:
it would expire at once.)

No standstill. A free slot is always given out, and every running group ends, within ``rollout_timeout_s`` and its
retries. So suppose that nothing runs. If B or more groups are unconsumed, all of them are ready: admission order takes
the first B; when ready, the B oldest, which leave max(0, N(u) - B) for every u, and those fit for s + 1. If fewer are
unconsumed while no slot is free, more than eta B are consumed and unpublished, so at least eta + 1 steps are, which
``weight_sync_steps - 1 <= max_staleness`` excludes once a due publication has been made.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nearpolicy.errors import StalenessError


class State(enum.Enum):
    """Where an admission is."""

    RUNNING = "running"
    READY = "ready"
    CONSUMED = "consumed"
    """Used by a step whose weights are not published yet."""


@dataclass(slots=True)
class Held:
    """One slot."""

    index: int
    version: int
    """No token of the group is older: the version at admission, then the oldest version of its tokens."""
    state: State = State.RUNNING
    step: int | None = None
    """The step that consumed it."""


class Ledger:
    """Slots and the rules over them; knows neither groups nor time."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_staleness: int,
        order: str,
        at_bound: str = "wait",
        num_slots: int | None = None,
    ) -> None:
        """``num_slots``: more than the bound has room for are given out only where groups may be dropped at it."""
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.num_slots = num_slots or (max_staleness + 1) * prompts_per_step
        self.limit = self.num_slots
        """Slots that new admissions may take at the moment; those that are held above it stay as they are."""
        self._order = order
        self.drops_at_bound = at_bound != "wait"
        """Whether groups beyond the bound are given up, instead of being waited for in time."""
        self._held: dict[int, Held] = {}
        """By index, in its order: every question about the oldest ones ends soon."""
        self._counts: dict[State, Counter[int]] = {state: Counter() for state in State}
        """Admissions by state and version. A run asks with every group that ends, and holds thousands of them."""
        self._blocked = (0, -1)
        """A running admission without which there is no batch of so many groups: (groups, its index)."""
        self.completed_steps = 0
        self.published = 0
        """Steps contained in the newest published weights."""
        self.next_index = 0

    def restore(
        self,
        *,
        completed: int,
        published: int,
        next_index: int,
        running: Mapping[int, int],
        ready: Mapping[int, int],
        consumed: Mapping[int, int],
    ) -> None:
        """Stand where a run stood. ``running``: admissions that begin anew, under the published weights, or go on from
        tokens that they had -> no token of theirs is older. ``ready``: admission -> its oldest version. ``consumed``:
        admission -> step, of steps that are not published."""
        if self._held or self.next_index:
            raise StalenessError("a ledger that has given out slots cannot take up the state of a run")
        self.completed_steps, self.published, self.next_index = completed, published, next_index
        found = [Held(index=index, version=oldest) for index, oldest in running.items()]
        found += [Held(index=index, version=oldest, state=State.READY) for index, oldest in ready.items()]
        found += [
            Held(index=index, version=published, state=State.CONSUMED, step=step) for index, step in consumed.items()
        ]
        for held in sorted(found, key=lambda held: held.index):
            self._enter(held)

    def count(self, state: State) -> int:
        return self._counts[state].total()

    def indices(self, state: State) -> list[int]:
        """Admissions in this state, oldest first."""
        return [held.index for held in self._held.values() if held.state is state]

    @property
    def oldest_left(self) -> int | None:
        """First admission that no step has used; None if there is none."""
        return next((held.index for held in self._held.values() if held.state is not State.CONSUMED), None)

    @property
    def can_admit(self) -> bool:
        return len(self._held) < self.limit

    @property
    def num_free(self) -> int:
        """Slots that new admissions may take."""
        return max(0, self.limit - len(self._held))

    def lower(self, floor: int) -> bool:
        """One batch of slots less for new admissions, as under a smaller bound; False at the ``floor``."""
        lowered = max(min(floor, self.num_slots), self.limit - self.prompts_per_step)
        changed, self.limit = lowered < self.limit, lowered
        return changed

    def heighten(self) -> bool:
        """One batch of slots more, up to all; False if it was all."""
        heightened = min(self.num_slots, self.limit + self.prompts_per_step)
        changed, self.limit = heightened > self.limit, heightened
        return changed

    def admit(self) -> Held:
        """Take a slot for the next admission index."""
        if not self.can_admit:
            raise StalenessError(f"admission {self.next_index} has no slot: {len(self._held)} are held")
        held = Held(index=self.next_index, version=self.published)
        self._enter(held)
        self.next_index += 1
        return held

    def ready(self, index: int, oldest_version: int) -> None:
        """The group is filled; ``oldest_version`` is the smallest version among its tokens."""
        held = self._expect(index, State.RUNNING)
        if oldest_version < held.version:
            raise StalenessError(
                f"group {index} holds a token of version {oldest_version}, but was admitted under {held.version}"
            )
        if oldest_version > self.completed_steps:
            raise StalenessError(
                f"group {index} claims version {oldest_version}, but only {self.completed_steps} steps are completed"
            )
        self._change(held, State.READY, oldest_version)

    def drop(self, index: int) -> None:
        """The admission ends without a group; its slot is free."""
        self._leave(self._expect(index, State.RUNNING))

    def roll_back(self, version: int, anew: Iterable[int]) -> None:
        """The steps from ``version`` on have not happened, and weights with that many are published next. Slots of
        consumed groups are free; those that run, and the ready ones of ``anew``, begin again under that version."""
        if not 0 <= version < self.completed_steps:
            raise StalenessError(f"there is no way back from step {self.completed_steps} to {version}")
        self.completed_steps = self.published = version
        again = set(anew)
        for held in list(self._held.values()):
            if held.state is State.CONSUMED:
                self._leave(held)
            elif held.state is State.RUNNING or held.index in again:
                self._change(held, State.RUNNING, version)
            elif held.version > version:
                raise StalenessError(f"group {held.index} of version {held.version} outlives a way back to {version}")

    def again(self, index: int, version: int) -> None:
        """The group, ready or running, begins again under this version, at its old place."""
        held = self._held[index]
        if held.state is State.CONSUMED:
            self._expect(index, State.READY)
        self._change(held, State.RUNNING, version)

    def overdue(self) -> list[int]:
        """Groups beyond the bound. Where the learner waits for all, a run that goes on by itself has none, by the proof
        above; a state put together from outside may have some that are ready, and they must not be consumed. Where
        groups are dropped at the bound, those still running belong to them: their oldest token may be of the version
        that they were admitted under."""
        states = (State.READY, State.RUNNING) if self.drops_at_bound else (State.READY,)
        least = self.completed_steps - self.max_staleness
        if all(version >= least for state in states for version in self._counts[state]):
            return []
        return [held.index for held in self._held.values() if held.state in states and held.version < least]

    def state(self, index: int) -> State:
        return self._held[index].state

    def version(self, index: int) -> int:
        return self._held[index].version

    def give_up(self, index: int) -> None:
        """A group that no step has used is not wanted any more; its slot is free."""
        if self._held[index].state is State.CONSUMED:
            self._expect(index, State.READY)
        self._leave(self._held[index])

    def batch(self, count: int) -> list[int] | None:
        """Indices of the next ``count`` groups, or None while the learner has to wait."""
        if self.count(State.READY) < count:
            return None
        return self._first(count) if self._order == "admission" else self._oldest(count)

    def _first(self, count: int) -> list[int] | None:
        """By index; None while one of them runs. Nobody comes to stand before the one that is waited for."""
        blocked, index = self._blocked
        if count >= blocked and index in self._held and self._held[index].state is State.RUNNING:
            return None
        first: list[int] = []
        for held in self._held.values():
            if held.state is State.RUNNING:
                self._blocked = count, held.index
                return None
            if held.state is State.READY:
                first.append(held.index)
                if len(first) == count:
                    break
        return first

    def _oldest(self, count: int) -> list[int] | None:
        """By version, of those that are ready; None while the rest could not be consumed in time."""
        ready, left = self._counts[State.READY], count
        rest = ready + self._counts[State.RUNNING]
        for version in sorted(ready):
            taken = min(left, ready[version])
            rest[version] -= taken
            left -= taken
        if not self.drops_at_bound and not remaining_fit(  # else what is left behind expires when its time comes
            rest,
            completed=self.completed_steps,
            max_staleness=self.max_staleness,
            per_step=self.prompts_per_step,
        ):
            return None
        of_ready = [held for held in self._held.values() if held.state is State.READY]
        chosen = sorted(of_ready, key=lambda held: (held.version, held.index))[:count]
        return sorted(held.index for held in chosen)

    def certain(self, count: int) -> list[int]:
        """The first groups of the next `batch`, as far as no group that still runs can change them."""
        if self._order != "admission":
            return []
        first = []
        for held in self._held.values():
            if held.state is State.RUNNING or len(first) == count:
                break
            if held.state is State.READY:
                first.append(held.index)
        return first

    def consume(self, indices: Iterable[int]) -> None:
        """The learner begins a step with these groups; the bound is checked once more."""
        for index in indices:
            held = self._expect(index, State.READY)
            staleness = self.completed_steps - held.version
            if staleness > self.max_staleness:
                raise StalenessError(
                    f"group {index} of version {held.version} would be consumed with {self.completed_steps} steps "
                    f"completed: staleness {staleness} exceeds queue.max_staleness {self.max_staleness}"
                )
            self._change(held, State.CONSUMED, held.version)
            held.step = self.completed_steps

    def complete(self) -> None:
        """The step that consumed last is done."""
        self.completed_steps += 1

    def retire(self, version: int) -> None:
        """Weights with ``version`` steps are published: slots of the steps they contain are free."""
        if not self.published <= version <= self.completed_steps:
            raise StalenessError(
                f"version {version} cannot be published after {self.published} with {self.completed_steps} steps done"
            )
        self.published = version
        for held in [h for h in self._held.values() if h.step is not None and h.step < version]:
            self._leave(held)

    def _enter(self, held: Held) -> None:
        self._held[held.index] = held
        self._counts[held.state][held.version] += 1

    def _leave(self, held: Held) -> None:
        del self._held[held.index]
        self._uncount(held)

    def _change(self, held: Held, state: State, version: int) -> None:
        self._uncount(held)
        held.state, held.version = state, version
        self._counts[state][version] += 1

    def _uncount(self, held: Held) -> None:
        counts = self._counts[held.state]
        counts[held.version] -= 1
        if not counts[held.version]:
            del counts[held.version]

    def _expect(self, index: int, state: State) -> Held:
        held = self._held.get(index)
        if held is None or held.state is not state:
            found = "holds no slot" if held is None else f"is {held.state.value}"
            raise StalenessError(f"group {index} {found}, expected one that is {state.value}")
        return held


def remaining_fit(
    versions: Iterable[int] | Mapping[int, int], *, completed: int, max_staleness: int, per_step: int
) -> bool:
    """Whether groups left behind by the batch of step ``completed`` can all be consumed within the bound.

    ``versions`` of the groups, or how many there are of each. Groups of version <= u must fit into the steps
    completed + 1 .. u + max_staleness.
    """
    number = 0
    for u, of_version in sorted(Counter(versions).items()):
        number += of_version
        if of_version and number > max(0, u + max_staleness - completed) * per_step:
            return False
    return True
