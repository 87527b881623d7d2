"""The staleness arithmetic alone: thousands of schedules of admissions, endings, steps and publications."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nearpolicy.errors import StalenessError
from nearpolicy.rollout_queue.ledger import Ledger, State, remaining_fit


class Schedule:
    """One run on paper: at every tick one of the things that could happen next does, chosen at random.

    It keeps its own books of versions and slots, so that the ledger is not asked whether the ledger is right.
    """

    def __init__(self, *, seed, order, per_step, bound, publish_every, steps, straggling, failing) -> None:
        self.ledger = Ledger(prompts_per_step=per_step, max_staleness=bound, order=order)
        self.random = random.Random(seed)
        self.order, self.per_step, self.bound = order, per_step, bound
        self.publish_every, self.steps = publish_every, steps
        self.straggling, self.failing = straggling, failing
        self.admitted_under: dict[int, int] = {}
        self.oldest_token: dict[int, int] = {}
        self.endings: Counter[int] = Counter()
        self.slow: set[int] = set()
        self.running: list[int] = []
        self.unpublished: list[list[int]] = []
        self.batches: list[list[int]] = []
        self.failed = 0
        self.completed = self.published = self.on_generator = 0
        self.learner = "waiting"
        self.worst = -1

    def run(self) -> Schedule:
        while self.learner != "done":
            possible = self._possible()
            assert possible, (
                f"standstill with {self.completed} steps completed, {self.published} published, "
                f"{self.ledger.count(State.RUNNING)} running and {self.ledger.count(State.READY)} ready groups"
            )
            self.random.choice(possible)()
            self._check_slots()
        return self

    def _possible(self) -> list:
        moves = []
        if quick := [i for i in self.running if i not in self.slow]:
            moves.append(lambda: self._end(self.random.choice(quick)))
        needed = self.steps * self.per_step + self.failed - len(self.admitted_under)
        if self.ledger.can_admit and needed > 0:
            moves.append(self._admit)
        if self.learner == "waiting" and self.ledger.batch(self.per_step) is not None:
            moves.append(self._begin_step)
        elif self.learner == "learning":
            moves.append(self._complete)
        elif self.learner == "loading":
            moves.append(self._load)
        elif self.learner == "loaded":
            moves.append(self._retire)
        if not moves and self.running:  # stragglers end when all else waits
            moves.append(lambda: self._end(self.random.choice(self.running)))
        return moves

    def _admit(self) -> None:
        held = self.ledger.admit()
        assert held.version == self.published
        self.admitted_under[held.index] = held.version
        self.running.append(held.index)
        if self.random.random() < self.straggling:
            self.slow.add(held.index)

    def _end(self, index: int) -> None:
        self.running.remove(index)
        if self.random.random() < self.failing:
            self.ledger.drop(index)
            self.endings[index] += 1
            self.failed += 1
        else:
            # Its first token is drawn at any time since the admission, so under any version since then.
            oldest = self.random.randint(self.admitted_under[index], self.on_generator)
            self.oldest_token[index] = oldest
            self.ledger.ready(index, oldest)

    def _begin_step(self) -> None:
        batch = self.ledger.batch(self.per_step)
        self.ledger.consume(batch)
        assert len(set(batch)) == self.per_step
        for index in batch:
            self.endings[index] += 1
            staleness = self.completed - self.oldest_token[index]
            assert 0 <= staleness <= self.bound
            self.worst = max(self.worst, staleness)
        self.batches.append(batch)
        self.unpublished.append(batch)
        self.learner = "learning"

    def _complete(self) -> None:
        self.ledger.complete()
        self.completed += 1
        last = self.completed == self.steps
        self.learner = "loading" if self.completed % self.publish_every == 0 or last else "waiting"

    def _load(self) -> None:
        self.on_generator = self.completed
        self.learner = "loaded"

    def _retire(self) -> None:
        self.ledger.retire(self.completed)
        self.published = self.completed
        self.unpublished.clear()
        self.learner = "done" if self.completed == self.steps else "waiting"

    def _check_slots(self) -> None:
        consumed, unpublished = len(self.batches) * self.per_step, len(self.unpublished) * self.per_step
        ready = len(self.oldest_token) - consumed
        assert len(self.admitted_under) == len(self.running) + ready + consumed + self.failed
        assert len(self.running) + ready + unpublished <= (self.bound + 1) * self.per_step
        assert self.ledger.count(State.READY) == ready
        assert self.ledger.count(State.RUNNING) == len(self.running)


@st.composite
def settings_of_a_run(draw) -> dict:
    publish_every = draw(st.sampled_from([1, 2, 4]))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "order": draw(st.sampled_from(["admission", "ready"])),
        "per_step": draw(st.integers(1, 4)),
        "bound": draw(st.integers(publish_every - 1, publish_every + 1)),
        "publish_every": publish_every,
        "steps": draw(st.integers(1, 7)),
        "straggling": draw(st.sampled_from([0.0, 0.1, 0.4])),
        "failing": draw(st.sampled_from([0.0, 0.1, 0.4])),
    }


def check_schedule(run: dict) -> None:
    schedule = Schedule(**run).run()
    assert set(schedule.endings.values()) == {1}
    assert len(schedule.endings) == len(schedule.admitted_under) == run["steps"] * run["per_step"] + schedule.failed
    if run["order"] == "admission":
        consumed = [index for batch in schedule.batches for index in batch]
        assert consumed == sorted(consumed)


@settings(max_examples=2000, deadline=None)
@given(settings_of_a_run())
def test_no_schedule_passes_the_bound_stands_still_or_holds_too_many_slots(run):
    check_schedule(run)


@pytest.mark.large
@settings(max_examples=30_000, deadline=None)
@given(settings_of_a_run())
def test_no_schedule_of_very_many_passes_the_bound_or_stands_still(run):
    check_schedule(run)


@pytest.mark.parametrize("order", ["admission", "ready"])
@pytest.mark.parametrize(("bound", "publish_every"), [(0, 1), (1, 1), (3, 1), (1, 2), (3, 4), (5, 4)])
def test_the_bound_is_reached_and_so_no_tighter_than_it_says(order, bound, publish_every):
    common = {"order": order, "per_step": 3, "bound": bound, "publish_every": publish_every, "steps": 12}
    worst = [Schedule(seed=seed, straggling=0.3, failing=0.1, **common).run().worst for seed in range(40)]
    assert max(worst) == bound


def test_consumption_in_admission_order_gives_the_same_batches_under_every_schedule():
    common = {"order": "admission", "per_step": 3, "bound": 2, "publish_every": 2, "steps": 6, "failing": 0.0}
    batches = [Schedule(seed=seed, straggling=0.3, **common).run().batches for seed in range(30)]
    assert all(each == [[3 * s, 3 * s + 1, 3 * s + 2] for s in range(6)] for each in batches)


def test_consumption_when_ready_lets_the_finished_overtake_a_straggler():
    ledger = Ledger(prompts_per_step=2, max_staleness=1, order="ready")
    for _ in range(4):
        ledger.admit()
    for index in (3, 1):
        ledger.ready(index, 0)
    assert ledger.batch(2) == [1, 3]  # 0 and 2 still fit into the one step that version 0 has left
    strict = Ledger(prompts_per_step=2, max_staleness=1, order="admission")
    for _ in range(4):
        strict.admit()
    for index in (3, 1):
        strict.ready(index, 0)
    assert strict.batch(2) is None


def test_consumption_when_ready_takes_the_oldest_tokens_first():
    ledger = Ledger(prompts_per_step=2, max_staleness=2, order="ready")
    for _ in range(6):
        ledger.admit()
    for index in (0, 1):
        ledger.ready(index, 0)
    ledger.consume(ledger.batch(2))
    ledger.complete()
    ledger.retire(1)
    for index, oldest in ((2, 1), (3, 0), (4, 1), (5, 0)):
        ledger.ready(index, oldest)
    assert ledger.batch(2) == [3, 5]


def test_consumption_when_ready_waits_rather_than_leave_more_old_groups_than_steps_can_take():
    ledger = Ledger(prompts_per_step=2, max_staleness=1, order="ready")
    for _ in range(4):
        ledger.admit()
    for index in (2, 3):
        ledger.ready(index, 0)
    ledger.consume(ledger.batch(2))
    ledger.complete()
    ledger.retire(1)
    for index in (ledger.admit().index, ledger.admit().index):
        ledger.ready(index, 1)
    assert ledger.batch(2) is None  # 0 and 1 are of version 0: this is the last step that may use them
    ledger.ready(0, 0)
    assert ledger.batch(2) is None
    ledger.ready(1, 1)  # its first token turned out to be of version 1, so it has a step more
    assert ledger.batch(2) == [0, 1]


@example([0, 0, 1], 1, 0, 2)
@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 6), st.integers(0, 4), st.integers(1, 4))
def test_groups_fit_exactly_if_consuming_the_oldest_first_meets_every_deadline(versions, completed, bound, per_step):
    waiting, step, in_time = sorted(versions), completed + 1, True
    while waiting:
        batch, waiting = waiting[:per_step], waiting[per_step:]
        in_time = in_time and all(step - version <= bound for version in batch)
        step += 1
    assert remaining_fit(versions, completed=completed, max_staleness=bound, per_step=per_step) is in_time


def learner_at(version: int, *, bound: int, admitted_at: int) -> Ledger:
    """A ledger with ``version`` steps completed whose next admissions were made under ``admitted_at``."""
    ledger = Ledger(prompts_per_step=1, max_staleness=bound, order="admission")
    ledger.completed_steps, ledger.published = version, admitted_at
    return ledger


@pytest.mark.parametrize(("oldest", "accepted"), [(3, False), (4, True), (5, True)])
def test_age_is_steps_completed_minus_oldest_version_and_age_equal_to_the_limit_is_accepted(oldest, accepted):
    ledger = learner_at(5, bound=1, admitted_at=3)
    index = ledger.admit().index
    ledger.ready(index, oldest)
    if accepted:
        ledger.consume([index])
        assert ledger.count(State.CONSUMED) == 1
    else:
        with pytest.raises(StalenessError, match=r"group 0 of version 3 .* 5 steps completed: staleness 2 exceeds"):
            ledger.consume([index])


def test_a_version_from_the_future_is_an_error():
    ledger = learner_at(5, bound=1, admitted_at=5)
    index = ledger.admit().index
    with pytest.raises(StalenessError, match="group 0 claims version 6, but only 5 steps are completed"):
        ledger.ready(index, 6)


def test_a_token_older_than_its_admission_is_an_error():
    ledger = learner_at(5, bound=1, admitted_at=5)
    index = ledger.admit().index
    with pytest.raises(StalenessError, match="token of version 4, but was admitted under 5"):
        ledger.ready(index, 4)


def test_an_admission_without_a_free_slot_is_an_error():
    ledger = Ledger(prompts_per_step=2, max_staleness=0, order="admission")
    ledger.admit(), ledger.admit()
    assert not ledger.can_admit
    with pytest.raises(StalenessError, match="admission 2 has no slot: 2 are held"):
        ledger.admit()


def test_a_group_ends_once():
    ledger = Ledger(prompts_per_step=1, max_staleness=1, order="admission")
    ledger.admit(), ledger.admit()
    ledger.drop(0)
    with pytest.raises(StalenessError, match="group 0 holds no slot"):
        ledger.ready(0, 0)
    ledger.ready(1, 0)
    with pytest.raises(StalenessError, match="group 1 is ready, expected one that is running"):
        ledger.ready(1, 0)
    ledger.consume([1])
    with pytest.raises(StalenessError, match="group 1 is consumed, expected one that is ready"):
        ledger.consume([1])


def test_slots_come_free_when_the_step_that_used_them_is_published_and_not_before():
    ledger = Ledger(prompts_per_step=1, max_staleness=1, order="admission")
    for index in range(2):
        ledger.admit()
        ledger.ready(index, 0)
    for step in range(2):
        ledger.consume([step])
        ledger.complete()
        assert not ledger.can_admit
    ledger.retire(1)
    assert ledger.admit().version == 1
    assert not ledger.can_admit  # the second step is not in version 1
    ledger.retire(2)
    assert ledger.admit().version == 2


@pytest.mark.parametrize("version", [0, 3])
def test_weights_older_than_published_or_newer_than_completed_cannot_be_published(version):
    ledger = learner_at(2, bound=2, admitted_at=1)
    with pytest.raises(StalenessError, match=f"version {version} cannot be published after 1 with 2 steps done"):
        ledger.retire(version)
