"""Groups that carry no signal are replaced within bounds, or leave their places empty; nothing is lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_queue import Book, a_queue, group_of

from nearpolicy.errors import RolloutsError
from nearpolicy.records import Fate
from nearpolicy.rollout_queue.config import QueueConfig


def same_if(filtered):
    """A filter by admission index."""
    return lambda group: "zero_variance" if filtered(group.index) else None


async def produce(queue, version=lambda: 0) -> None:
    while (slot := await queue.reserve()) is not None:
        await asyncio.sleep(0)
        queue.fill(slot, group_of(slot.admission, (version(),)))


async def drive(queue, *, steps: int, per_step: int, producers: int, batches=None) -> list[list[int]]:
    """Consume ``steps`` batches while producers fill; each step is published at once."""
    done, batches = 0, [] if batches is None else batches
    tasks = [asyncio.create_task(produce(queue, lambda: done)) for _ in range(producers)]
    try:
        for step in range(steps):
            batches.append([group.index for group in await queue.take(per_step)])
            queue.complete(step)
            done = step + 1
            queue.retire(done)
    finally:
        for task in tasks:
            task.cancel()
    return batches


def test_a_scorer_that_always_gives_0_stops_the_run_after_exactly_the_rounds_allowed():
    """K50: at most 3 generation rounds per step."""
    for bound in (0, 1, 2):
        book = Book()
        queue = a_queue(per_step=8, bound=bound, book=book, left_out=same_if(lambda i: True), max_rounds=3)
        with pytest.raises(RolloutsError) as error:
            asyncio.run(drive(queue, steps=1, per_step=8, producers=(bound + 1) * 8))
        assert book.admitted_indices == list(range(24))
        assert [fate for _, fate, _ in book.discarded_groups] == [Fate.FILTERED] * 24
        assert str(error.value) == (
            "24 prompts gave 0 of the 8 groups of a step (queue.max_rounds=3); the others were left out: "
            "24 zero_variance"
        )


def test_the_places_of_groups_without_signal_are_filled_by_later_prompts():
    """K50: 5 of 8 groups carry signal."""
    book = Book()
    queue = a_queue(per_step=8, book=book, left_out=same_if(lambda i: i in (1, 4, 6)), max_rounds=2)
    [batch] = asyncio.run(drive(queue, steps=1, per_step=8, producers=8))
    assert batch == [0, 2, 3, 5, 7, 8, 9, 10]
    assert queue.num_filtered == 3 and len(book.admitted_indices) >= 11


def test_each_step_has_rounds_of_its_own():
    queue = a_queue(per_step=2, left_out=same_if(lambda i: i % 3 != 0), max_rounds=3)
    assert asyncio.run(drive(queue, steps=4, per_step=2, producers=2)) == [[0, 3], [6, 9], [12, 15], [18, 21]]


def test_without_dynamic_sampling_no_round_is_counted():
    queue = a_queue(per_step=2, bound=1)
    assert asyncio.run(drive(queue, steps=3, per_step=2, producers=4)) == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.integers(0, 60), max_size=30),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(["admission", "ready"]),
)
def test_every_admission_ends_once_and_the_search_for_a_batch_is_bounded(filtered, per_step, bound, extra, order):
    book, rounds = Book(), bound + extra
    queue = a_queue(
        per_step=per_step,
        bound=bound,
        order=order,
        book=book,
        left_out=same_if(filtered.__contains__),
        max_rounds=rounds,
    )
    batches: list[list[int]] = []
    producers = (bound + 1) * per_step
    with contextlib.suppress(RolloutsError):
        asyncio.run(drive(queue, steps=6, per_step=per_step, producers=producers, batches=batches))
    consumed = [index for batch in batches for index in batch]
    assert not filtered & set(consumed) and len(consumed) == len(set(consumed))
    endings = Counter(book.filled_indices) + Counter(index for index, _, _ in book.discarded_groups)
    assert all(count == 1 for count in endings.values())
    if order == "admission":
        good = [i for i in range(200) if i not in filtered]
        assert consumed == good[: len(consumed)]
        starts = [0] + [batch[-1] + 1 for batch in batches]
        for start, batch in zip(starts, batches, strict=False):
            assert batch[-1] < start + rounds * per_step
        if len(batches) < 6:  # the search for the next batch was given up, and rightly
            window = range(starts[len(batches)], starts[len(batches)] + rounds * per_step)
            assert sum(i not in filtered for i in window) < per_step


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"max_rounds": 3}, "queue.max_rounds=3 has no effect without queue.dynamic_sampling"),
        ({"dynamic_sampling": True, "max_rounds": 1, "max_staleness": 2}, "use at least 3"),
        ({"max_pass_rate": 1.5}, "less than or equal to 1"),
    ],
)
def test_rounds_that_cannot_work_are_refused(settings_, named):
    with pytest.raises(ValueError) as error:
        QueueConfig(**settings_)
    assert named in str(error.value)


def test_ten_rounds_are_the_default():
    assert QueueConfig(dynamic_sampling=True).max_rounds == 10 and QueueConfig().max_rounds is None
