"""The time line: one schema, one clock, and decode steps that do not flood it."""

from __future__ import annotations

import threading
import time

import pytest

from nearpolicy.records import Event
from nearpolicy.telemetry.events import DECODE_BUNCH, EVENT_KINDS, Recorder


class Events(list):
    def event(self, event: Event) -> None:
        self.append(event)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told() -> Events:
    return Events()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(told, clock) -> Recorder:
    return Recorder(told, wall_anchor=time.time() + 1, clock=clock)  # an anchor ahead of the wall counts as now


def step(recorder: Recorder, clock: Clock, *, batch: int = 4, running: int = 4, version: int = 0) -> None:
    clock.now += 0.01
    recorder.event(
        *("generator", "decode_step"),
        version=version,
        **{"batch": batch, "context_sum": 10 * batch, "ms": 10.0, "sampled": batch, "running": running},
    )


def test_time_counts_from_the_anchor_and_a_span_begins_before_it_is_told(recorder, told, clock):
    clock.now += 2.0
    recorder.event("learner", "optim", seconds=0.5, step=3, update=7, version=None)
    (event,) = told
    assert (event.time, event.seconds, event.version) == (1.5, 0.5, None)
    assert event.numbers == {"step": 3, "update": 7}


def test_a_resumed_run_goes_on_where_the_wall_clock_stands(told, clock):
    recorder = Recorder(told, wall_anchor=time.time() - 3600, clock=clock)
    assert recorder.now() == pytest.approx(3600, abs=5)


def test_a_span_is_told_also_when_its_body_fails(recorder, told, clock):
    with pytest.raises(RuntimeError), recorder.span("sync", "load", version=4) as late:
        clock.now += 0.25
        late["bytes"] = 12
        raise RuntimeError
    assert (told[0].seconds, told[0].version, told[0].numbers) == (0.25, 4, {"bytes": 12})


def test_an_unknown_kind_is_refused_by_name(recorder):
    with pytest.raises(ValueError, match="'decoding'; known kinds: admit, prefill"):
        recorder.event("generator", "decoding")


def test_decode_steps_are_told_in_bunches_whose_sums_are_those_of_the_steps(recorder, told, clock):
    for _ in range(2 * DECODE_BUNCH + 5):
        step(recorder, clock)
    assert [event.numbers["steps"] for event in told] == [DECODE_BUNCH, DECODE_BUNCH]
    recorder.flush()
    count = 2 * DECODE_BUNCH + 5
    total = {name: sum(event.numbers[name] for event in told) for name in ("steps", "sampled", "context_sum", "ms")}
    assert total == {"steps": count, "sampled": 4 * count, "context_sum": 40 * count, "ms": pytest.approx(10 * count)}
    assert told[0].time == pytest.approx(0) and told[0].seconds == pytest.approx(0.01 * DECODE_BUNCH)


@pytest.mark.parametrize("kind", ["swap", "idle"])
def test_a_bunch_is_told_before_the_generator_pauses(recorder, told, clock, kind):
    step(recorder, clock)
    recorder.event("generator", "finish", tokens=3, reason="stop")
    recorder.event("generator", kind)
    assert [event.kind for event in told] == ["finish", "decode", kind]


def test_a_bunch_is_told_when_the_batch_drains_or_the_version_changes(recorder, told, clock):
    step(recorder, clock)
    step(recorder, clock, running=0)
    assert [event.numbers["steps"] for event in told] == [2]
    step(recorder, clock, version=1)
    step(recorder, clock, version=2)
    assert [(event.version, event.numbers["steps"]) for event in told] == [(0, 2), (1, 1)]


def test_many_threads_lose_no_event(told):
    recorder = Recorder(told, wall_anchor=time.time())

    def work(instance: int) -> None:
        for _ in range(500):
            recorder.event(
                *("generator", "decode_step"), instance=instance, batch=1, context_sum=1, ms=1, sampled=1, running=1
            )
            recorder.event("verifier", "verify", instance=instance, seconds=0.0, queue_s=0.0)

    threads = [threading.Thread(target=work, args=(instance,)) for instance in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert sum(event.numbers["sampled"] for event in told if event.kind == "decode") == 2000
    assert sum(event.kind == "verify" for event in told) == 2000


def test_every_kind_says_who_tells_it_and_what_it_means():
    assert all(role and meaning for role, _, meaning in EVENT_KINDS.values())
