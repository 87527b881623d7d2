"""The queue: who waits, who wakes whom, and what it does when nobody comes."""

from __future__ import annotations

import asyncio
import itertools
import math

import numpy as np
import pytest

from nearpolicy.errors import RolloutsError, StalenessError, StandstillError, UserError
from nearpolicy.records import Admission, Fate, Finish, Group, Prompt, Rollout, Segment
from nearpolicy.rollout_queue.config import QueueConfig, hopeless_after
from nearpolicy.rollout_queue.ledger import Ledger
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue


class Prompts:
    """``count`` prompts in order, as often as they are wanted; then the data ends."""

    def __init__(self, count: int, epochs: int | None = None) -> None:
        self._count, self._epochs = count, epochs

    def prompt(self, index: int) -> Prompt | None:
        if self._epochs is not None and index >= self._count * self._epochs:
            return None
        return Prompt(id=str(index % self._count), task="t", text="?")


class Book:
    """A store that keeps counts only."""

    def __init__(self) -> None:
        self.admitted_indices: list[int] = []
        self.filled_indices: list[int] = []
        self.discarded_groups: list[tuple[int, Fate, str]] = []
        self.discarded_attempts: list[tuple[int, int]] = []
        """Attempt, tokens."""
        self.retried_groups: list[tuple[int, int, Fate, str]] = []

    def admitted(self, admission: Admission) -> None:
        self.admitted_indices.append(admission.index)

    def filled(self, group: Group) -> None:
        self.filled_indices.append(group.index)

    def discarded(self, group: Group, fate: Fate, reason: str) -> None:
        self.discarded_groups.append((group.index, fate, reason))
        self.discarded_attempts.append((group.admission.attempt, group.num_sampled))

    def retried(self, group: Group, fate: Fate, reason: str) -> None:
        self.retried_groups.append((group.index, group.admission.attempt, fate, reason))


def group_of(admission: Admission, versions: tuple[int, ...] = (0,)) -> Group:
    tokens = np.arange(len(versions))
    segment = Segment(
        context_ids=[1],
        token_ids=tokens,
        mask=np.ones(len(tokens), bool),
        behavior_logprobs=-np.ones(len(tokens)),
        versions=versions,
        finish=Finish.STOP,
    )
    return Group(
        admission=admission,
        rollouts=(Rollout(sample=0, segments=(segment,), text="", numerics="exact"),),
        verdicts=({},),
        rewards=(1.0,),
    )


def a_queue(
    *, per_step=2, bound=0, order="admission", at_bound="wait", num_slots=None, prompts=None, book=None, **options
) -> StalenessBoundedQueue:
    ledger = Ledger(prompts_per_step=per_step, max_staleness=bound, order=order, at_bound=at_bound, num_slots=num_slots)
    return StalenessBoundedQueue(ledger, prompts or Prompts(100), book or Book(), seed=7, **options)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def failed(admission: Admission, why: str) -> Group:
    return Group(admission=admission, failure=why)


def test_reserve_waits_for_a_slot_and_is_woken_by_publication_and_by_a_failed_group():
    async def scenario() -> None:
        queue = a_queue(per_step=2, bound=0)
        first, second = await queue.reserve(), await queue.reserve()
        third = asyncio.create_task(queue.reserve())
        await settle()
        assert not third.done()
        queue.fill(second, failed(second.admission, "sandbox died"))
        await settle()
        assert third.result().admission.index == 2
        fourth = asyncio.create_task(queue.reserve())
        for slot in (first, third.result()):
            queue.fill(slot, group_of(slot.admission))
        assert [g.index for g in await queue.take(2)] == [0, 2]
        queue.complete(0)
        await settle()
        assert not fourth.done()  # consumed and done, but no generator holds the new weights yet
        queue.retire(1)
        await settle()
        assert (fourth.result().admission.index, fourth.result().admission.version) == (3, 1)
        assert fourth.result().admission.seed == 7

    asyncio.run(scenario())


def test_every_waiting_producer_wakes_when_several_slots_come_free_at_once():
    async def scenario() -> None:
        queue = a_queue(per_step=3, bound=0)
        slots = [await queue.reserve() for _ in range(3)]
        waiting = [asyncio.create_task(queue.reserve()) for _ in range(3)]
        for slot in slots:
            queue.fill(slot, group_of(slot.admission))
        await queue.take(3)
        queue.complete(0)
        queue.retire(1)
        await settle()
        assert sorted(task.result().admission.index for task in waiting) == [3, 4, 5]

    asyncio.run(scenario())


def test_a_full_queue_pushes_back_and_nothing_disappears_uncounted():
    async def scenario() -> None:
        book = Book()
        queue = a_queue(per_step=2, bound=1, book=book)
        asked = [asyncio.create_task(queue.reserve()) for _ in range(6)]
        await settle()
        given = [task.result() for task in asked if task.done()]
        assert [slot.admission.index for slot in given] == [0, 1, 2, 3]  # capacity 4, nobody reads: the fifth waits
        queue.fill(given[0], failed(given[0].admission, "no reward"))
        for slot in given[1:]:
            queue.fill(slot, group_of(slot.admission))
        await settle()
        assert sum(task.done() for task in asked) == 5  # the failed one made room for exactly one more
        assert book.filled_indices == [1, 2, 3]
        assert book.discarded_groups == [(0, Fate.FAILED, "no reward")]
        assert (len(queue._groups), queue.num_failed) == (3, 1)
        taken = await queue.take(2)
        produced = len(book.filled_indices) + len(book.discarded_groups)
        assert produced == len(taken) + len(queue._groups) + queue.num_failed == 4
        for task in asked:
            task.cancel()

    asyncio.run(scenario())


def test_take_waits_for_the_straggler_of_the_oldest_batch_in_admission_order():
    async def scenario() -> None:
        queue = a_queue(per_step=2, bound=1)
        slots = [await queue.reserve() for _ in range(4)]
        taking = asyncio.create_task(queue.take(2))
        for slot in (slots[3], slots[2], slots[1]):
            queue.fill(slot, group_of(slot.admission))
        await settle()
        assert not taking.done()
        queue.fill(slots[0], group_of(slots[0].admission))
        await settle()
        assert [g.index for g in taking.result()] == [0, 1]

    asyncio.run(scenario())


def test_a_completion_sampled_across_a_publication_counts_from_its_oldest_token():
    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=2)
        for step in range(6):
            slot = await queue.reserve()
            queue.fill(slot, group_of(slot.admission, versions=(step,)))
            if step < 4:
                await queue.take(1)
                queue.complete(step)
                queue.retire(step + 1)
            if step == 4:
                mixed = await queue.reserve()  # admitted under version 4
                await queue.take(1)
                queue.complete(4)
                queue.retire(5)
                queue.fill(mixed, group_of(mixed.admission, versions=(4, 4, 4, 5, 5, 5)))
            if step == 5:
                [group] = await queue.take(1)
        segment = group.rollouts[0].segments[0]
        assert segment.versions.tolist() == [4, 4, 4, 5, 5, 5]
        assert segment.behavior_logprobs.tolist() == [-1.0] * 6
        queue.complete(5)  # the learner stands at version 6
        assert group.oldest_version == 4
        assert 6 - group.oldest_version == 2

    asyncio.run(scenario())


def test_a_stalled_learner_stops_the_run_and_says_who_waits_for_whom():
    async def scenario() -> None:
        queue = a_queue(per_step=3, bound=1, stall_timeout_s=0.02)
        slots = [await queue.reserve() for _ in range(5)]
        for slot in slots[1:3]:
            queue.fill(slot, group_of(slot.admission))
        with pytest.raises(StandstillError, match=r"wait for a publication$"):
            await queue.take(3)
        again = await queue.reserve()
        queue.fill(again, failed(again.admission, "sandbox died"))
        with pytest.raises(StandstillError) as stall:
            await queue.take(3)
        message = str(stall.value)
        for part in (
            "the learner has waited 0.02 s (queue.stall_timeout_s) for a batch of 3 groups",
            "2 are ready",
            "3 are still running (admissions 0, 3, 4)",
            "0 of 6 slots wait for a publication; 1 have failed, the last because: sandbox died",
        ):
            assert part in message

    asyncio.run(scenario())


def test_a_run_in_which_every_group_fails_ends_soon_and_says_why():
    told = []

    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=1, on_event=lambda kind, **numbers: told.append((kind, numbers)))
        taking = asyncio.create_task(queue.take(1))
        for _ in range(6):
            await settle()
            assert not taking.done()
            slot = await queue.reserve()
            queue.fill(slot, failed(slot.admission, f"no key {slot.admission.index}"))
        with pytest.raises(RolloutsError, match=r"^6 groups in a row failed, the last because: no key 5$") as raised:
            await taking
        assert isinstance(raised.value, UserError)

    asyncio.run(scenario())
    assert told[-1] == ("fail", {"admission": 5, "reason": "no key 5"})


def test_failures_with_a_group_between_them_do_not_end_the_run():
    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=0)
        for step in range(4):
            for _ in range(2):
                slot = await queue.reserve()
                queue.fill(slot, failed(slot.admission, "sandbox died"))
            slot = await queue.reserve()
            queue.fill(slot, group_of(slot.admission, versions=(step,)))
            await queue.take(1)
            queue.complete(step)
            queue.retire(step + 1)
        assert queue.num_failed == 8

    asyncio.run(scenario())


def test_what_has_worked_before_gets_three_rounds_and_what_never_has_gets_one():
    assert hopeless_after(16, has_worked=False) == 16
    assert hopeless_after(16, has_worked=True) == 48
    assert hopeless_after(1, has_worked=False) == hopeless_after(2, has_worked=True) == 6

    async def failures_until_the_end(first_succeeds: bool) -> int:
        queue = a_queue(per_step=4, bound=1)
        if first_succeeds:
            slot = await queue.reserve()
            queue.fill(slot, group_of(slot.admission))
        for count in itertools.count(1):
            slot = await queue.reserve()
            queue.fill(slot, failed(slot.admission, "no key"))
            taking = asyncio.create_task(queue.take(4))
            await settle()
            if taking.done():
                assert isinstance(taking.exception(), RolloutsError)
                return count
            taking.cancel()

    assert asyncio.run(failures_until_the_end(first_succeeds=False)) == 8
    assert asyncio.run(failures_until_the_end(first_succeeds=True)) == 24


@pytest.mark.parametrize("per_step", [1, 2, 3, 8])
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_run_in_which_everything_fails_ends_with_the_reason_before_it_stands_still(per_step, bound):
    config = QueueConfig(prompts_per_step=per_step, max_staleness=bound, rollout_timeout_s=5, rollout_retries=2)
    for has_worked in (False, True):
        rounds = math.ceil(hopeless_after(config.num_slots, has_worked=has_worked) / config.num_slots)
        assert rounds * 5 * 3 < config.stall_timeout_s


@pytest.mark.parametrize(("per_step", "epochs"), [(3, 2), (4, 1), (2, 3)])
def test_one_epoch_shows_every_prompt_once_and_the_data_ends_cleanly(per_step, epochs):
    async def scenario() -> list[str]:
        queue = a_queue(per_step=per_step, bound=0, prompts=Prompts(6, epochs))
        seen: list[str] = []

        async def produce() -> None:
            while (slot := await queue.reserve()) is not None:
                queue.fill(slot, group_of(slot.admission, versions=(slot.admission.version,)))

        producers = [asyncio.create_task(produce()) for _ in range(per_step)]
        step = 0
        while groups := await queue.take(per_step):
            seen += [group.admission.prompt.id for group in groups]
            queue.complete(step)
            step += 1
            queue.retire(step)
        await asyncio.gather(*producers)
        return seen

    assert asyncio.run(scenario()) == list("012345") * epochs


def test_the_last_batch_of_the_data_may_be_smaller():
    async def scenario() -> None:
        queue = a_queue(per_step=4, bound=1, prompts=Prompts(6, 1), order="ready")
        slots = [await queue.reserve() for _ in range(6)]
        assert await queue.reserve() is None
        for slot in reversed(slots):
            queue.fill(slot, group_of(slot.admission))
        assert [g.index for g in await queue.take(4)] == [0, 1, 2, 3]
        queue.complete(0)
        assert [g.index for g in await queue.take(4)] == [4, 5]
        queue.complete(1)
        assert await queue.take(4) == []

    asyncio.run(scenario())


def test_no_more_groups_are_admitted_than_the_run_needs_but_for_those_that_fail():
    async def scenario() -> None:
        book = Book()
        queue = a_queue(per_step=2, bound=3, num_groups=3, book=book)
        slots = [await queue.reserve() for _ in range(3)]
        more = asyncio.create_task(queue.reserve())
        await settle()
        assert not more.done()
        queue.fill(slots[1], failed(slots[1].admission, "timeout"))
        await settle()
        assert more.result().admission.index == 3
        assert book.admitted_indices == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_the_learner_waits_longer_than_one_prompt_may_take():
    assert QueueConfig().stall_timeout_s == 3.5 * 600 * 2
    assert QueueConfig(rollout_timeout_s=10, rollout_retries=3).stall_timeout_s == 3.5 * 10 * 4
    assert QueueConfig(rollout_timeout_s=10, rollout_retries=3, stall_timeout_s=40).stall_timeout_s == 40
    with pytest.raises(ValueError, match=r"stall_timeout_s=39 .*rollout_timeout_s \* \(1 \+ rollout_retries\) = 40 s"):
        QueueConfig(rollout_timeout_s=10, rollout_retries=3, stall_timeout_s=39)


def test_completing_a_step_that_was_not_begun_is_an_error():
    queue = a_queue()
    with pytest.raises(ValueError, match="step 3 completed, but 0 was in progress"):
        queue.complete(3)


def test_a_group_of_another_admission_cannot_fill_a_slot():
    async def scenario() -> None:
        queue = a_queue()
        first, second = await queue.reserve(), await queue.reserve()
        with pytest.raises(ValueError, match="slot of admission 0 was filled with the group of admission 1"):
            queue.fill(first, group_of(second.admission))

    asyncio.run(scenario())


def test_groups_beyond_the_bound_are_expired_and_counted_and_those_at_the_bound_are_used():
    """K27: limit 1, five steps completed, groups of versions 3, 4 and 5; one of version 6 is an error."""

    async def scenario() -> None:
        book = Book()
        queue = a_queue(per_step=2, bound=1, book=book)
        ledger = queue._ledger
        slots = []
        for version in (3, 4, 5):
            ledger.published = ledger.completed_steps = version
            slots.append(await queue.reserve())
        for slot, version in zip(slots, (3, 4, 5), strict=True):
            queue.fill(slot, group_of(slot.admission, versions=(version, 5)))
        reason = "version 3 with 5 steps completed, queue.max_staleness is 1"
        assert book.discarded_groups == [(0, Fate.EXPIRED, reason)]
        assert (queue.num_expired, len(queue._groups)) == (1, 2)
        assert [group.index for group in await queue.take(2)] == [1, 2]
        late = await queue.reserve()
        with pytest.raises(StalenessError, match="claims version 6, but only 5 steps"):
            queue.fill(late, group_of(late.admission, versions=(6,)))

    asyncio.run(scenario())


def test_at_the_end_groups_that_no_step_used_are_aborted():
    async def scenario() -> None:
        book = Book()
        queue = a_queue(per_step=1, bound=2, book=book)
        slots = [await queue.reserve() for _ in range(3)]
        for slot in slots[:2]:
            queue.fill(slot, group_of(slot.admission))
        await queue.take(1)
        queue.close()
        assert book.discarded_groups == [(1, Fate.ABORTED, "the run ended before a step used it")]
        assert len(queue._groups) == 0
        assert await queue.reserve() is None  # nothing more is admitted
        queue.fill(slots[2], Group(admission=slots[2].admission, failure="the run ended: 2 samples of 4"))
        assert book.discarded_groups[1:] == [(2, Fate.ABORTED, "the run ended: 2 samples of 4")]
        assert queue.num_failed == 0

    asyncio.run(scenario())


def test_what_a_rollback_has_cut_off_is_not_the_last_attempt_although_the_run_ends_before_it_comes_back():
    """Whoever takes the run up may go on from the last attempt's tokens."""

    async def scenario() -> None:
        book = Book()
        queue = a_queue(per_step=1, bound=1, book=book, may_roll_back=True)
        first, running = await queue.reserve(), await queue.reserve()
        queue.fill(first, group_of(first.admission))
        await queue.take(1)
        queue.complete(0)
        queue.roll_back(0, 0, "rollback: a spike")
        queue.close()
        queue.fill(running, group_of(running.admission))
        assert book.retried_groups == [(1, 0, Fate.ABORTED, "rollback: a spike")]
        assert book.discarded_groups == [(1, Fate.ABORTED, "the run ended before a step used it")]
        assert book.discarded_attempts == [(1, 0)]  # and no token

    asyncio.run(scenario())


def test_a_producer_that_waits_for_a_slot_at_the_end_goes_home():
    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=0, book=Book())
        await queue.reserve()
        waiting = asyncio.create_task(queue.reserve())
        await asyncio.sleep(0)
        queue.close()
        assert await waiting is None

    asyncio.run(scenario())


def test_a_group_that_grows_too_old_while_it_waits_frees_its_slot_for_a_later_prompt():
    async def scenario() -> None:
        book = Book()
        queue = a_queue(per_step=1, bound=0, book=book, num_groups=1)
        slot = await queue.reserve()
        queue.fill(slot, group_of(slot.admission))
        queue.complete(0)  # a step that consumed nothing: the group is of version 0 and one step behind now
        assert [fate for _, fate, _ in book.discarded_groups] == [Fate.EXPIRED]
        assert (await queue.reserve()).admission.index == 1

    asyncio.run(scenario())


DROPS = {"order": "ready", "at_bound": "requeue", "requeue": True}


async def reserved(queue, count: int) -> list:
    """What ``count`` producers get who ask now; those that have to wait ask no more."""
    asked = [asyncio.create_task(queue.reserve()) for _ in range(count)]
    await settle()
    for task in asked:
        task.cancel()
    return [task.result() for task in asked if task.done()]


def test_what_expires_after_a_step_is_replaced_under_the_weights_of_that_step():
    async def scenario() -> None:
        given_up: list[int] = []
        queue = a_queue(per_step=1, bound=0, num_slots=3, give_up=lambda i, why: given_up.append(i), **DROPS)
        slots = await reserved(queue, 3)
        queue.fill(slots[0], group_of(slots[0].admission))
        await queue.take(1)
        queue.complete(0)
        assert given_up == [1, 2]
        assert await reserved(queue, 3) == []  # under version 0 they would be beyond the bound at once
        queue.retire(1)
        again = await reserved(queue, 4)
        assert [(slot.admission.prompt.id, slot.admission.version) for slot in again] == [("1", 1), ("2", 1), ("3", 1)]
        queue.fill(slots[1], failed(slots[1].admission, "given up"))
        assert queue.num_expired == 2 and given_up == [1, 2]

    asyncio.run(scenario())


def test_between_publications_what_expires_is_replaced_when_the_next_step_begins():
    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=2, num_slots=4, **DROPS)
        slots = await reserved(queue, 4)
        for step in range(3):  # versions 2, 4, ... are published
            queue.fill(slots[step], group_of(slots[step].admission))
            await queue.take(1)
            queue.complete(step)
            if step == 1:
                queue.retire(2)
                await reserved(queue, 2)
        assert queue.num_expired == 1  # the last group of version 0
        assert await reserved(queue, 1) == []
        step = asyncio.create_task(queue.take(1))
        await settle()
        assert [(slot.admission.prompt.id, slot.admission.version) for slot in await reserved(queue, 1)] == [("3", 2)]
        step.cancel()

    asyncio.run(scenario())


def test_a_prompt_that_expires_after_the_data_has_ended_is_asked_again():
    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=0, num_slots=2, prompts=Prompts(2, epochs=1), stall_timeout_s=5.0, **DROPS)
        slots = [await queue.reserve() for _ in range(2)]
        producers = [asyncio.create_task(queue.reserve()) for _ in range(2)]
        queue.fill(slots[0], group_of(slots[0].admission))
        await queue.take(1)
        await settle()
        assert not any(task.done() for task in producers)  # prompt 1 is running, and may come again
        queue.complete(0)
        queue.retire(1)
        await settle()
        [again] = [task.result() for task in producers if task.done()]
        assert (again.admission.index, again.admission.prompt.id) == (2, "1")
        queue.fill(again, group_of(again.admission, (1,)))
        assert [group.index for group in await queue.take(1)] == [2]
        await settle()
        assert [task.result() for task in producers].count(None) == 1  # nothing can come any more
        assert await queue.take(1) == []

    asyncio.run(scenario())


def test_the_queue_closes_once_steps_have_used_all_that_the_run_needs():
    async def scenario() -> None:
        book, given_up = Book(), {}
        queue = a_queue(
            per_step=1, bound=1, num_slots=4, num_groups=1, book=book, give_up=given_up.__setitem__, **DROPS
        )
        slots = await reserved(queue, 4)
        assert len(slots) == 3  # the one that is needed, and two to choose from
        for slot in slots[:2]:
            queue.fill(slot, group_of(slot.admission))
        await queue.take(1)
        queue.complete(0)
        assert given_up == {2: "the run ended before a step used it"}  # no publication need wait for it
        assert book.discarded_groups == [(1, Fate.ABORTED, "the run ended before a step used it")]
        queue.retire(1)
        assert await queue.reserve() is None
        queue.fill(slots[2], failed(slots[2].admission, given_up[2]))
        assert book.discarded_groups[1:] == [(2, Fate.ABORTED, "the run ended before a step used it")]
        assert (queue.num_failed, queue.num_expired) == (0, 0)

    asyncio.run(scenario())


def test_groups_that_expire_do_not_use_up_the_rounds_of_dynamic_sampling():
    async def scenario() -> None:
        queue = a_queue(per_step=1, bound=0, num_slots=2, left_out=lambda group: None, max_rounds=2, **DROPS)
        for step in range(5):
            slow, quick = await reserved(queue, 2)
            queue.fill(quick, group_of(quick.admission, (step,)))
            assert [group.index for group in await queue.take(1)] == [quick.admission.index]
            queue.complete(step)
            queue.fill(slow, failed(slow.admission, "given up"))
            queue.retire(step + 1)

    asyncio.run(scenario())


# Fewer slots for new admissions


def test_slots_are_taken_from_new_admissions_down_to_the_floor_and_given_back():
    async def scenario() -> None:
        queue = a_queue(per_step=2, bound=3, fewest_slots=4)
        held = [await queue.reserve() for _ in range(8)]
        assert [queue.admit_fewer() for _ in range(3)] == [True, True, False] and queue.slots == 4
        for slot in held:
            queue.fill(slot, group_of(slot.admission))
        for step in range(3):
            await queue.take(2)  # groups that were admitted keep the bound they were admitted under
            queue.complete(step)
            queue.retire(step + 1)
        first, second = await queue.reserve(), await queue.reserve()
        third = asyncio.create_task(queue.reserve())
        await settle()
        assert (first.admission.version, second.admission.version) == (3, 3) and not third.done()
        assert queue.admit_more()
        await settle()
        assert third.done()

    asyncio.run(scenario())


def test_slots_follow_who_waits_for_whom():
    """The learner never waits and a batch is ready: fewer. It waits for a tenth of its time: more."""
    now = [0.0]

    async def scenario() -> tuple[int, int]:
        queue = a_queue(per_step=2, bound=3, fewest_slots=4, adaptive=True, clock=lambda: now[0])

        async def produce() -> None:
            while (slot := await queue.reserve()) is not None:
                queue.fill(slot, group_of(slot.admission, (slot.admission.version,)))

        async def a_step(step: int, waiting_s: float) -> None:
            taken = asyncio.create_task(queue.take(2))
            if waiting_s:
                await asyncio.sleep(0)
                now[0] += waiting_s
            else:
                await settle()
            await taken
            now[0] += 10.0
            queue.complete(step)
            queue.retire(step + 1)

        producer = asyncio.create_task(produce())
        for step in range(6):
            await settle()
            await a_step(step, 0.0)
        fewest = queue.slots
        producer.cancel()
        await settle()
        while queue._groups:  # nothing is generated any more
            step += 1
            await a_step(step, 0.0)
        waits = asyncio.create_task(queue.take(2))
        await settle()
        now[0] += 2.0
        for slot in [await queue.reserve(), await queue.reserve()]:
            queue.fill(slot, group_of(slot.admission, (slot.admission.version,)))
        await waits
        now[0] += 10.0
        queue.complete(step + 1)
        queue.retire(step + 2)
        return fewest, queue.slots

    assert asyncio.run(scenario()) == (4, 6)
