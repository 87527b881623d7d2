"""The engine in its thread: completions arrive as they end, every wait ends, and no caller can break it by leaving."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import families
import numpy as np
import pytest
import torch
from driving import assert_same_bits, make_engine, make_request, run, weights_of

from nearpolicy.errors import EngineError, RunFolderError, SyncError
from nearpolicy.generator.engine import Engine
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.records import Finish
from nearpolicy.roles import Completion, Request, Weights

BOUND_S = 60
"""Everything here takes milliseconds; a test that reaches the bound stands still."""


class Gate:
    """Lets the engine's thread make as many passes as a test says."""

    def __init__(self, engine: Engine) -> None:
        self._step = engine.step
        self._allowed = threading.Semaphore(0)
        self._arrived = threading.Condition()
        self._arrivals = 0
        self._asked = 0
        self.count = 0
        engine.step = self._gated

    def _gated(self) -> list[Completion]:
        with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()
        assert self._allowed.acquire(timeout=BOUND_S)
        self.count += 1
        return self._step()

    def allow(self, passes: int) -> None:
        self._allowed.release(passes)

    async def passes(self, count: int) -> None:
        """Make ``count`` passes; the thread then stands before the next one, deaf to commands."""
        await asyncio.to_thread(self.passes_while_the_loop_waits, count)

    def passes_while_the_loop_waits(self, count: int) -> None:
        self.allow(count)
        self._asked += count
        with self._arrived:
            assert self._arrived.wait_for(lambda: self._arrivals > self._asked, BOUND_S)


def playing(scene: Callable, *, on_sync: str = "finish", engine_options: dict | None = None, **options) -> None:
    """Run ``scene(runner, engine)`` in an event loop, within the bound, and close the runner."""

    async def within_the_bound() -> None:
        engine = make_engine(families.fresh(), **(engine_options or {}))
        runner = EngineRunner(engine, on_sync=on_sync, **options)
        try:
            async with asyncio.timeout(BOUND_S):
                await scene(runner, engine)
        finally:
            if isinstance(getattr(engine.step, "__self__", None), Gate):
                engine.step.__self__.allow(10_000)
            runner.close()
        assert not runner._thread.is_alive()

    asyncio.run(within_the_bound())


async def all_of(runner: EngineRunner, request: Request) -> list[Completion]:
    return [completion async for completion in runner.submit(request)]


def test_completions_arrive_as_they_end_and_equal_those_of_the_engine_alone():
    requests = [make_request(9, id=str(i), n=2, admission=i, max_tokens=4 + 5 * i) for i in range(3)]
    expected = run(make_engine(families.shared()), requests)

    async def scene(runner, engine):
        groups = await asyncio.gather(*(all_of(runner, request) for request in requests))
        for request, completions in zip(requests, groups, strict=True):
            assert sorted(c.sample for c in completions) == [0, 1]
            for c in completions:
                np.testing.assert_array_equal(c.token_ids, expected[request.id, c.sample].token_ids)

    playing(scene)


def test_a_short_sample_is_delivered_while_its_siblings_still_run():
    tokens = run(make_engine(families.shared()), [make_request(9, n=2, max_tokens=50)])
    stop = next(t for t in tokens["r", 0].token_ids.tolist()[:5] if t not in tokens["r", 1].token_ids.tolist())

    async def scene(runner, engine):
        gate = Gate(engine)
        gate.allow(6)
        completions = runner.submit(make_request(9, n=2, max_tokens=50, stop_token_ids=(stop,)))
        first = await anext(completions)
        assert (first.sample, first.finish) == (0, Finish.STOP)
        assert gate.count <= 6
        gate.allow(100)
        assert (await anext(completions)).sample == 1
        with pytest.raises(StopAsyncIteration):
            await anext(completions)

    playing(scene)


def test_an_abort_ends_every_sample_of_the_request_and_no_other():
    async def scene(runner, engine):
        gate = Gate(engine)
        long = asyncio.create_task(all_of(runner, make_request(9, id="long", n=3, max_tokens=500)))
        other = asyncio.create_task(all_of(runner, make_request(9, id="other", max_tokens=20)))
        await gate.passes(4)
        abort = asyncio.create_task(runner.abort(["long", "nobody"]))
        await asyncio.sleep(0)
        gate.allow(200)
        await abort
        completions = await long
        assert [c.finish for c in completions] == [Finish.ABORTED] * 3
        assert [len(c.token_ids) for c in completions] == [5] * 3
        assert [c.finish for c in await other] == [Finish.LENGTH]

    playing(scene)


def test_leaving_the_iterator_early_aborts_what_is_left():
    async def scene(runner, engine):
        completions = runner.submit(make_request(9, n=3, max_tokens=500, stop_token_ids=()))
        other = asyncio.create_task(all_of(runner, make_request(9, id="short", max_tokens=2)))
        waiting = asyncio.create_task(anext(completions))
        await other
        waiting.cancel()
        await asyncio.wait([waiting])
        await runner.pause()  # a command behind the abort
        assert engine.scheduler.is_idle
        assert engine.scheduler.budget.free == 200

    playing(scene)


def test_nothing_is_sampled_while_paused_and_everything_after():
    async def scene(runner, engine):
        gate = Gate(engine)
        task = asyncio.create_task(all_of(runner, make_request(9, n=2, max_tokens=30)))
        await gate.passes(3)
        gate.allow(1)  # the pass before which it stands
        await runner.pause()
        gate.allow(1000)
        before = gate.count
        sampled = [list(s.tokens) for s in engine.scheduler.running]
        for _ in range(20):  # each is a turn of the engine's thread
            await runner.abort([])
        assert gate.count == before
        assert [list(s.tokens) for s in engine.scheduler.running] == sampled
        await runner.resume()
        assert [len(c.token_ids) for c in await task] == [30, 30]

    playing(scene)


# Publications


async def load_in_the_middle(runner, engine, gate):
    """Two sequences have sampled 3 tokens when a load is asked for and a third request arrives."""
    running = asyncio.create_task(all_of(runner, make_request(9, id="old", n=2, max_tokens=12)))
    await gate.passes(3)
    load = asyncio.create_task(runner.load(weights_of(families.shared(seed=1), 1)))
    new = asyncio.create_task(all_of(runner, make_request(9, id="new", max_tokens=4)))
    await asyncio.sleep(0)  # both have queued their commands
    gate.allow(1000)
    return await running, await load, await new


def test_finish_lets_running_sequences_end_under_their_weights_and_new_ones_wait():
    async def scene(runner, engine):
        old, shown, new = await load_in_the_middle(runner, engine, Gate(engine))
        assert [c.versions.tolist() for c in old] == [[0] * 12] * 2
        assert [c.versions.tolist() for c in new] == [[1] * 4]
        assert shown == weights_of(families.shared(seed=1), 1).digests

    playing(scene)


def test_resume_swaps_at_once_and_each_token_keeps_its_version():
    async def scene(runner, engine):
        old, _, new = await load_in_the_middle(runner, engine, Gate(engine))
        for completion in old:
            versions = completion.versions.tolist()
            assert versions == sorted(versions) and set(versions) == {0, 1}
            assert versions.count(0) == 4
        assert [c.versions.tolist() for c in new] == [[1] * 4]

    playing(scene, on_sync="resume")


def test_finish_falls_back_to_resume_when_its_time_is_over():
    async def scene(runner, engine):
        old, _, _ = await load_in_the_middle(runner, engine, Gate(engine))
        assert all(set(c.versions.tolist()) == {0, 1} for c in old)

    playing(scene, sync_timeout_s=0)


def test_a_load_does_not_wait_for_sequences_that_are_paused():
    async def scene(runner, engine):
        gate = Gate(engine)
        task = asyncio.create_task(all_of(runner, make_request(9, max_tokens=12)))
        await gate.passes(3)
        gate.allow(1000)
        await runner.pause()
        before = gate.count
        await runner.load(weights_of(families.shared(seed=1), 1))
        await runner.abort([])  # a turn of the engine's thread
        assert gate.count == before
        await runner.resume()
        (completion,) = await task
        assert set(completion.versions.tolist()) == {0, 1}

    playing(scene)


def test_two_publications_in_a_row_are_loaded_in_order():
    async def scene(runner, engine):
        first, second = weights_of(families.shared(seed=1), 1), weights_of(families.shared(seed=2), 2)
        shown = await asyncio.gather(runner.load(first), runner.load(second))
        assert shown == [first.digests, second.digests]
        (completion,) = await all_of(runner, make_request(9, max_tokens=2))
        assert completion.versions.tolist() == [2, 2]

    playing(scene)


def unlike_its_digests() -> Weights:
    weights = weights_of(families.shared(seed=1), 1)
    weights.tensors["model.norm.weight"][3] += 1e-3
    return weights


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: weights_of(families.shared("qwen2"), 1), "0 tensors applied"),
        (unlike_its_digests, r"the engine does not hold version 1 after its load: 'model\.norm\.weight' differ"),
    ],
    ids=["other tensors", "other numbers"],
)
def test_after_a_failed_load_no_token_is_sampled_until_another_load_succeeds(wrong, message):
    async def scene(runner, engine):
        gate = Gate(engine)
        running = asyncio.create_task(all_of(runner, make_request(9, id="runs", max_tokens=12)))
        await gate.passes(3)
        load = asyncio.create_task(runner.load(wrong()))
        await asyncio.sleep(0)  # it has queued its command
        gate.allow(1000)
        with pytest.raises(SyncError, match=message):
            await load
        before = gate.count
        new = asyncio.create_task(all_of(runner, make_request(9, id="new", max_tokens=2)))
        await runner.resume()  # does not make the weights any better
        for _ in range(20):  # each is a turn of the engine's thread
            await runner.abort([])
        assert (gate.count, engine.version) == (before, 0)
        await runner.load(weights_of(families.shared(seed=2), 2))
        assert set((await running)[0].versions.tolist()) == {0, 2}
        assert (await new)[0].versions.tolist() == [2, 2]

    playing(scene, on_sync="resume")


def test_a_request_for_a_version_to_come_waits_without_keeping_the_thread_busy():
    events = []

    async def scene(runner, engine):
        gate = Gate(engine)
        task = asyncio.create_task(all_of(runner, make_request(9, max_tokens=2, version=1)))
        for _ in range(5):
            await runner.abort([])
        assert gate.count == 0
        assert events == []  # it sleeps since the start: the end of an idle time would be told
        gate.allow(10)
        await runner.load(weights_of(families.shared(seed=1), 1))
        assert [c.versions.tolist() for c in await task] == [[1, 1]]
        assert events[:2] == ["idle", "swap"]

    playing(scene, on_event=lambda kind, **_: events.append(kind))


def test_events_say_when_the_batch_drains_and_whose_sequence_ended():
    told = []

    async def scene(runner, engine):
        await all_of(runner, make_request(9, id="3.0", n=2, admission=3, max_tokens=4))
        await all_of(runner, make_request(9, id="evaluation.0.t.0", admission=5, max_tokens=1, purpose="evaluation"))
        greedy = {"temperature": 0, "max_tokens": 1, "purpose": "baseline"}
        await all_of(runner, make_request(9, id="3.0.baseline", admission=3, **greedy))

    playing(
        scene,
        engine_options={"on_event": lambda *e, **n: told.append((*e, n))},
        on_event=lambda *e, **n: told.append((*e, n)),
    )
    steps = [numbers["running"] for kind, numbers in told if kind == "decode_step"]
    assert steps == [2, 2, 0]
    ends = [(numbers["admission"], numbers["sample"]) for kind, numbers in told if kind == "finish"]
    assert sorted(ends, key=str) == [(3, -1), (3, 0), (3, 1), (None, 0)]  # -1: greedy, no sample of its group


def test_another_number_of_threads_in_the_middle_changes_no_bit():
    numerics = families.exact_numerics(families.shared(), 2)
    request = make_request(70, n=3, max_tokens=20)
    expected = run(make_engine(families.shared(), numerics), [request])
    seen = []

    async def scene(runner, engine):
        busy = [True] * 6 + [False] * 8 + [True] * 6
        runner.others_work = lambda: busy[len(seen)]
        step = engine.step
        engine.step = lambda: seen.append((torch.get_num_threads(), engine.threads)) or step()
        assert_same_bits({(c.request, c.sample): c for c in await all_of(runner, request)}, expected)
        assert seen == [(1, 1)] * 6 + [(2, 2)] * 8 + [(1, 1)] * 6  # the engine's own number decides the padding

    playing(scene, threads_alone=2, engine_options={"numerics": numerics})


# Callers that leave, threads that end


def test_a_caller_cancelled_before_its_command_was_carried_out_does_not_stop_the_engine():
    """Every kind of call is cancelled while the thread is in a pass."""

    async def scene(runner, engine):
        gate = Gate(engine)
        running = asyncio.create_task(all_of(runner, make_request(9, id="runs", max_tokens=10)))
        await gate.passes(2)
        calls = [
            asyncio.create_task(call)
            for call in (
                runner.pause(),
                runner.abort(["runs"]),
                runner.load(weights_of(families.shared(seed=1), 1)),
                all_of(runner, make_request(9, id="left", n=2)),
            )
        ]
        await asyncio.sleep(0)  # all have queued their commands
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        gate.allow(1000)
        (completion,) = await running
        assert (completion.finish, completion.versions.tolist()) == (Finish.LENGTH, [0] * 10)
        assert len(await all_of(runner, make_request(9, id="left", n=2))) == 2

    playing(scene)


@pytest.mark.parametrize("told", [True, False], ids=["told that it waits", "not yet told"])
def test_a_load_whose_caller_left_while_it_waited_is_not_made_and_lets_new_requests_start(told):
    async def scene(runner, engine):
        gate = Gate(engine)
        running = asyncio.create_task(all_of(runner, make_request(9, id="runs", max_tokens=40)))
        await gate.passes(2)
        load = asyncio.create_task(runner.load(weights_of(families.shared(seed=1), 1)))
        await asyncio.sleep(0)
        gate.passes_while_the_loop_waits(2)  # the load now waits for the running one
        if told:
            await gate.passes(2)
        load.cancel()
        await asyncio.wait([load])
        gate.allow(1000)
        (short,) = await all_of(runner, make_request(9, id="short", max_tokens=2))
        assert short.versions.tolist() == [0, 0]
        assert (await running)[0].versions.tolist() == [0] * 40

    playing(scene)


def test_a_second_request_of_the_same_name_is_refused_and_the_first_goes_on():
    async def scene(runner, engine):
        gate = Gate(engine)
        first = asyncio.create_task(all_of(runner, make_request(9, max_tokens=10)))
        await gate.passes(2)
        gate.allow(1000)
        with pytest.raises(ValueError, match="request 'r' is already running"):
            await all_of(runner, make_request(9, max_tokens=10))
        assert [c.finish for c in await first] == [Finish.LENGTH]

    playing(scene)


def test_an_exception_in_the_engines_thread_reaches_every_waiter_and_every_later_call():
    async def scene(runner, engine):
        gate = Gate(engine)
        waiters = [asyncio.create_task(all_of(runner, make_request(9, id=str(i), max_tokens=50))) for i in range(3)]
        await gate.passes(2)
        load = asyncio.create_task(runner.load(weights_of(families.shared(seed=1), 1)))
        await asyncio.sleep(0)

        def broken():
            raise ZeroDivisionError("the model is broken")

        gate._step = broken
        gate.allow(10)
        for task in (*waiters, load):
            with pytest.raises(EngineError, match="the model is broken") as caught:
                await task
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        for call in (runner.pause(), runner.abort(["0"]), all_of(runner, make_request(9, id="later"))):
            with pytest.raises(EngineError, match="the model is broken"):
                await call

    playing(scene)


def test_what_a_person_can_repair_comes_out_of_the_engines_thread_as_it_is():
    def full(kind: str, **numbers) -> None:
        if kind == "finish":
            raise RunFolderError("the store cannot be written: disk full")

    async def scene(runner, engine):
        for name in ("meets it", "later"):
            with pytest.raises(RunFolderError, match=r"^the store cannot be written: disk full$"):
                await all_of(runner, make_request(9, id=name, max_tokens=2))

    playing(scene, on_event=full)


def test_closing_ends_the_thread_and_wakes_whoever_still_waits():
    async def scene(runner, engine):
        gate = Gate(engine)
        waiter = asyncio.create_task(all_of(runner, make_request(9, max_tokens=50)))
        await gate.passes(2)
        gate.allow(1)  # close waits for the pass
        runner.close()
        assert not runner._thread.is_alive()
        with pytest.raises(EngineError, match="the generator is closed"):
            await waiter
        with pytest.raises(EngineError, match="the generator is closed"):
            await runner.load(weights_of(families.shared(), 1))

    playing(scene)


def test_a_runner_outlives_the_event_loop_of_a_caller_that_left():
    """Otherwise an interrupted evaluation would end the engine of the run."""
    runner = EngineRunner(make_engine(families.fresh()))

    async def leave_in_the_middle():
        subscription = runner.submit(make_request(9, id="left", n=2, max_tokens=30))
        await anext(subscription)
        left = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)
        return left

    async def come_back():
        async with asyncio.timeout(BOUND_S):
            return await all_of(runner, make_request(9, id="back", max_tokens=3))

    asyncio.run(leave_in_the_middle())
    assert [c.finish for c in asyncio.run(come_back())] == [Finish.LENGTH]
    runner.close()


def test_capabilities_say_what_the_numerics_allow():
    runner = EngineRunner(make_engine(families.shared()), numerics="fast")
    runner.close()
    assert runner.capabilities().numerics == "fast"
    assert not runner.capabilities().batch_invariant
    assert runner.capabilities().proof == "fingerprint"
