"""The loop over fakes: random schedules without real time, failures, crashes, standstill."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.environments.single_turn import Bounded
from nearpolicy.errors import EngineError, NearpolicyError, RolloutsError, StandstillError, SyncError
from nearpolicy.pipeline import Next, Pipeline
from nearpolicy.records import (
    Admission,
    Batch,
    Fate,
    Finish,
    Group,
    Prompt,
    Rollout,
    Row,
    Segment,
    StepReport,
    VersionRecord,
)
from nearpolicy.rollout_queue.ledger import Ledger
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue

MOST_ROLLBACKS = 20
"""Of one run, as monitors have a limit too: a walk back and forth may take as long as it likes."""


class Clock:
    """Time without time: whoever waits is woken one by one, in an order drawn from a seed; stragglers last."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._waiting: list[tuple[asyncio.Future[None], bool]] = []
        self.most_waiting = 0

    async def wait(self, *, straggler: bool = False) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, straggler))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        await future

    async def drive(self, run: asyncio.Task[None]) -> None:
        """Wake waiters until the run ends; fails if the run waits and nobody is left to wake."""
        idle = 0
        while not run.done():
            for _ in range(self.random.randint(1, 4)):
                await asyncio.sleep(0)
            self._waiting = [(f, slow) for f, slow in self._waiting if not f.done()]
            quick = [w for w in self._waiting if not w[1]]
            if self._waiting:
                idle = 0
                self.random.choice(quick or self._waiting)[0].set_result(None)
            else:
                idle += 1
                if idle > 50:
                    run.cancel()
                    pytest.fail("standstill: the run waits, and nothing that it could wait for is going on")
        await run


class World:
    """All roles at once, as fakes that count; what they see is checked at every call."""

    def __init__(
        self,
        clock: Clock,
        *,
        order: str = "admission",
        per_step: int = 2,
        bound: int = 1,
        publish_every: int = 1,
        steps: int = 3,
        straggling: float = 0.0,
        failing: float = 0.0,
        streaming: bool = False,
        at_bound: str = "wait",
        num_slots: int | None = None,
        rolling_back: float = 0.0,
    ) -> None:
        self.clock = clock
        self.rolling_back = rolling_back
        """Share of the steps after which the run goes back."""
        self.rollbacks = 0
        self.undone: list[int] = []
        """Groups of steps that were rolled back."""
        self.streaming = streaming
        self.ahead: list[int] = []
        """Groups of the coming step that were learnt before it."""
        self.most_ahead = 0
        self.per_step, self.bound, self.publish_every, self.steps = per_step, bound, publish_every, steps
        self.straggling, self.failing = straggling, failing
        self.generator_version = self.learner_version = self.published_version = 0
        self.running = self.most_held = 0
        self.stopped = False
        self.endings: Counter[int] = Counter()
        self.endings_told: list[tuple[int, Fate]] = []
        self.admitted_indices: list[int] = []
        self.expired_count = self.expired_running = 0
        self.filled_count = self.failed_count = self.consumed_count = self.unpublished_groups = 0
        self.batches: list[list[int]] = []
        self.staleness: list[int] = []
        self.logged: list[dict[str, float]] = []
        self.published_versions: list[int] = []
        self.num_slots = num_slots or (bound + 1) * per_step
        self.given_up: dict[int, str] = {}
        self.prompts: list[str] = []
        """In order of admission."""
        ledger = Ledger(
            prompts_per_step=per_step, max_staleness=bound, order=order, at_bound=at_bound, num_slots=self.num_slots
        )
        self.queue = StalenessBoundedQueue(
            ledger,
            self,
            self,
            seed=0,
            num_groups=per_step * steps,
            requeue=at_bound == "requeue",
            give_up=self.give_up,
            may_roll_back=rolling_back > 0,
        )
        self.pipeline = self.build()

    def build(self, **changed) -> Pipeline:
        parts = {
            "queue": self.queue,
            "environment": self,
            "learner": self,
            "weights": self,
            "store": self,
            "telemetry": self,
            "assemble": self.rows,
            "after_step": self.after_step,
            "num_steps": self.steps,
            "prompts_per_step": self.per_step,
            "num_slots": self.num_slots,
            "weight_sync_steps": self.publish_every,
            "streaming": self.streaming,
        }
        return Pipeline(**parts | changed)

    # Prompts.

    def prompt(self, index: int) -> Prompt | None:
        return Prompt(id=str(index), task="t", text="?")

    # Environment: every token is drawn under the version the generator holds at that moment.

    async def run(self, admission: Admission) -> Group:
        self.running += 1
        self._check()
        draw = random.Random(admission.index)  # what becomes of a group does not depend on the schedule
        straggler = draw.random() < self.straggling
        versions = []
        for _ in range(draw.randint(1, 3)):
            if admission.index in self.given_up:
                break
            await self.clock.wait(straggler=straggler)
            versions.append(self.generator_version)
        self.running -= 1
        if admission.index in self.given_up:
            return Group(admission=admission, failure=self.given_up[admission.index])
        if draw.random() < self.failing:
            return Group(admission=admission, failure="verifier crashed")
        return group_of(admission, versions)

    def give_up(self, admission: int, reason: str) -> None:
        self.given_up[admission] = reason

    async def stop(self) -> None:
        self.stopped = True

    # Learner.

    async def learn_ahead(self, rows: Sequence[Row]) -> None:
        groups = list(dict.fromkeys(row.group for row in rows))
        assert groups[: len(self.ahead)] == self.ahead and len(groups) > len(self.ahead)
        self.ahead = groups
        self.most_ahead = max(self.most_ahead, len(groups))
        await self.clock.wait()

    async def step(self, batch: Batch) -> StepReport:
        assert batch.step == self.learner_version
        assert [group.index for group in batch.groups][: len(self.ahead)] == self.ahead
        assert [row.group for row in batch.rows] == [group.index for group in batch.groups for _ in group.rollouts]
        self.ahead = []
        for group in batch.groups:
            self.staleness.append(batch.step - group.oldest_version)
        self.batches.append([group.index for group in batch.groups])
        self.consumed_count += len(batch.groups)
        self.unpublished_groups += len(batch.groups)
        self._check()
        await self.clock.wait(straggler=self.clock.random.random() < 0.3)
        self.learner_version += 1
        return StepReport(version=self.learner_version, updates=4 * self.learner_version, metrics={})

    def rows(self, groups: Sequence[Group], step: int) -> tuple[Row, ...]:
        return tuple(
            Row(group=g.index, sample=0, segment=s, trained=s.mask, advantages=np.ones(len(s.token_ids)))
            for g in groups
            for s in g.rollouts[0].segments
        )

    # Weight sync: the generator changes some time before the publication is known to be complete.

    async def publish(self) -> VersionRecord:
        await self.clock.wait()
        self.generator_version = self.learner_version
        await self.clock.wait()
        self.published_versions.append(self.learner_version)
        self.unpublished_groups = 0
        return VersionRecord(lineage=0, version=self.learner_version, updates=0, fingerprint="", parent=None)

    # Store.

    def admitted(self, admission: Admission) -> None:
        self.admitted_indices.append(admission.index)
        self.prompts.append(admission.prompt.id)

    def filled(self, group: Group) -> None:
        self.filled_count += 1
        self.endings[group.index] += 1

    def discarded(self, group: Group, fate: Fate, reason: str) -> None:
        self.endings_told.append((group.index, fate))
        if fate is Fate.EXPIRED:
            self.expired_count += 1
            if group.index not in self.endings:  # it was not finished
                self.endings[group.index] += 1
                self.expired_running += 1
        elif fate is Fate.ABORTED:
            if group.index not in self.endings:  # it was still running when the run ended
                self.endings[group.index] += 1
        else:
            assert (fate, reason) == (Fate.FAILED, "verifier crashed")
            self.failed_count += 1
            self.endings[group.index] += 1

    def consumed(self, batch: Batch, report: StepReport, fates) -> None:
        assert sum(n for of_rollout in fates.values() for n in of_rollout.values()) == batch.num_tokens

    def published(self, record: VersionRecord, wall_s: float) -> None:
        self.published_version = record.version

    # Telemetry.

    def event(self, role: str, kind: str, **fields) -> None: ...

    def log_step(self, step: int, metrics) -> None:
        self.logged.append({"step": step, **metrics})

    async def after_step(self, report: StepReport) -> Next:
        if self.rollbacks < MOST_ROLLBACKS and self.clock.random.random() < self.rolling_back:
            back_to = self.clock.random.randint(max(0, report.version - 3), report.version - 1)
            return Next(await self.roll_back(back_to))
        return Next(report.version)

    async def roll_back(self, version: int) -> int:
        """As a session does it: the decision at once, the weights some time later."""
        self.rollbacks += 1
        undone = [index for batch in self.batches[version:] for index in batch]
        del self.batches[version:], self.logged[version:]
        self.undone += undone
        taken = sum(map(len, self.batches))
        for group in self.queue.roll_back(version, taken, "rolled back"):
            assert group.newest_version > version
            self.filled_count -= 1
            self.endings[group.index] -= 1
        self.unpublished_groups = 0
        self.learner_version = version
        await self.clock.wait()
        await self.publish()
        self.queue.retire(version)
        return version

    def retried(self, group: Group, fate: Fate, reason: str) -> None:
        assert (fate, reason) == (Fate.ABORTED, "rolled back")
        self.given_up.pop(group.index)

    def _check(self) -> None:
        queued = len(self.queue._groups)
        expired = self.expired_count - self.expired_running
        assert self.filled_count + self.failed_count == self.consumed_count + queued + self.queue.num_failed + expired
        held = self.running - len(self.given_up) + self.expired_running + queued + self.unpublished_groups
        self.most_held = max(self.most_held, held)
        assert held <= self.num_slots


def group_of(admission: Admission, versions: Sequence[int]) -> Group:
    segment = Segment(
        context_ids=[1],
        token_ids=np.arange(len(versions)),
        mask=np.ones(len(versions), bool),
        behavior_logprobs=np.zeros(len(versions)),
        versions=versions,
        finish=Finish.STOP,
    )
    return Group(
        admission=admission,
        rollouts=(Rollout(sample=0, segments=(segment,), text="", numerics="exact"),),
        verdicts=({},),
        rewards=(1.0,),
    )


def run_world(seed: int, **options) -> World:
    async def scenario() -> World:
        clock = Clock(seed)
        world = World(clock, **options)
        await clock.drive(asyncio.create_task(world.pipeline.run()))
        return world

    return asyncio.run(scenario())


@st.composite
def runs(draw) -> dict:
    publish_every = draw(st.sampled_from([1, 2, 4]))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "order": draw(st.sampled_from(["admission", "ready"])),
        "per_step": draw(st.integers(1, 3)),
        "bound": draw(st.integers(publish_every - 1, publish_every + 1)),
        "publish_every": publish_every,
        "steps": draw(st.integers(1, 6)),
        "straggling": draw(st.sampled_from([0.0, 0.2])),
        "failing": draw(st.sampled_from([0.0, 0.2])),
        "streaming": draw(st.booleans()),
    }


def check_run(run: dict) -> None:
    world = run_world(**run)
    assert max(world.staleness) <= run["bound"]
    assert len(world.batches) == len(world.logged) == run["steps"]
    assert all(len(batch) == run["per_step"] for batch in world.batches)
    consumed = [index for batch in world.batches for index in batch]
    assert len(consumed) == len(set(consumed))
    assert world.consumed_count + world.failed_count == len(world.admitted_indices)
    assert world.endings == Counter(world.admitted_indices)  # every admission ends exactly once
    assert world.published_versions[-1] == run["steps"]
    assert world.clock.most_waiting <= (run["bound"] + 1) * run["per_step"] + 2
    if run["order"] == "admission":
        failed = set(world.admitted_indices) - set(consumed)
        assert consumed == [index for index in range(len(world.admitted_indices)) if index not in failed]


@settings(max_examples=300, deadline=None)
@given(runs())
def test_every_run_ends_within_bound_and_slots_whatever_the_delays_and_failures(run):
    check_run(run)


@settings(max_examples=200, deadline=None)
@given(runs(), st.sampled_from([0.1, 0.3]))
def test_runs_that_go_back_keep_the_bound_and_consume_every_group_at_most_once(run, rolling_back):
    world = run_world(**run, rolling_back=rolling_back)
    assert max(world.staleness) <= run["bound"]
    assert len(world.batches) == run["steps"] and all(len(batch) == run["per_step"] for batch in world.batches)
    consumed = [*world.undone, *(index for batch in world.batches for index in batch)]
    assert len(consumed) == len(set(consumed))
    assert len(consumed) + world.failed_count == len(world.admitted_indices)
    assert world.endings == Counter(world.admitted_indices)
    assert world.published_versions[-1] == run["steps"]
    if run["order"] == "admission":
        counting = [index for batch in world.batches for index in batch]
        assert counting == sorted(counting)


@st.composite
def dropping_runs(draw) -> dict:
    run = draw(runs()) | {"order": "ready", "streaming": False}
    slots = (run["bound"] + 1) * run["per_step"]
    return run | {
        "at_bound": draw(st.sampled_from(["drop", "requeue"])),
        "num_slots": slots + draw(st.integers(0, 2 * slots)),
        "straggling": draw(st.sampled_from([0.2, 0.5])),
    }


def check_dropping_run(run: dict) -> None:
    world = run_world(**run)
    assert max(world.staleness) <= run["bound"]
    assert all(len(batch) == run["per_step"] for batch in world.batches) and len(world.batches) == run["steps"]
    consumed = [index for batch in world.batches for index in batch]
    assert len(consumed) == len(set(consumed))
    assert world.endings == Counter(world.admitted_indices)  # what expires while it runs ends too, once
    assert world.queue.num_expired == world.expired_count
    assert sum(line["batch/expired_groups"] for line in world.logged) <= world.expired_count
    if run["at_bound"] == "drop":
        assert len(set(world.prompts)) == len(world.prompts)
    else:  # a prompt is asked again for each time it expired, as far as there was room before the end
        repeated = len(world.prompts) - len(set(world.prompts))
        assert repeated <= world.expired_count
        assert sorted(map(int, set(world.prompts))) == list(range(len(set(world.prompts))))


@settings(max_examples=300, deadline=None)
@given(dropping_runs())
def test_where_groups_expire_at_the_bound_it_holds_with_any_number_of_slots(run):
    check_dropping_run(run)


def test_the_learner_does_not_wait_for_stragglers_that_may_be_dropped():
    options = {"order": "ready", "per_step": 2, "bound": 1, "steps": 8, "straggling": 0.4}
    worlds = [run_world(seed, at_bound="requeue", num_slots=8, **options) for seed in range(10)]
    assert sum(world.expired_running for world in worlds) > 10
    assert any(len(world.prompts) > len(set(world.prompts)) for world in worlds)
    assert all(run_world(seed, **options).expired_count == 0 for seed in range(3))


@pytest.mark.large
@settings(max_examples=5000, deadline=None)
@given(runs())
def test_every_run_of_very_many_ends_within_bound_and_slots(run):
    check_run(run)


def test_admission_order_gives_the_same_batches_under_every_schedule():
    options = {"per_step": 3, "bound": 2, "publish_every": 2, "steps": 5, "straggling": 0.3, "failing": 0.2}
    batches = [run_world(seed, **options).batches for seed in range(15)]
    assert all(each == batches[0] for each in batches)


def test_the_learner_begins_with_the_groups_that_are_there_while_others_run():
    options = {"per_step": 4, "bound": 0, "steps": 4, "straggling": 0.3}
    worlds = [run_world(seed, streaming=True, **options) for seed in range(10)]
    assert max(world.most_ahead for world in worlds) == 3
    assert all(world.batches == run_world(0, **options).batches for world in worlds)
    assert run_world(0, streaming=True, order="ready", **options).most_ahead == 0  # nothing is sure before all is there


def test_with_staleness_zero_every_token_is_of_the_weights_that_it_trains():
    for seed in range(10):
        world = run_world(seed, bound=0, per_step=3, steps=4, straggling=0.3, order="ready")
        assert set(world.staleness) == {0}
        assert world.batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_generation_runs_ahead_of_training_as_far_as_the_bound_allows():
    for bound in (0, 1, 2):
        most = max(run_world(seed, bound=bound, per_step=2, steps=6).most_held for seed in range(15))
        assert most == 2 * (bound + 1)


def test_the_logged_staleness_is_that_of_the_batch():
    for seed in range(10):
        world = run_world(seed, bound=2, per_step=2, steps=6, publish_every=2)
        own = [world.staleness[2 * step : 2 * step + 2] for step in range(6)]
        assert [line["staleness/max"] for line in world.logged] == [max(pair) for pair in own]
        assert [line["staleness/mean"] for line in world.logged] == [sum(pair) / 2 for pair in own]
        assert max(map(max, own)) > 0


def test_a_rejected_first_sample_does_not_stop_a_synchronous_run():
    """K28 (a): limit 0, batch 3, 3 in flight, the first group gives nothing."""

    class FirstFails(World):
        async def run(self, admission: Admission) -> Group:
            if admission.index == 0:
                return Group(admission=admission, failure="verifier crashed")
            return group_of(admission, [self.generator_version])

    async def scenario() -> World:
        clock = Clock(0)
        world = FirstFails(clock, bound=0, per_step=3, steps=2)
        await clock.drive(asyncio.create_task(world.pipeline.run()))
        return world

    world = asyncio.run(scenario())
    assert world.batches == [[1, 2, 3], [4, 5, 6]]
    assert [line["batch/failed_groups"] for line in world.logged] == [1.0, 0.0]


def test_a_run_whose_groups_all_fail_ends_with_their_reason():
    class AllFail(World):
        async def run(self, admission: Admission) -> Group:
            await self.clock.wait()
            return Group(admission=admission, failure="verifier crashed")

    async def scenario() -> BaseException:
        clock = Clock(0)
        with pytest.raises(ExceptionGroup) as raised:
            await clock.drive(asyncio.create_task(AllFail(clock, bound=1, per_step=2).pipeline.run()))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return raised.value

    [error] = asyncio.run(scenario()).exceptions
    assert isinstance(error, RolloutsError)
    assert str(error) == "6 groups in a row failed, the last because: verifier crashed"


@pytest.mark.parametrize("ending", ["the data ends", "somebody stops the run"])
def test_weights_are_published_at_the_end_also_when_the_run_ends_between_publications(ending):
    class Ends(World):
        def prompt(self, index: int) -> Prompt | None:
            return None if ending == "the data ends" and index == 10 else super().prompt(index)

        async def after_step(self, report: StepReport) -> Next:
            return Next(report.version, ends=ending == "somebody stops the run" and report.version == 5)

    async def scenario() -> World:
        clock = Clock(0)
        world = Ends(clock, bound=3, per_step=2, steps=12, publish_every=4)
        await clock.drive(asyncio.create_task(world.pipeline.run()))
        return world

    world = asyncio.run(scenario())
    assert world.learner_version == 5
    assert world.published_versions == [4, 5]
    assert world.generator_version == 5
    aborted = {index for index, fate in world.endings_told if fate is Fate.ABORTED}
    assert aborted == set(world.endings) - {index for batch in world.batches for index in batch}
    assert world.stopped and world.endings == Counter(world.admitted_indices)  # those still running have an ending too
    assert bool(aborted) == (ending == "somebody stops the run")
    assert len(world.queue._groups) == 0


def test_a_run_that_goes_on_starts_at_the_step_it_is_told():
    async def scenario() -> World:
        clock = Clock(0)
        world = World(clock, bound=1, per_step=2, steps=3)
        ledger = Ledger(prompts_per_step=2, max_staleness=1, order="admission")
        ledger.completed_steps = ledger.published = 2
        ledger.next_index = 4
        world.generator_version = world.learner_version = 2
        queue = StalenessBoundedQueue(ledger, world, world, seed=0, num_groups=6)
        pipeline = world.build(queue=queue, first_step=2)
        world.queue = queue
        await clock.drive(asyncio.create_task(pipeline.run()))
        return world

    world = asyncio.run(scenario())
    assert world.batches == [[4, 5]]
    assert [line["step"] for line in world.logged] == [2]


# Crashes.

CRASHES = {
    "generator": EngineError("the engine stopped: out of memory"),
    "verifier": NearpolicyError("the verifier's answers no longer parse"),
    "learner": RuntimeError("the learner ran out of memory"),
    "publisher": SyncError("'model.norm.weight' differs"),
    "store": NearpolicyError("the store cannot be written"),
}


class Crashing(World):
    """One role raises in the second step; everybody else goes on and would wait for ever."""

    def __init__(self, clock: Clock, role: str) -> None:
        self.role = role
        self.woken = 0
        super().__init__(clock, bound=1, per_step=2, steps=50)

    def crash(self, role: str, now: bool) -> None:
        if self.role == role and now:
            raise CRASHES[role]

    async def run(self, admission: Admission) -> Group:
        try:
            await self.clock.wait()
            self.crash("generator", admission.index == 3)
            self.crash("verifier", admission.index == 3)
            return group_of(admission, [self.generator_version])
        except asyncio.CancelledError:
            self.woken += 1
            raise

    async def step(self, batch: Batch) -> StepReport:
        self.crash("learner", batch.step == 1)
        return await super().step(batch)

    async def publish(self) -> VersionRecord:
        self.crash("publisher", self.learner_version == 2)
        return await super().publish()

    def filled(self, group: Group) -> None:
        self.crash("store", group.index == 3)

    def _check(self) -> None: ...


@pytest.mark.parametrize("role", CRASHES)
def test_a_crash_of_any_role_ends_the_run_with_its_error_and_wakes_everybody(role):
    async def scenario() -> tuple[BaseException, int]:
        clock = Clock(1)
        world = Crashing(clock, role)
        run = asyncio.create_task(world.pipeline.run())
        with pytest.raises(ExceptionGroup) as raised:
            await clock.drive(run)
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return raised.value, len(others)

    raised, left_over = asyncio.run(scenario())
    assert raised.exceptions == (CRASHES[role],)
    assert left_over == 0


def test_the_first_error_is_the_one_reported_also_when_others_fail_while_being_stopped():
    class Untidy(Crashing):
        async def run(self, admission: Admission) -> Group:
            if admission.index < 4:
                return await super().run(admission)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.woken += 1
                raise EngineError("the generator is closed") from None

    async def scenario() -> BaseExceptionGroup:
        clock = Clock(1)
        world = Untidy(clock, "learner")
        with pytest.raises(ExceptionGroup) as raised:
            await clock.drive(asyncio.create_task(world.pipeline.run()))
        assert world.woken > 0
        return raised.value

    assert asyncio.run(scenario()).exceptions[0] is CRASHES["learner"]


def test_a_rollout_that_never_ends_stops_the_run_by_name():
    class Silent(World):
        async def run(self, admission: Admission) -> Group:
            if admission.index == 1:
                await asyncio.Event().wait()
            return group_of(admission, [self.generator_version])

        def _check(self) -> None: ...

    async def scenario() -> BaseException:
        world = Silent(Clock(0), bound=0, per_step=2, steps=2)
        ledger = Ledger(prompts_per_step=2, max_staleness=0, order="admission")
        queue = StalenessBoundedQueue(ledger, world, world, seed=0, stall_timeout_s=0.02)
        with pytest.raises(ExceptionGroup) as raised:
            await world.build(queue=queue).run()
        return raised.value.exceptions[0]

    error = asyncio.run(scenario())
    assert isinstance(error, StandstillError)
    assert "for a batch of 2 groups: 1 are ready, 1 are still running (admission 1)" in str(error)


def test_an_environment_that_raises_costs_its_group_only_and_is_asked_again_under_the_same_index():
    attempts: list[tuple[int, int]] = []
    reasons: dict[int, str] = {}

    class UserEnvironment:
        async def run(self, admission: Admission) -> Group:
            attempts.append((admission.index, admission.attempt))
            await asyncio.sleep(0)
            if admission.index == 1 or (admission.index == 2 and admission.attempt == 0):
                raise ConnectionError("the tool server is down")
            if admission.index == 3 and admission.attempt < 2:
                await asyncio.Event().wait()
            return group_of(admission, [admission.version])

        async def stop(self) -> None: ...

    class Keeping(World):
        def discarded(self, group: Group, fate: Fate, reason: str) -> None:
            reasons[group.index] = reason

        def _check(self) -> None: ...

    async def scenario() -> World:
        clock = Clock(0)
        world = Keeping(clock, bound=0, per_step=3, steps=2)
        environment = Bounded(UserEnvironment(), timeout_s=0.05, retries=1, grace_s=0)
        run = asyncio.create_task(world.build(environment=environment).run())
        async with asyncio.timeout(20):
            while not run.done():  # the time limits of two attempts are real; everything else is woken at once
                for future, _ in clock._waiting:
                    if not future.done():
                        future.set_result(None)
                await asyncio.wait([run], timeout=0.005)
        await run
        return world

    world = asyncio.run(scenario())
    assert world.batches == [[0, 2, 4], [5, 6, 7]]
    assert reasons == {
        1: "the environment raised ConnectionError: the tool server is down",
        3: "no group within 0.05 s (queue.rollout_timeout_s)",
    }
    assert sorted(a for a in attempts if a[0] in (1, 2, 3)) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_an_environment_that_answers_for_another_admission_ends_the_run():
    class Confused(World):
        async def run(self, admission: Admission) -> Group:
            from dataclasses import replace

            return group_of(replace(admission, index=admission.index + 1), [0])

    async def scenario() -> BaseException:
        clock = Clock(0)
        with pytest.raises(ExceptionGroup) as raised:
            await clock.drive(asyncio.create_task(Confused(clock).pipeline.run()))
        return raised.value.exceptions[0]

    assert "slot of admission 0 was filled with the group of admission 1" in str(asyncio.run(scenario()))
