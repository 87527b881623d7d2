"""Which replica a request goes to: pure decisions over what replicas say of themselves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from driving import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.generator.dispatch import AHEAD, Dispatch, Lengths
from nearpolicy.roles import Load

LENGTHS = [*[10] * 9, 1000] * 20
"""One in ten sequences is a hundred times as long as the others."""


def made(count: int, *, slots: int = 8, version: int = 0, kv_tokens: int | None = None) -> Dispatch:
    dispatch = Dispatch()
    dispatch.newest = version
    for _ in range(count):
        number = dispatch.add()
        dispatch.holds(number, version)
        dispatch.observe(number, Load(slots=slots, kv_tokens=kv_tokens))
    return dispatch


def request(index: int, n: int = 1, **options):
    return make_request(options.pop("prompt", 16), id=str(index), n=n, admission=index, **options)


def place(dispatch: Dispatch, *requests) -> list[int | None]:
    found = []
    for each in requests:
        number = dispatch.choose(each)
        if number is not None:
            dispatch.placed(number, each)
        found.append(number)
    return found


def measured(dispatch: Dispatch, number: int, rate: float, *, running: int = 8, slots: int = 8) -> None:
    """The replica has sampled for ten seconds at this rate."""
    for second in (0, 10):
        dispatch.observe(
            number, Load(slots=slots, running=running, sampled=int(rate * second), busy_s=float(second), at=second)
        )


def test_equal_replicas_get_equal_shares_and_what_exceeds_their_room_waits():
    dispatch = made(3, slots=8)
    found = place(dispatch, *(request(i, n=2) for i in range(20)))
    assert Counter(found) == {0: 5, 1: 5, 2: 5, None: 5}  # 10 sequences each: a quarter more than decode at once
    assert AHEAD == 1.25


def test_a_replica_that_is_twice_as_fast_gets_twice_as_much():
    dispatch = made(2, slots=100)
    for number, rate in ((0, 100.0), (1, 200.0)):
        measured(dispatch, number, rate, running=80, slots=100)
    found = Counter(place(dispatch, *(request(i, n=2) for i in range(30))))
    assert found[1] == pytest.approx(2 * found[0], abs=2)


def test_a_lower_rate_counts_only_where_as_many_sequences_ran():
    dispatch = made(2)
    measured(dispatch, 0, 400.0, running=8)
    dispatch.observe(0, Load(slots=8, running=1, sampled=4500, busy_s=20.0, at=20.0))  # one sequence: 50 a second
    assert dispatch.rate(0) == 400.0
    dispatch.observe(0, Load(slots=8, running=8, sampled=4700, busy_s=24.0, at=24.0))
    dispatch.observe(0, Load(slots=8, running=8, sampled=4900, busy_s=28.0, at=28.0))  # throttled under full load
    assert dispatch.rate(0) < 400.0


def test_nobody_knows_a_new_replica_so_it_counts_as_the_others_do():
    dispatch = made(3)
    measured(dispatch, 0, 300.0)
    measured(dispatch, 1, 100.0)
    assert dispatch.rate(2) == 200.0


def test_stragglers_count_by_the_tokens_still_to_come_and_not_by_their_number():
    """Lengths are 10 or 1000. Four sequences with 100 tokens each are of the second kind: as much work as many new
    ones."""
    dispatch = made(2, slots=400)
    for length in LENGTHS:
        dispatch.lengths.add(length)
    for index in range(4):
        dispatch.placed(0, request(index, max_tokens=2000))
    dispatch.observe(0, Load(slots=400, running=4, sampled=400, busy_s=1.0))
    assert dispatch.to_come(0) == pytest.approx(4 * 900, rel=0.1)
    found = Counter(place(dispatch, *(request(10 + i, max_tokens=2000) for i in range(30))))
    assert found == {1: 30}  # 30 times 109 tokens are expected there, which is less than what is still to come here


def test_a_later_turn_goes_where_its_prefix_is_unless_it_would_end_much_later_there():
    dispatch = made(3, slots=64)
    first = place(dispatch, *(request(i, prompt=200, max_tokens=32) for i in range(6)))
    turns = [request(i, prompt=400, max_tokens=32, turn=1) for i in range(6)]
    assert place(dispatch, *turns) == first
    for index in range(100, 130):
        dispatch.placed(first[0], request(index, n=4, max_tokens=32))
    assert place(dispatch, request(0, prompt=400, max_tokens=32, turn=2)) != [first[0]]


def test_a_pinned_request_goes_only_to_replicas_that_hold_its_version():
    dispatch = made(2, version=4)
    dispatch.holds(0, 3)
    assert place(dispatch, request(0), request(1, version=4), request(2, version=3)) == [1, 1, 0]
    assert place(dispatch, request(3, version=5)) == [None]
    assert dispatch.serves(3) and not dispatch.serves(5)
    dispatch.settled(0, False)  # it is taking other weights
    assert place(dispatch, request(4, version=3)) == [None]


def test_a_replica_without_memory_for_keys_and_values_gets_nothing_more():
    dispatch = made(2, slots=1000, kv_tokens=100)
    found = Counter(place(dispatch, *(request(i, prompt=30, max_tokens=10) for i in range(20))))
    assert found[0] == found[1] == 3  # 35 tokens each are expected; the third begins below the limit
    assert found[None] == 14


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_history_keeps_the_rules_and_repeats_itself(data):
    """Two of a kind that see the same decide the same; nothing goes to who may not take it; nobody with room is passed
    over for somebody who would end later."""
    count = data.draw(st.integers(1, 5))
    both = made(count, slots=4), made(count, slots=4)
    running: list[tuple[int, object]] = []
    for index in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["ask", "ask", "ask", "end", "observe", "close", "open"]))
        number = data.draw(st.integers(0, count - 1))
        if action == "ask":
            asked = request(index, n=data.draw(st.integers(1, 3)), max_tokens=20)
            chosen = [dispatch.choose(asked) for dispatch in both]
            assert chosen[0] == chosen[1]
            may = [i for i in range(count) if both[0]._takes[i] and both[0]._placed[i] < AHEAD * 4]
            assert (chosen[0] in may) if may else chosen[0] is None
            if chosen[0] is not None:
                for dispatch in both:
                    dispatch.placed(chosen[0], asked)
                running += [(chosen[0], asked)] * asked.n
        elif action == "end" and running:
            where, asked = running.pop(data.draw(st.integers(0, len(running) - 1)))
            length = data.draw(st.integers(1, 20))
            for dispatch in both:
                dispatch.ended(where, asked, length, length, whole=True)
        elif action == "observe":
            there = sum(where == number for where, _ in running)
            load = Load(slots=4, running=data.draw(st.integers(0, there)), sampled=index * 10, busy_s=index * 0.1)
            for dispatch in both:
                dispatch.observe(number, load)
        elif action in ("close", "open"):
            for dispatch in both:
                dispatch.takes(number, action == "open")
        for i in range(count):
            assert both[0]._placed[i] == sum(where == i for where, _ in running)
            assert both[0].to_come(i) >= 0 and np.isfinite(both[0].to_come(i))


def test_a_number_is_used_again_only_after_its_replica_is_gone_and_starts_afresh():
    dispatch = made(3)
    place(dispatch, *(request(i, n=2) for i in range(6)))
    dispatch.remove(1)
    assert place(dispatch, request(10)) != [1]
    assert dispatch.add() == 1
    assert dispatch.to_come(1) == 0 and dispatch.choose(request(11)) != 1  # it holds nothing yet
    dispatch.holds(1, 0)
    assert dispatch.choose(request(12)) == 1


def test_expected_lengths_follow_the_tail():
    lengths = Lengths()
    lengths.longest = 100
    assert lengths.expected(0) == 50
    for length in LENGTHS:
        lengths.add(length)
    assert lengths.expected(0) == pytest.approx(109, rel=0.05)
    assert lengths.expected(50) == pytest.approx(1000)
    assert lengths.expected(1500) == 3000
