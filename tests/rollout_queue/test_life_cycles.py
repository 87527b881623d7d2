"""Life cycles of groups in the hundreds of thousands: none is consumed beyond the bound, each ends exactly once,
nothing stands still; through stragglers, failures, rare publication, dropped groups and restarts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearpolicy.rollout_queue.ledger import Ledger, State


class World:
    """A ledger, and what is true of it said once more and apart."""

    def __init__(self, *, per_step: int, bound: int, order: str, at_bound: str, every: int, spare: int) -> None:
        self.settings = {"prompts_per_step": per_step, "max_staleness": bound, "order": order, "at_bound": at_bound}
        self.settings["num_slots"] = (bound + 1) * per_step + spare
        self.ledger = Ledger(**self.settings)
        self.per_step, self.bound, self.every = per_step, bound, every
        self.endings: Counter[str] = Counter()
        self.ended: set[int] = set()
        self.admitted = 0
        self.oldest: dict[int, int] = {}
        """Of groups that have not ended: no token of theirs is older."""
        self.newest: dict[int, int] = {}
        """Of groups that are ready."""

    def admit(self) -> None:
        held = self.ledger.admit()
        assert held.index == self.admitted
        self.admitted += 1
        self.oldest[held.index] = held.version

    def end(self, index: int, ending: str) -> None:
        assert index not in self.ended, f"group {index} ends a second time, as {ending}"
        self.ended.add(index)
        self.oldest.pop(index)
        self.endings[ending] += 1

    def fail(self, index: int) -> None:
        self.ledger.drop(index)
        self.end(index, "failed")

    def fill(self, index: int, version: int, newest: int) -> None:
        self.oldest[index], self.newest[index] = version, newest
        self.ledger.ready(index, version)
        self.expire()

    def expire(self) -> None:
        for index in self.ledger.overdue():
            assert self.ledger.drops_at_bound, f"group {index} is beyond the bound, and nobody may drop it"
            self.ledger.give_up(index)
            self.end(index, "expired")

    def step(self) -> bool:
        """A step, if there is a batch for it."""
        batch = self.ledger.batch(self.per_step)
        if batch is None:
            return False
        for index in batch:
            staleness = self.ledger.completed_steps - self.oldest[index]
            assert 0 <= staleness <= self.bound, f"group {index} would be consumed with staleness {staleness}"
        self.ledger.consume(batch)
        for index in batch:
            self.end(index, "consumed")
        self.ledger.complete()
        self.expire()
        if self.ledger.completed_steps % self.every == 0:
            self.ledger.retire(self.ledger.completed_steps)
        return True

    def restart(self, begun: Callable[[int], bool] | None = None) -> None:
        """The process dies: what was running begins anew, under the published weights. With ``begun`` it is stopped:
        what was ready is to be run again too, and of all that runs, those that this chooses go on from their tokens."""
        before = self.ledger
        due = max(before.published, before.completed_steps // self.every * self.every)
        running = dict.fromkeys(before.indices(State.RUNNING), due)
        ready = {index: before.version(index) for index in before.indices(State.READY)}
        if begun is not None:
            chosen = {index: self.oldest[index] for index in (*running, *ready) if begun(index)}
            running, ready = dict.fromkeys((*running, *ready), due) | chosen, {}
        consumed = {held.index: held.step for held in before._held.values() if held.state is State.CONSUMED}
        self.ledger = Ledger(**self.settings)
        self.ledger.restore(
            completed=before.completed_steps,
            published=due,
            next_index=before.next_index,
            running=running,
            ready=ready,
            consumed={index: step for index, step in consumed.items() if step >= due},
        )
        self.oldest |= running
        self.expire()

    def roll_back(self, version: int) -> None:
        """The steps from this one on have not happened."""
        ready = self.ledger.indices(State.READY)
        anew = [index for index in ready if self.newest[index] > version]
        self.oldest |= dict.fromkeys([*anew, *self.ledger.indices(State.RUNNING)], version)
        self.ledger.roll_back(version, anew)
        assert all(oldest <= version for oldest in self.oldest.values())
        self.ledger.retire(version)

    @property
    def stands_still(self) -> bool:
        """Nothing runs, nothing may be admitted, and no step can be made."""
        idle = not self.ledger.indices(State.RUNNING) and not self.ledger.can_admit
        return idle and self.ledger.batch(self.per_step) is None

    def check(self) -> None:
        held = len(self.ledger._held)
        waiting = self.ledger.count(State.CONSUMED)
        assert held <= self.ledger.num_slots
        assert self.admitted == len(self.ended) + held - waiting == sum(self.endings.values()) + len(self.oldest)
        assert not self.stands_still


def a_world(luck: random.Random) -> World:
    bound = luck.randint(0, 3)
    order = luck.choice(["admission", "ready"])
    at_bound = luck.choice(["wait", "drop"]) if order == "ready" else "wait"
    per_step = luck.randint(1, 5)
    spare = luck.randint(0, 2 * per_step) if at_bound == "drop" else 0
    every = luck.randint(1, bound + 1)
    return World(per_step=per_step, bound=bound, order=order, at_bound=at_bound, every=every, spare=spare)


def drawn(luck: random.Random, share: float, index: int) -> bool:
    return luck.random() < share


def lived(luck: random.Random, cycles: int) -> Counter[str]:
    """Drive one world until so many groups have ended."""
    world = a_world(luck)
    slow = luck.choice([0.0, 0.0, 0.3])
    while sum(world.endings.values()) < cycles:
        while world.ledger.can_admit:
            world.admit()
        running = world.ledger.indices(State.RUNNING)
        chance = luck.random()
        if running and chance < 0.85:
            index = luck.choice(running[1:] or running) if luck.random() < slow else luck.choice(running)
            if luck.random() < 0.05:
                world.fail(index)
            else:
                # Its oldest token may be as old as its admission, or the weights changed before the first one.
                oldest = world.oldest[index]
                oldest = luck.randint(oldest, max(oldest, world.ledger.published))
                world.fill(index, oldest, luck.randint(oldest, max(oldest, world.ledger.published)))
        elif chance > 0.995:
            world.restart(luck.choice([None, *(partial(drawn, luck, share) for share in (0.0, 0.5, 1.0))]))
        elif chance > 0.985 and world.ledger.completed_steps:
            done = world.ledger.completed_steps
            world.roll_back(luck.randint(max(0, done - 4), done - 1))
        while world.step():
            pass
        world.check()
    return world.endings


def lived_in_all(cycles: int, seed: int) -> Counter[str]:
    luck, endings = random.Random(seed), Counter()
    while sum(endings.values()) < cycles:
        endings += lived(luck, 500)
    return endings


def test_ten_thousand_life_cycles_keep_the_bound_and_end_once():
    """I1, I2."""
    endings = lived_in_all(10_000, seed=0)
    assert min(endings.values()) > 50 and set(endings) == {"consumed", "failed", "expired"}


@pytest.mark.large
@pytest.mark.timeout(1800)
def test_a_million_life_cycles():
    assert sum(lived_in_all(1_000_000, seed=1).values()) >= 1_000_000


class Transitions(RuleBasedStateMachine):
    """Any order of events at all, shrunk to the shortest that breaks a promise."""

    @initialize(
        per_step=st.integers(1, 3),
        bound=st.integers(0, 2),
        mode=st.sampled_from([("admission", "wait"), ("ready", "wait"), ("ready", "drop")]),
        every=st.integers(1, 3),
        spare=st.integers(0, 3),
    )
    def begin(self, per_step, bound, mode, every, spare):
        order, at_bound = mode
        self.world = World(
            per_step=per_step,
            bound=bound,
            order=order,
            at_bound=at_bound,
            every=min(every, bound + 1),
            spare=spare if at_bound == "drop" else 0,
        )

    @precondition(lambda self: self.world.ledger.can_admit)
    @rule()
    def admit(self):
        self.world.admit()

    @precondition(lambda self: self.world.ledger.indices(State.RUNNING))
    @rule(data=st.data())
    def fill(self, data):
        index = data.draw(st.sampled_from(self.world.ledger.indices(State.RUNNING)))
        oldest, published = self.world.oldest[index], self.world.ledger.published
        oldest = data.draw(st.integers(oldest, max(oldest, published)))
        self.world.fill(index, oldest, data.draw(st.integers(oldest, max(oldest, published))))

    @precondition(lambda self: self.world.ledger.indices(State.RUNNING))
    @rule(data=st.data())
    def fail(self, data):
        self.world.fail(data.draw(st.sampled_from(self.world.ledger.indices(State.RUNNING))))

    @rule()
    def step(self):
        self.world.step()

    @rule()
    def restart(self):
        self.world.restart()

    @rule(begun=st.functions(like=lambda index: ..., returns=st.booleans(), pure=True))
    def stop_and_take_up(self, begun):
        self.world.restart(begun)

    @precondition(lambda self: self.world.ledger.completed_steps)
    @rule(data=st.data())
    def roll_back(self, data):
        self.world.roll_back(data.draw(st.integers(0, self.world.ledger.completed_steps - 1)))

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()


TestTransitions = Transitions.TestCase
TestTransitions.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
