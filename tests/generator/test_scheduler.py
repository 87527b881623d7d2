"""The scheduler against a store that remembers what was written where: whatever is asked of it in whatever order, every
sequence reads exactly its own prefix, ends once, and leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
from driving import make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearpolicy.generator.kv import PagePool
from nearpolicy.generator.scheduler import PromptState, Scheduler, Sequence, pages_for
from nearpolicy.models.attention import PAGE
from nearpolicy.roles import Request


class Simulation:
    """An engine without a model. A key is a number that names weights, request, sample and position."""

    def __init__(self, num_pages: int, max_running: int, prefill_chunk: int) -> None:
        self.scheduler = Scheduler(PagePool(num_pages), max_running, prefill_chunk)
        self.num_pages, self.max_running, self.prefill_chunk = num_pages, max_running, prefill_chunk
        self.store = np.full((num_pages + 1, PAGE), -1, dtype=np.int64)
        self.weights = 0
        self.ended: dict[tuple[str, int], str] = {}
        self.versions: dict[tuple[str, int], list[int]] = {}

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> bool:
        """Whether anything happened."""
        outdated = self.scheduler.remove_outdated()
        self.end(outdated, "outdated")
        pieces = self.scheduler.plan()
        prefills = [p for p in pieces if p.work not in self.scheduler.running]
        assert sum(p.span.length for p in prefills) <= self.prefill_chunk
        assert len({id(p.work) for p in pieces}) == len(pieces)
        for piece in pieces:
            new = np.arange(piece.span.start, piece.span.start + piece.span.length)
            self.store[np.asarray(piece.span.pages)[new // PAGE], new % PAGE] = self.keys(piece.work)[new]
        for piece in pieces:
            self.assert_reads_its_own_prefix(piece.work, piece.span.pages, piece.span.start + piece.span.length)
        drawing = [p.work for p in pieces if p.completes and isinstance(p.work, Sequence)]
        for piece in pieces:
            if piece.completes and isinstance(piece.work, PromptState):
                piece.work.logits = "logits"
            self.scheduler.computed(piece)
        for start in self.scheduler.start_ready():
            for source, target in start.copies:
                self.store[target] = self.store[source]
            drawing += start.samples
        self.scheduler.release_spent()
        assert len({id(s) for s in drawing}) == len(drawing)
        for sequence in drawing:
            sequence.tokens.append(1)
            self.versions.setdefault((sequence.request.id, sequence.sample), []).append(self.scheduler.version)
            if len(sequence.tokens) == sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence)
                self.end([sequence], "length")
        return bool(pieces or drawing or outdated)

    def keys(self, work: Sequence | PromptState) -> np.ndarray:
        number = int(work.request.id)
        positions = np.arange(work.length)
        own = (positions >= len(work.prompt)) * (work.sample + 1 if isinstance(work, Sequence) else 0)
        return ((self.weights * 1000 + number) * 100 + own) * 10_000 + positions

    def assert_reads_its_own_prefix(self, work: Sequence | PromptState, pages: list[int], length: int) -> None:
        positions = np.arange(length)
        read = self.store[np.asarray(pages)[positions // PAGE], positions % PAGE]
        np.testing.assert_array_equal(read, self.keys(work)[:length])

    def end(self, sequences: list[Sequence], how: str) -> None:
        for sequence in sequences:
            key = (sequence.request.id, sequence.sample)
            assert key not in self.ended, f"{key} ended twice"
            self.ended[key] = how

    def abort(self, request_id: str) -> None:
        self.end(self.scheduler.remove({request_id}), "aborted")

    def load(self, version: int) -> None:
        self.scheduler.preempt_all()
        self.weights += 1
        self.scheduler.version = version

    def drain(self, max_steps: int = 5000) -> None:
        steps = 0
        while not self.scheduler.is_idle:
            assert self.scheduler.has_work
            assert self.step(), "standstill"
            steps += 1
            assert steps < max_steps, "no end in sight"

    def assert_nothing_is_left(self) -> None:
        assert self.scheduler.is_idle
        assert self.scheduler.pool.num_free == self.num_pages


def simulated(requests: list[Request], num_pages: int, max_running: int = 64, prefill_chunk: int = 512) -> Simulation:
    simulation = Simulation(num_pages, max_running, prefill_chunk)
    for request in requests:
        simulation.submit(request)
    return simulation


class SchedulerMachine(RuleBasedStateMachine):
    """Random submissions, aborts, interruptions, publications and pins, in memory that is nearly always too small."""

    @initialize(num_pages=st.integers(1, 9), max_running=st.integers(1, 6), prefill_chunk=st.integers(1, 150))
    def build(self, num_pages: int, max_running: int, prefill_chunk: int) -> None:
        self.sim = Simulation(num_pages, max_running, prefill_chunk)
        self.expected: set[tuple[str, int]] = set()
        self.pins: dict[str, int] = {}
        self.count = 0

    @rule(
        length=st.one_of(st.integers(1, 200), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])),
        n=st.integers(1, 5),
        tokens=st.one_of(st.integers(1, 8), st.integers(1, 140)),
        pin=st.one_of(st.none(), st.integers(0, 2)),
    )
    def submit(self, length: int, n: int, tokens: int, pin: int | None) -> None:
        version = None if pin is None else self.sim.scheduler.version + pin
        request = make_request(length, id=str(self.count), n=n, max_tokens=tokens, version=version)
        self.count += 1
        assert self.sim.scheduler.fits(request) == (pages_for(length + tokens) <= self.sim.num_pages)
        if self.sim.scheduler.fits(request):
            self.sim.submit(request)
            self.expected |= {(request.id, i) for i in range(n)}
            if version is not None:
                self.pins[request.id] = version

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            had_work = self.sim.scheduler.has_work
            happened = self.sim.step()
            assert happened or not had_work, "there was work, and nothing happened"
            assert had_work or not happened

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = str(data.draw(st.integers(0, self.count - 1)))
        self.sim.abort(request_id)
        assert all(key in self.sim.ended for key in self.expected if key[0] == request_id)

    @rule()
    def interrupt(self) -> None:
        self.sim.load(self.sim.scheduler.version)
        assert self.sim.scheduler.pool.num_free == self.sim.num_pages

    @rule()
    def publish(self) -> None:
        self.sim.load(self.sim.scheduler.version + 1)

    @rule()
    def stop_or_allow_new_ones(self) -> None:
        self.sim.scheduler.accepts_new = not self.sim.scheduler.accepts_new

    @invariant()
    def never_too_many_at_once(self) -> None:
        if hasattr(self, "sim"):
            assert len(self.sim.scheduler.running) <= self.sim.max_running
            assert len({id(s) for s in self.sim.scheduler.running}) == len(self.sim.scheduler.running)

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.scheduler.accepts_new = True
        for _ in range(3):  # the furthest pin is two versions ahead
            while self.sim.scheduler.has_work:
                assert self.sim.step()
            self.sim.load(self.sim.scheduler.version + 1)
        self.sim.drain()
        self.sim.assert_nothing_is_left()
        assert self.sim.ended.keys() == self.expected
        for (request_id, _), versions in self.sim.versions.items():
            assert request_id not in self.pins or versions[0] == self.pins[request_id]


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnyOrderOfCommands = SchedulerMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 160), st.integers(1, 6), st.integers(1, 90)), min_size=1, max_size=5),
    max_running=st.integers(1, 8),
    prefill_chunk=st.integers(1, 200),
)
def test_everything_finishes_in_the_smallest_memory_that_holds_one_sequence(requests, max_running, prefill_chunk):
    num_pages = max(pages_for(length + tokens) for length, _, tokens in requests)
    made = [make_request(length, id=str(i), n=n, max_tokens=t) for i, (length, n, t) in enumerate(requests)]
    simulation = simulated(made, num_pages, max_running, prefill_chunk)
    simulation.drain()
    simulation.assert_nothing_is_left()
    assert simulation.ended == {(r.id, i): "length" for r in made for i in range(r.n)}


def test_a_prompt_is_computed_once_for_its_whole_group():
    simulation = simulated([make_request(100, id="0", n=8, max_tokens=3)], num_pages=40)
    computed = 0
    while not simulation.scheduler.is_idle:
        before = simulation.scheduler.plan
        pieces = []
        simulation.scheduler.plan = lambda: pieces.extend(before()) or pieces  # noqa: B023
        simulation.step()
        simulation.scheduler.plan = before
        computed += sum(p.span.length for p in pieces)
    assert computed == 100 + 8 * 2  # the last token of each is drawn, not computed


def test_full_pages_of_a_prompt_are_shared_and_the_unfinished_one_copied():
    simulation = simulated([make_request(2 * PAGE + 3, id="0", n=4, max_tokens=9)], num_pages=40)
    simulation.step()
    assert len(simulation.scheduler.running) == 4
    assert 40 - simulation.scheduler.pool.num_free == 2 + 4
    tables = [s.pages for s in simulation.scheduler.running]
    assert len({tuple(t[:2]) for t in tables}) == 1
    assert len({t[2] for t in tables}) == 4


def test_abort_frees_memory_at_once_and_leaves_the_others_alone():
    simulation = simulated(
        [make_request(PAGE, id="0", n=2, max_tokens=50), make_request(3 * PAGE, id="1", n=2, max_tokens=50)], 40
    )
    for _ in range(3):
        simulation.step()
    held = 40 - simulation.scheduler.pool.num_free
    assert held == (1 + 2) + (3 + 2)
    simulation.abort("1")
    assert 40 - simulation.scheduler.pool.num_free == 3
    simulation.drain()
    assert simulation.ended == {("0", 0): "length", ("0", 1): "length", ("1", 0): "aborted", ("1", 1): "aborted"}


def test_new_requests_start_while_others_decode():
    simulation = simulated([make_request(9, id="0", max_tokens=50)], 40)
    for _ in range(10):
        simulation.step()
    simulation.submit(make_request(9, id="1", max_tokens=2))
    for _ in range(3):
        simulation.step()
    assert simulation.ended == {("1", 0): "length"}
    assert [s.request.id for s in simulation.scheduler.running] == ["0"]


def test_the_youngest_gives_its_pages_back_when_memory_runs_out():
    simulation = simulated([make_request(60, id=str(i), max_tokens=40) for i in range(3)], num_pages=4)
    order = []
    while not simulation.scheduler.is_idle:
        before = set(simulation.ended)
        simulation.step()
        order += sorted(simulation.ended.keys() - before)
    assert order == [("0", 0), ("1", 0), ("2", 0)]


def test_a_half_recomputed_sequence_forgets_the_keys_of_older_weights():
    simulation = simulated([make_request(100, id="0", max_tokens=9)], num_pages=9, prefill_chunk=30)
    while not simulation.scheduler.running:
        simulation.step()
    simulation.load(1)
    simulation.step()  # 30 of its 101 positions are computed under version 1
    simulation.load(2)
    simulation.drain()  # every pass compares what it reads
    assert simulation.versions["0", 0] == [0] + [2] * 8


def test_a_pinned_request_starts_only_under_its_version():
    simulation = simulated([make_request(5, id="0", max_tokens=2, version=1), make_request(5, id="1", max_tokens=2)], 9)
    while simulation.scheduler.has_work:
        simulation.step()
    assert simulation.ended == {("1", 0): "length"}
    assert not simulation.scheduler.is_idle
    simulation.load(1)
    simulation.drain()
    assert simulation.versions == {("1", 0): [0, 0], ("0", 0): [1, 1]}


def test_samples_pinned_to_a_version_that_has_gone_do_not_wait_for_ever():
    simulation = simulated([make_request(5, id="0", n=3, max_tokens=4, version=0)], num_pages=9, max_running=1)
    simulation.step()
    simulation.load(1)
    simulation.drain()
    assert simulation.ended == {("0", 0): "length", ("0", 1): "outdated", ("0", 2): "outdated"}


def test_nothing_new_starts_while_a_publication_waits_and_running_ones_end():
    simulation = simulated([make_request(5, id="0", n=2, max_tokens=6)], num_pages=9)
    simulation.step()
    simulation.scheduler.accepts_new = False
    simulation.submit(make_request(5, id="1", max_tokens=1))
    while simulation.scheduler.has_started_work:
        simulation.step()
    assert simulation.ended == {("0", 0): "length", ("0", 1): "length"}
    simulation.scheduler.accepts_new = True
    simulation.drain()
    assert simulation.ended["1", 0] == "length"


def test_more_pages_than_there_are_is_an_error_of_the_caller():
    pool = PagePool(3)
    pages = pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 pages wanted, 1 of 3 are free"):
        pool.allocate(2)
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 3
