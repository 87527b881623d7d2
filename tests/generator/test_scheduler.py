"""The scheduler against a store that remembers what was written where: whatever is asked of it in whatever order, every
sequence reads exactly its own prefix, ends once, and leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
from driving import make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearpolicy.generator.pages import Budget, RowPages, SharedPages, pages_for
from nearpolicy.generator.scheduler import Prefix, Scheduler, Sequence
from nearpolicy.models.attention import PAGE
from nearpolicy.roles import Request


class Simulation:
    """An engine without a model. A key is a number that names weights, request, sample and position."""

    def __init__(self, num_pages: int, max_running: int, prefill_chunk: int) -> None:
        self.scheduler = Scheduler(num_pages, max_running, prefill_chunk)
        self.num_pages, self.max_running, self.prefill_chunk = num_pages, max_running, prefill_chunk
        self.store = np.full((self.scheduler.rows.num_pages, PAGE), -1, dtype=np.int64)
        self.weights = 0
        self.ended: dict[tuple[str, int], str] = {}
        self.versions: dict[tuple[str, int], list[int]] = {}
        self.computed = 0
        """Tokens of prefixes."""

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> bool:
        """Whether anything happened."""
        outdated = self.scheduler.remove_outdated()
        self.end(outdated, "outdated")
        plan = self.scheduler.plan()
        copies = self.scheduler.rows.take_copies()
        self.store[list(copies)] = self.store[list(copies.values())]
        assert sum(chunk.length for chunk in plan.chunks) <= self.prefill_chunk
        assert len({id(chunk.prefix) for chunk in plan.chunks}) == len(plan.chunks)
        assert {id(s) for s in plan.decoding} == {id(s) for s in self.scheduler.running}
        for sequence in plan.decoding:
            page = self.pages(sequence)[sequence.stored // PAGE]
            self.store[page, sequence.stored % PAGE] = self.keys(sequence)[sequence.stored]
        for chunk in plan.chunks:
            new = np.arange(chunk.start, chunk.start + chunk.length)
            self.store[np.asarray(chunk.prefix.pages)[new // PAGE], new % PAGE] = self.keys(chunk.prefix)[new]
        for sequence in plan.decoding:
            assert sequence.stored + 1 == sequence.length
            self.assert_reads_its_own_prefix(sequence, self.pages(sequence), sequence.length)
            sequence.stored += 1
        for chunk in plan.chunks:
            self.assert_reads_its_own_prefix(chunk.prefix, chunk.prefix.pages, chunk.start + chunk.length)
        drawing = list(plan.decoding)
        for chunk in plan.chunks:
            self.computed += chunk.length
            self.scheduler.computed(chunk, "logits" if chunk.completes else None)
        for start in self.scheduler.start_ready():
            drawing += start.samples
        assert len({id(s) for s in drawing}) == len(drawing)
        for sequence in drawing:
            sequence.tokens.append(1 + sequence.sample)
            self.versions.setdefault((sequence.request.id, sequence.sample), []).append(self.scheduler.version)
            if len(sequence.tokens) == sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence)
                self.end([sequence], "length")
        self.assert_pages_are_counted()
        return bool(plan.decoding or plan.chunks or drawing or outdated)

    def pages(self, sequence: Sequence) -> list[int]:
        return [*sequence.shared, *self.scheduler.rows.pages_of(sequence)]

    def keys(self, work: Sequence | Prefix) -> np.ndarray:
        """What the keys of these tokens under these weights are: each depends on all the tokens before it."""
        tokens = work.tokens if isinstance(work, Prefix) else work.prompt + work.tokens
        key, keys = self.weights, []
        for token in tokens:
            key = hash((key, token))
            keys.append(key)
        return np.array(keys)

    def assert_reads_its_own_prefix(self, work: Sequence | Prefix, pages: list[int], length: int) -> None:
        positions = np.arange(length)
        read = self.store[np.asarray(pages)[positions // PAGE], positions % PAGE]
        np.testing.assert_array_equal(read, self.keys(work)[:length])

    def assert_pages_are_counted(self) -> None:
        """No level has a gap, nobody holds what another one owns, and the bound counts what is held."""
        scheduler, rows = self.scheduler, self.scheduler.rows
        for level, held in enumerate(rows.levels):
            assert [s.rows[level] for s in held] == list(range(len(held)))
        own = sum(len(s.rows) for s in scheduler.running)
        assert own == sum(map(len, rows.levels))
        shared = {page for s in scheduler.running for page in s.shared}
        shared |= {page for p in (*scheduler._prompts, *scheduler._interrupted) for page in p.pages}
        assert scheduler.budget.used == own + len(shared) <= self.num_pages

    def end(self, sequences: list[Sequence], how: str) -> None:
        for sequence in sequences:
            key = (sequence.request.id, sequence.sample)
            assert key not in self.ended, f"{key} ended twice"
            self.ended[key] = how

    def abort(self, request_id: str) -> None:
        self.end(self.scheduler.remove({request_id}), "aborted")

    def load(self, version: int) -> None:
        self.scheduler.interrupt_all()
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
        assert self.scheduler.budget.free == self.num_pages


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
        assert self.sim.scheduler.budget.free == self.sim.num_pages

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
    simulation.drain()
    assert simulation.computed == 100


def test_full_pages_of_a_prompt_are_shared_and_the_unfinished_one_copied():
    simulation = simulated([make_request(2 * PAGE + 3, id="0", n=4, max_tokens=9)], num_pages=40)
    simulation.step()
    assert len(simulation.scheduler.running) == 4
    assert simulation.scheduler.budget.used == 2 + 4
    assert len({tuple(s.shared) for s in simulation.scheduler.running}) == 1
    assert [s.rows for s in simulation.scheduler.running] == [[0], [1], [2], [3]]


def test_a_prompt_that_begins_like_another_one_is_computed_from_where_they_part():
    common = list(range(3, 3 + 2 * PAGE))
    first = make_request([*common, 7, 7, 7], id="0", max_tokens=2)
    later = [make_request([*common, *range(8, 8 + i)], id=str(i), max_tokens=2) for i in (1, 5)]
    simulation = simulated([first], num_pages=40)
    simulation.drain()
    for request in later:
        simulation.submit(request)
    simulation.drain()
    assert simulation.computed == 2 * PAGE + 3 + 1 + 5


def test_prompts_that_begin_alike_and_arrive_together_compute_their_beginning_once():
    requests = [make_request([*range(3, 3 + 3 * PAGE), 300 + i], id=str(i), max_tokens=2) for i in range(5)]
    simulation = simulated(requests, num_pages=60, prefill_chunk=100)
    simulation.drain()
    assert simulation.computed == 3 * PAGE + 5


def test_the_last_token_of_a_prompt_is_always_computed_for_its_logits():
    requests = [make_request(2 * PAGE, id=str(i), max_tokens=2) for i in range(2)]
    simulation = simulated(requests[:1], num_pages=40)
    simulation.drain()
    simulation.submit(requests[1])
    simulation.drain()
    assert simulation.computed == 2 * PAGE + PAGE


def test_what_was_computed_under_older_weights_is_not_found_again():
    """K26: also where a running sequence still holds the pages."""
    simulation = simulated([make_request(2 * PAGE + 1, id="0", max_tokens=50)], num_pages=40)
    simulation.step()
    simulation.scheduler.forget_prefixes()  # the weights change, what runs keeps its keys and values
    simulation.submit(make_request(2 * PAGE + 1, id="1", max_tokens=2))
    simulation.drain()
    assert simulation.computed == 2 * (2 * PAGE + 1)


def test_interrupted_samples_of_a_group_compute_their_prompt_once_again():
    simulation = simulated([make_request(PAGE + 8, id="0", n=4, max_tokens=20)], num_pages=40)
    for _ in range(3):
        simulation.step()
    simulation.load(1)
    simulation.drain()
    assert simulation.computed == (PAGE + 8) + PAGE + 4 * (8 + 3)


def test_pages_that_nobody_holds_make_room_for_others_the_longest_idle_first():
    simulation = simulated([], num_pages=6)
    for i, start in enumerate((3, 1003, 3, 2003)):  # the first is used again before the memory is full
        simulation.submit(make_request(list(range(start, start + 2 * PAGE + 1)), id=str(i), max_tokens=2))
        simulation.drain()
    assert simulation.computed == 3 * (2 * PAGE + 1) + 1
    simulation.submit(make_request(list(range(3, 3 + 2 * PAGE + 1)), id="4", max_tokens=2))
    simulation.drain()
    assert simulation.computed == 3 * (2 * PAGE + 1) + 2
    simulation.assert_nothing_is_left()


def test_abort_frees_memory_at_once_and_leaves_the_others_alone():
    simulation = simulated(
        [make_request(PAGE, id="0", n=2, max_tokens=50), make_request(3 * PAGE, id="1", n=2, max_tokens=50)], 40
    )
    for _ in range(3):
        simulation.step()
    held = 40 - simulation.scheduler.budget.free
    assert held == (1 + 2) + (3 + 2)
    simulation.abort("1")
    assert 40 - simulation.scheduler.budget.free == 3
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
    budget = Budget(3)
    pool = SharedPages(budget)
    pages = pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 pages wanted, 1 of 3 are free"):
        pool.allocate(2)
    pool.share(pages)
    pool.release(pages)
    assert budget.free == 1
    pool.release(pages)
    assert budget.free == 3


class Holder:
    def __init__(self) -> None:
        self.rows: list[int] = []


@settings(max_examples=200, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["append", "copy", "drop", "flush"]), st.integers(0, 5)), max_size=60))
def test_rows_keep_their_content_however_they_move(moves):
    """Pages filled by name, moved by `drop` and filled by copies that are still to come, in any order."""
    rows = RowPages(Budget(40), max_rows=6, max_levels=4)
    holders = [Holder() for _ in range(6)]
    store, expected = {page: f"shared {page}" for page in range(1, 41)}, {}

    def flush() -> None:
        copies = rows.take_copies()
        store.update({to: store.get(origin) for to, origin in list(copies.items())})

    for what, who in moves:
        holder = holders[who]
        if what == "flush":
            flush()
        elif what == "drop":
            for level in range(len(holder.rows)):
                expected.pop((who, level))
            rows.drop(holder)
        elif len(holder.rows) < 4:
            level = len(holder.rows)
            if what == "copy":
                rows.append(holder, content_of=1 + who)
                expected[who, level] = f"shared {1 + who}"
            else:
                flush()  # a page is written in a forward pass, before which copies are made
                rows.append(holder)
                page = rows.page(level, holder.rows[level])
                store[page] = expected[who, level] = f"written {who} {level} {len(store)} {moves.index((what, who))}"
    flush()
    for (who, level), content in expected.items():
        assert store[rows.page(level, holders[who].rows[level])] == content


def test_a_probe_starts_before_requests_that_wait():
    scheduler = Scheduler(num_pages=20, max_running=2, prefill_chunk=64)
    for name, purpose in (("a", "rollout"), ("b", "rollout"), ("c", "probe")):
        scheduler.add(make_request(5, id=name, n=2, purpose=purpose))
    assert [chunk.prefix.request.id for chunk in scheduler.plan().chunks] == ["c"]
