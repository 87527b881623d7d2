"""What the store promises: nothing confirmed is lost, nothing is half there, nobody else writes, I2 holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from synthetic_run import CONFIG, NASTY, admission, batch, group, make_run, segment, trained

from nearpolicy.errors import NearpolicyError, RunFolderError, StandstillError
from nearpolicy.records import (
    BASELINE,
    REMADE,
    ROLLBACK,
    Baseline,
    Branch,
    Event,
    Fate,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    StepReport,
    Verdict,
    VersionRecord,
)
from nearpolicy.store import database
from nearpolicy.store.export import export_run, import_run
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.payload import encode_arrays, encode_group, encode_json
from nearpolicy.store.position import position_of
from nearpolicy.store.reader import RunReader
from nearpolicy.store.recycled import can_go_on, goes_on
from nearpolicy.store.retention import next_portion
from nearpolicy.store.schema import BRANCHES, PAYLOADS, SCHEMA, SCHEMA_VERSION
from nearpolicy.store.writer import SqliteStore

REPORT = StepReport(version=1, updates=2, metrics={})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run_folder("run", parent=tmp_path)


@pytest.fixture
def store(folder: RunFolder):
    store = SqliteStore.create(folder, config=CONFIG)
    yield store
    with contextlib.suppress(NearpolicyError):  # the test made it fail and has looked at it
        store.close()


def read(folder: RunFolder) -> RunReader:
    return RunReader(folder.path)


def bits(segments) -> bytes:
    return encode_group([Rollout(sample=0, segments=tuple(segments), text="", numerics="exact")])


def assert_same_group(got: Group, sent: Group) -> None:
    assert got.admission == sent.admission
    assert (got.rewards, got.verdicts, got.failure) == (sent.rewards, sent.verdicts, sent.failure)
    assert [r.text for r in got.rollouts] == [r.text for r in sent.rollouts]
    for a, b in zip(got.rollouts, sent.rollouts, strict=True):
        assert (a.sample, a.numerics, a.lineage) == (b.sample, b.numerics, b.lineage)
        assert bits(a.segments) == bits(b.segments)


def test_a_group_comes_back_as_it_was_filled(store, folder):
    sent = group(7, version=3)
    store.admitted(sent.admission)
    store.filled(sent)
    store.flush()
    assert_same_group(read(folder).group(7), sent)


def with_baseline(of_group: Group, reward: float | None = 0.25) -> Group:
    greedy = segment(5, of_group.admission.version, np.random.default_rng(99))
    rollout = Rollout(sample=BASELINE, segments=(greedy,), text="greedy", numerics="exact")
    verdicts = {"answer": Verdict.scored(0.25, exact=1.0), "late": Verdict.failed("worker died")}
    return replace(of_group, baseline=Baseline(rollout=rollout, verdicts=verdicts, reward=reward))


@pytest.mark.parametrize("reward", [0.25, None])
def test_a_greedy_completion_comes_back_beside_its_group_with_its_verdicts(store, folder, reward):
    sent = with_baseline(group(7, version=3), reward)
    store.admitted(sent.admission)
    store.filled(sent)
    store.flush()
    run = read(folder)
    got = run.group(7)
    assert_same_group(got, sent)
    assert (got.baseline.reward, got.baseline.verdicts) == (sent.baseline.reward, sent.baseline.verdicts)
    assert (got.baseline.rollout.sample, got.baseline.rollout.text) == (BASELINE, "greedy")
    assert bits(got.baseline.rollout.segments) == bits(sent.baseline.rollout.segments)
    assert run.ledger() == {Fate.IN_FLIGHT: sent.num_sampled}
    assert [item.is_baseline for item in run.rollouts(group=7)] == [True, False, False, False, False]


def test_a_consumed_greedy_completion_is_in_the_ledger_and_in_no_row_of_the_batch(store, folder):
    groups = [with_baseline(group(0)), group(1)]
    sent = batch(0, groups)
    fates = trained(groups) | {(0, BASELINE): {Fate.BASELINE: 5}}
    store.consumed(sent, REPORT, fates)
    store.flush()
    run = read(folder)
    got = run.batch(0)
    assert [(row.group, row.sample) for row in got.rows] == [(g, s) for g in range(2) for s in range(4)]
    assert (got.groups[0].baseline.reward, got.groups[1].baseline) == (0.25, None)
    assert run.ledger()[Fate.BASELINE] == 5
    assert sum(run.ledger().values()) == sum(each.num_sampled for each in groups)
    [greedy] = run.rollouts(sample=BASELINE)
    assert (greedy.fates, greedy.rows, greedy.reward, greedy.step) == ({Fate.BASELINE: 5}, {}, 0.25, 0)


def test_tokens_of_a_greedy_completion_without_a_fate_are_refused(store):
    groups = [with_baseline(group(0))]
    store.consumed(batch(0, groups), REPORT, trained(groups))
    with pytest.raises(NearpolicyError, match=r"fates of group 0 do not add up \(sample -1: 5 sampled, 0 told"):
        store.flush()


def test_a_greedy_completion_shares_the_fate_of_a_group_that_is_given_up(store, folder):
    lost = with_baseline(group(0), None)
    store.discarded(replace(lost, failure="no baseline"), Fate.FAILED, "no baseline")
    store.flush()
    run = read(folder)
    assert run.ledger() == {Fate.FAILED: lost.num_sampled}
    assert (run.group(0).failure, run.group(0).baseline.reward) == ("no baseline", None)


def older_schema(schema: int) -> str:
    """The tables as they were."""
    tables = SCHEMA.replace(PAYLOADS, "").replace(BRANCHES, "")
    tables = "".join(line for line in tables.splitlines(keepends=True) if "endings_by_kind" not in line)
    if schema < 3:
        tables = tables.replace("messages, columns\n    prompt_index INTEGER", "messages, columns")
        tables = tables.replace("prompt    BLOB NOT NULL, ", "prompt    BLOB NOT NULL ")
        column = "digests     BLOB,                    -- JSON: tensor -> digest; NULL where they were not kept"
        tables = tables.replace(column, "")
    return tables


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_an_older_store_is_read_and_brought_up_to_date_when_it_is_written_again(folder, monkeypatch, schema):
    with monkeypatch.context() as then:
        then.setattr(database, "SCHEMA", older_schema(schema))
        then.setattr(database, "SCHEMA_VERSION", schema)
        SqliteStore.create(folder, config={}).close()
    tables = str(sqlite3.connect(folder.store).execute("SELECT sql FROM sqlite_master").fetchall())
    assert ("prompt_index" in tables, "payloads" in tables) == (schema == 3, False)
    put_as_schema_3_did(folder, group(0), schema)
    branch = Branch(lineage=1, parent=0, first=1, kind=REMADE, reason="")
    with read(folder) as run:
        assert_is_group_0(run)
        assert run.digests(run.versions()[0]) == {}
        assert run.query("PRAGMA user_version")[0][0] == schema
        assert run.branches() == [branch]
        with SqliteStore.open(folder) as again:
            again.filled(with_baseline(group(1)))
        assert run.query("PRAGMA user_version")[0][0] == SCHEMA_VERSION
        assert_is_group_0(run)
        assert run.branches() == [branch]
        assert [run.lineages.of(version) for version in (0, 1, 2)] == [0, 1, 1]
        assert run.group(1).baseline.reward == 0.25  # by the reader that has seen the older schema


def put_as_schema_3_did(folder: RunFolder, of: Group, schema: int) -> None:
    """A consumed group with a payload for each rollout and each row."""
    old = sqlite3.connect(folder.store, isolation_level=None)
    prompt = of.admission.prompt
    described = {"id": prompt.id, "text": prompt.text, "messages": None, "columns": prompt.columns}
    row = (of.index, 0, 0, 0, prompt.task.encode(), encode_json(described), *((None,) if schema == 3 else ()))
    old.execute(f"INSERT INTO admissions VALUES ({', '.join('?' * len(row))})", row)
    old.execute("INSERT INTO groups VALUES (?, 0, 0, 0, NULL)", (of.index,))
    for each, reward in zip(of.rollouts, of.rewards, strict=True):
        (part,) = each.segments
        arrays = {name: getattr(part, name) for name in ("context_ids", "token_ids", "behavior_logprobs", "versions")}
        arrays = {f"0/{name}": values for name, values in (arrays | {"mask": part.mask}).items()}
        payload = safetensors.numpy.save(arrays, {"finish": part.finish.value})
        row = (of.index, 0, each.sample, 0, "exact", each.num_sampled, reward, each.text.encode(), payload)
        old.execute("INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    for row in batch(0, [of]).rows:
        payload = encode_arrays({"trained": row.trained, "advantages": row.advantages})
        old.execute("INSERT INTO trained_rows VALUES (?, ?, 0, ?)", (of.index, row.sample, payload))
    old.execute("INSERT INTO steps VALUES (0, 1, 1, 1)")
    old.execute("INSERT INTO consumption VALUES (0, 0, 0, ?, 0)", (of.index,))
    old.execute("INSERT INTO endings VALUES (?, 0, 'consumed', x'')", (of.index,))
    columns = "(lineage, version, updates, fingerprint, parent, wall_s)"
    for lineage, version in ((0, 0), (0, 2), (1, 1), (1, 2)):
        old.execute(f"INSERT INTO versions {columns} VALUES (?, ?, 0, 'f', NULL, 0.1)", (lineage, version))
    old.close()


def assert_is_group_0(run: RunReader) -> None:
    sent = batch(0, [group(0)])
    got = run.batch(0)
    assert (run.admission(0).prompt_index, run.admission(0).prompt) == (None, group(0).admission.prompt)
    for one, other in zip(got.groups[0].rollouts, group(0).rollouts, strict=True):
        assert (one.text, bits(one.segments)) == (other.text, bits(other.segments))
    for one, other in zip(got.rows, sent.rows, strict=True):
        assert (one.sample, one.trained.tobytes()) == (other.sample, other.trained.tobytes())
        assert one.advantages.tobytes() == other.advantages.tobytes()
    found = [bits(item.rollout.segments) for item in run.rollouts(step=0)]
    assert found == [bits(rollout.segments) for rollout in group(0).rollouts]


def test_nul_lone_surrogates_and_line_separators_survive_everywhere(store, folder):
    prompt = Prompt(
        id=NASTY, task=NASTY, messages=({"role": "user", "content": NASTY},), columns={NASTY: [NASTY, None]}
    )
    verdicts = {
        NASTY: Verdict(outcome=Outcome.SCORED, value=0.1, parts={NASTY: 1.5}, arrays={"process": np.arange(3.0)}),
        "late": Verdict.failed(NASTY),
    }
    rollout = Rollout(sample=0, segments=(segment(3, 0, np.random.default_rng(0)),), text=NASTY, numerics="fast")
    sent = Group(
        admission=admission(0, prompt=prompt),
        rollouts=(rollout,),
        verdicts=(verdicts,),
        rewards=(0.1,),
        failure=NASTY,
    )
    store.discarded(sent, Fate.FAILED, NASTY)
    store.flush()
    run = read(folder)
    got = run.group(0)
    assert got.admission == sent.admission and got.failure == NASTY and got.rollouts[0].text == NASTY
    assert got.verdicts[0]["late"] == verdicts["late"] and list(got.verdicts[0]) == [NASTY, "late"]
    assert got.verdicts[0][NASTY].parts == {NASTY: 1.5}
    assert got.verdicts[0][NASTY].arrays["process"].tolist() == [0.0, 1.0, 2.0]
    assert next(run.rollouts()).reason == NASTY


def test_the_batch_of_a_step_comes_back_with_the_same_rows_and_bits(store, folder):
    groups = [group(index) for index in (2, 0, 1)]  # ready order: not that of the indices
    sent = batch(5, groups)
    store.consumed(sent, REPORT, trained(groups))
    store.flush()
    run = read(folder)
    got = run.batch(5)
    assert [each.index for each in got.groups] == [2, 0, 1]
    assert [c.place for c in run.consumption(5)] == [0, 1, 2]
    by_key = {(row.group, row.sample): row for row in sent.rows}
    assert [(row.group, row.sample) for row in got.rows] == sorted(by_key)
    for row in got.rows:
        expected = by_key[row.group, row.sample]
        assert row.advantages.tobytes() == expected.advantages.tobytes()
        assert row.trained.tobytes() == expected.trained.tobytes()
        assert bits([row.segment]) == bits([expected.segment])


def test_a_group_that_leaves_its_place_empty_is_consumed_but_not_in_the_batch(store, folder):
    kept, filtered = group(0), group(1)
    store.filled(filtered)
    fates = trained([kept]) | {(1, r.sample): {Fate.FILTERED: r.num_sampled} for r in filtered.rollouts}
    store.consumed(replace(batch(0, [kept]), places=2), REPORT, fates)
    store.flush()
    run = read(folder)
    assert [(c.admission, c.place) for c in run.consumption()] == [(0, 0), (1, None)]
    assert [each.index for each in run.batch(0).groups] == [0]
    assert run.ledger()[Fate.FILTERED] == filtered.num_sampled


def test_the_ledger_adds_up_to_all_that_was_sampled(tmp_path):
    run = RunReader(make_run(tmp_path).path)
    sampled = sum(each.num_sampled for each in run.groups())
    assert sum(run.ledger().values()) == sampled > 0
    assert run.ledger()[Fate.IN_FLIGHT] == run.group(17).num_sampled
    assert [each.index for each in run.unfinished()] == [17]


def test_fates_that_do_not_add_up_are_refused_with_the_sample(store, folder):
    groups = [group(0)]
    fates = trained(groups)
    del fates[0, 2]
    store.consumed(batch(0, groups), REPORT, fates)
    with pytest.raises(NearpolicyError, match=r"fates of group 0 do not add up \(sample 2: \d+ sampled, 0 told"):
        store.flush()
    assert read(folder).steps() == []  # nothing of the call is there


def test_an_admission_ends_once(store):
    store.discarded(group(0), Fate.EXPIRED, "too old")
    store.consumed(batch(0, [group(0)]), REPORT, trained([group(0)]))
    with pytest.raises(NearpolicyError, match=r"admission 0 .* ended as expired and again as consumed"):
        store.flush()


def test_a_retry_keeps_both_attempts_apart(store, folder):
    first = replace(group(4), failure="worker died")
    again = replace(group(4), admission=replace(first.admission, attempt=1))
    store.admitted(first.admission)
    store.discarded(first, Fate.FAILED, "worker died")
    store.admitted(again.admission)
    store.filled(again)
    store.consumed(batch(0, [again]), REPORT, trained([again]))
    store.flush()
    run = read(folder)
    assert run.group(4).failure is None and run.group(4, attempt=0).failure == "worker died"
    assert sum(run.ledger().values()) == 2 * again.num_sampled


def test_k31_verdicts_follow_the_sample_not_the_place(store, folder):
    sent = group(0)
    order = (3, 1, 0, 2)
    rewards = tuple(sample / 10 for sample in order)
    shuffled = replace(
        sent,
        rollouts=tuple(sent.rollouts[sample] for sample in order),
        verdicts=tuple({"score": Verdict.scored(sample / 10)} for sample in order),
        rewards=rewards,
    )
    store.filled(shuffled)
    store.flush()
    stored = list(read(folder).rollouts(group=0))
    assert [item.rollout.sample for item in stored] == [0, 1, 2, 3]
    assert [item.reward for item in stored] == [0.0, 0.1, 0.2, 0.3]
    assert [item.verdicts["score"].value for item in stored] == [0.0, 0.1, 0.2, 0.3]


def test_k31_three_verdicts_for_four_samples_are_an_error(store):
    store.filled(replace(group(0), verdicts=group(0).verdicts[:3]))
    with pytest.raises(NearpolicyError, match="shorter"):
        store.flush()


def test_one_name_never_stands_for_two_weights(store, folder):
    record = VersionRecord(lineage=0, version=1, updates=1, fingerprint="aa", parent=0)
    store.published(record, 0.1)
    store.published(record, 0.1)
    store.flush()
    assert read(folder).versions() == [record]
    store.published(replace(record, fingerprint="bb"), 0.1)
    with pytest.raises(NearpolicyError, match=r"fingerprint aa.*open a new lineage"):
        store.flush()


def test_numpy_counters_are_taken_as_numbers(store, folder):
    store.event(
        Event(time=np.float64(1.5), role="generator", kind="finish", sample=np.int64(3), numbers={"n": np.int32(2)})
    )
    store.flush()
    (event,) = read(folder).events()
    assert (event.time, event.sample, event.numbers) == (1.5, 3, {"n": 2})


def test_an_error_in_the_thread_surfaces_on_the_next_call_and_earlier_calls_are_kept(store, folder):
    store.filled(group(0))
    store.discarded(group(1), Fate.IN_FLIGHT, "nonsense")
    store.filled(group(2))
    with pytest.raises(NearpolicyError, match="in flight"):
        store.flush()
    with pytest.raises(NearpolicyError, match="in flight"):
        store.filled(group(3))
    with pytest.raises(NearpolicyError, match="in flight"):
        store.close()
    assert [each.index for each in read(folder).groups()] == [0]


def test_a_closed_store_takes_nothing_more(store):
    store.close()
    store.close()
    with pytest.raises(NearpolicyError, match="is closed"):
        store.filled(group(0))


def test_a_full_queue_pushes_back_and_loses_nothing(folder):
    with SqliteStore.create(folder, config=CONFIG, max_pending=4) as store:
        blocker = sqlite3.connect(folder.store, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")  # the writer cannot commit
        store.event(Event(time=0, role="queue", kind="admit"))
        _until(lambda: len(store._writer.commits._calls) == 0)
        time.sleep(0.05)  # the writer stops gathering and waits for the database

        done = threading.Event()
        producer = threading.Thread(target=lambda: (_tell(store, 10), done.set()))
        producer.start()
        _until(lambda: len(store._writer.commits._calls) == 4)
        assert not done.wait(0.3) and len(store._writer.commits._calls) == 4

        blocker.execute("ROLLBACK")
        assert done.wait(10)
        producer.join()
        store.flush()
        assert [event.time for event in read(folder).events()] == [0, *range(10)]


def test_a_disk_that_hangs_is_named_within_the_bound(folder):
    store = SqliteStore.create(folder, config=CONFIG, max_pending=2, stall_s=0.3)
    blocker = sqlite3.connect(folder.store, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StandstillError, match="committed nothing for"):
        _tell(store, 600)
    with pytest.raises(StandstillError, match="calls waiting"):
        store.flush()
    blocker.execute("ROLLBACK")
    store.close()


def _tell(store: SqliteStore, count: int) -> None:
    for number in range(count):
        store.event(Event(time=number, role="queue", kind="admit"))


def _until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


_WRITES_UNTIL_KILLED = """
import sys, itertools
from pathlib import Path
from synthetic_run import *
store = SqliteStore.create(RunFolder(Path(sys.argv[1])), config=CONFIG)
for step in itertools.count():
    groups = [group(2 * step), group(2 * step + 1)]
    for each in groups:
        store.admitted(each.admission)
        store.filled(each)
    store.consumed(batch(step, groups), StepReport(version=step + 1, updates=step + 1, metrics={}), trained(groups))
    if step == 20:
        store.flush()
        print("flushed", flush=True)
"""


def _start_writer(folder: RunFolder) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    return subprocess.Popen(
        [sys.executable, "-c", _WRITES_UNTIL_KILLED, str(folder.path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_kill_9_loses_nothing_that_flush_confirmed_and_leaves_nothing_half_done(folder):
    writer = _start_writer(folder)
    try:
        assert writer.stdout.readline() == b"flushed\n"
        with pytest.raises(RunFolderError, match="being written by another run"):
            SqliteStore.open(folder)
        time.sleep(0.1)  # let it get into the middle of things
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

    with SqliteStore.open(folder) as store:  # the lock died with its owner
        run = read(folder)
        steps = run.steps()
        assert len(steps) >= 21
        for step in steps:
            assert [each.index for each in run.batch(step.step).groups] == [2 * step.step, 2 * step.step + 1]
        assert_same_group(run.group(41), group(41))
        assert sum(run.ledger().values()) == sum(each.num_sampled for each in run.groups())
        next_step = steps[-1].step + 1
        groups = [group(1000)]
        store.consumed(batch(next_step, groups), REPORT, trained(groups))
        store.flush()
        assert run.steps()[-1].step == next_step


def test_a_second_writer_in_the_same_process_is_refused(store, folder):
    with pytest.raises(RunFolderError, match="being written by another run"):
        SqliteStore.open(folder)
    store.close()
    with pytest.raises(RunFolderError, match="already holds a run"):
        SqliteStore.create(folder, config=CONFIG)
    SqliteStore.open(folder).close()


def test_a_reader_sees_the_run_grow(store, folder):
    run = read(folder)
    assert run.config == CONFIG and run.steps() == [] and run.metrics() == [] and run.summary() is None
    for step in range(3):
        groups = [group(step)]
        store.consumed(batch(step, groups), REPORT, trained(groups))
        store.flush()
        assert len(run.steps()) == step + 1


def test_closing_leaves_one_file_and_no_log_beside_it(tmp_path):
    source = make_run(tmp_path, steps=2)
    assert sorted(path.name for path in source.path.glob("store*")) == ["store.lock", "store.sqlite"]
    assert len(RunReader(source.path).steps()) == 2


def test_a_folder_that_is_no_run_and_a_newer_schema_are_refused_by_name(tmp_path, store, folder):
    with pytest.raises(RunFolderError, match="is not a folder"):
        RunReader(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match=r"holds no store.sqlite"):
        RunReader(tmp_path)
    (tmp_path / "store.sqlite").write_bytes(b"plain text, and long enough to look at" * 40)
    with pytest.raises(RunFolderError, match="cannot be read as the store"):
        RunReader(tmp_path)
    (tmp_path / "store.sqlite").unlink()
    sqlite3.connect(tmp_path / "store.sqlite").execute("CREATE TABLE mine (x)")
    with pytest.raises(RunFolderError, match="not the store of a run"):
        RunReader(tmp_path)
    store.close()
    sqlite3.connect(folder.store).execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(RunFolderError, match=rf"schema {SCHEMA_VERSION + 1}.*Update"):
        RunReader(folder.path)


def test_reading_and_writing_a_run_loads_no_torch():
    modules = "store.writer, nearpolicy.store.reader, nearpolicy.telemetry.report, nearpolicy.launch.inspect"
    code = f"import sys, nearpolicy.{modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_rollouts_are_found_by_step_group_and_sample(tmp_path):
    run = RunReader(make_run(tmp_path).path)
    assert {item.admission.index for item in run.rollouts(step=2)} == {8, 9, 10, 11}
    (one,) = run.rollouts(group=9, sample=3)
    assert (one.step, one.ending, one.rollout.sample) == (2, "consumed", 3)
    assert one.rows[0].advantages.shape == one.rollout.segments[0].token_ids.shape
    assert sum(one.fates.values()) == one.rollout.num_sampled
    (failed,) = run.rollouts(group=16, limit=1)
    assert (failed.step, failed.ending, failed.reason) == (None, "failed", "the verifier's worker died twice")
    (waiting,) = run.rollouts(group=17, limit=1)
    assert waiting.ending is None and set(waiting.fates) == {Fate.IN_FLIGHT}


@pytest.mark.parametrize("what", ["removed", "replaced", "moved away"])
def test_a_folder_that_is_removed_or_replaced_while_it_is_written_is_named_soon(tmp_path, what):
    folder = create_run_folder("x", directory=tmp_path / "mine")
    store = SqliteStore.create(folder, config=CONFIG)
    store.filled(group(0))
    store.flush()
    if what == "moved away":
        folder.path.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder.path)
    if what == "replaced":
        SqliteStore.create(create_run_folder("x", directory=tmp_path / "mine"), config=CONFIG).close()
    with pytest.raises(RunFolderError, match=r"mine was removed or replaced while the run wrote it"):
        store.filled(group(1))
        store.flush()
    with pytest.raises(RunFolderError):
        store.close()


def test_numbers_that_sqlite_cannot_hold_are_just_not_there(tmp_path):
    with RunReader(make_run(tmp_path).path) as run:
        for number in (10**30, -(10**30)):
            assert list(run.rollouts(step=number)) == list(run.rollouts(group=number, sample=number)) == []
            assert run.consumption(number) == run.evaluations(version=number) == []
            for ask in (run.batch, run.group, run.admission):
                with pytest.raises(KeyError):
                    ask(number)


def test_a_damaged_store_is_a_message(tmp_path):
    folder = make_run(tmp_path)
    data = bytearray(folder.store.read_bytes())
    data[8192:] = os.urandom(len(data) - 8192)
    folder.store.write_bytes(data)
    with (
        pytest.raises(RunFolderError, match=r"store\.sqlite (is damaged|cannot be read)"),
        RunReader(folder.path) as run,
    ):
        list(run.rollouts())


def test_a_store_that_sqlite_can_read_but_whose_values_are_damaged_is_a_message(tmp_path):
    folder = make_run(tmp_path)
    with contextlib.closing(sqlite3.connect(folder.store)) as db:
        for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")
        db.execute("UPDATE payloads SET payload = x'00112233'")
        db.commit()
    with pytest.raises(RunFolderError, match=r"store\.sqlite is damaged: stored values"), RunReader(folder.path) as run:
        list(run.rollouts())


def test_what_is_committed_is_on_the_disk_soon_though_nobody_asks(folder, monkeypatch):
    reached, names = threading.Event(), []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)
        if names[-1].endswith("store.sqlite-wal"):
            reached.set()

    with SqliteStore.create(folder, config={}) as store:
        store.flush()
        monkeypatch.setattr(os, "fsync", fsync)
        store.filled(group(0))
        assert reached.wait(30)
        assert names == [str(folder.store) + "-wal"]
    assert len(names) == 1  # all of it was there when it was closed


def test_with_full_sync_every_commit_waits_for_the_disk_itself(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("the database does it"))
    with SqliteStore.create(folder, config={}, sync="full") as store:
        store.filled(group(0))
        store.flush()


def test_the_counts_of_a_running_store_are_those_of_its_database(folder):
    """I2, also after it was opened again."""
    with SqliteStore.create(folder, config={}) as store:
        for index in range(6):
            store.filled(group(index))
        in_flight = sum(group(index).num_sampled for index in range(6))
        assert store.ledger() == {Fate.IN_FLIGHT: in_flight}
        store.discarded(group(0), Fate.EXPIRED, "old")
        store.discarded(group(7), Fate.FAILED, "never filled")
        store.retried(group(1), Fate.ABORTED, "cut off")
        two, three, four = group(2), group(3), group(4)
        store.consumed(batch(0, [two, three]), REPORT, trained([two, three]))
        store.flush()
        assert store.ledger() == read(folder).ledger()
        old = tuple(replace(row, replayed=True) for row in batch(1, [two]).rows)
        again = replace(batch(1, [four]), replayed=(two,), rows=(*batch(1, [four]).rows, *old))
        store.consumed(again, REPORT, trained([four]))
        store.flush()
        assert store.ledger() == read(folder).ledger()
        assert store.ledger()[Fate.REPLAYED] == sum(int(row.trained.sum()) for row in again.rows if row.replayed)
    with SqliteStore.open(folder) as store:
        assert store.ledger() == read(folder).ledger()
        branch = Branch(lineage=1, parent=0, first=2, kind=ROLLBACK, reason="a spike")
        store.branched(branch, [group(5)])
        store.flush()
        assert store.ledger() == read(folder).ledger()
        assert set(store.ledger()) >= {Fate.TRAINED, Fate.EXPIRED} and Fate.REPLAYED not in store.ledger()
        assert Fate.IN_FLIGHT not in store.ledger()


# Attempts that go on from what is stored of an earlier one


def stopped_group(index: int = 0) -> Group:
    """Samples 0 and 1 had ended and were judged, 2 was under way, 3 had failed."""
    whole = group(index, version=1)
    ends = {2: Finish.ABORTED, 3: Finish.FAILED}
    rollouts = [
        replace(r, segments=(replace(r.segments[0], finish=ends.get(r.sample, Finish.STOP)),)) for r in whole.rollouts
    ]
    verdicts = tuple({} if sample in ends else of for sample, of in enumerate(whole.verdicts))
    rewards = tuple(None if sample in ends else reward for sample, reward in enumerate(whole.rewards))
    return replace(whole, rollouts=tuple(rollouts), verdicts=verdicts, rewards=rewards, failure="the run ended")


def continued(of: Group, version: int = 2, more: int = 3) -> Group:
    """The next attempt: sample 2 goes on, 3 is drawn anew."""
    of = replace(of, admission=replace(of.admission, attempt=of.admission.attempt + 1), failure=None)
    rollouts = list(of.rollouts)
    old, new = rollouts[2].segments[0], segment(more, version, np.random.default_rng(5))
    names = ("token_ids", "mask", "behavior_logprobs", "versions")
    both = {name: np.concatenate([getattr(old, name), getattr(new, name)]) for name in names}
    rollouts[2] = replace(rollouts[2], segments=(replace(old, **both, finish=Finish.STOP),))
    rollouts[3] = replace(rollouts[3], segments=(segment(4, version, np.random.default_rng(6)),))
    scored = {"answer": Verdict.scored(1.0)}
    return replace(
        of,
        rollouts=tuple(rollouts),
        verdicts=tuple(verdicts or scored for verdicts in of.verdicts),
        rewards=tuple(1.0 if reward is None else reward for reward in of.rewards),
    )


def require_balance(store: SqliteStore, folder: RunFolder, **expected: int) -> None:
    """What the running store has counted is what is stored, and each token that was sampled is there once."""
    store.flush()
    with read(folder) as run:
        told = {fate.value: tokens for fate, tokens in run.ledger().items()}
        assert {fate.value: tokens for fate, tokens in store.ledger().items()} == told == expected
        assert sum(told.values()) == run.query("SELECT sum(sampled) FROM rollouts")[0][0]
        by_rollout = Counter()
        for item in run.rollouts():
            assert sum(item.fates.values()) == item.rollout.num_sampled
            by_rollout.update({fate.value: tokens for fate, tokens in item.fates.items()})
        assert by_rollout == Counter(expected)


def take_up(store: SqliteStore, folder: RunFolder, *, goes_on: bool = True) -> Group | None:
    """As a run does; the next attempt's admission is that of the last one, plus one."""
    with read(folder) as run:
        found = position_of(run)
    kept = [g for g in map(can_go_on, found.stopped) if g is not None] if goes_on else []
    store.lost(found.unfinished, "under way", stopped=found.stopped, recycled=kept)
    assert store.recycled.oldest_versions() == {g.index: 1 for g in kept}
    [admission] = found.unfinished
    return store.recycled.take(replace(admission, attempt=admission.attempt + 1))


@pytest.fixture
def stopped(folder) -> Group:
    of = stopped_group()
    with SqliteStore.create(folder, config={}) as store:
        store.admitted(of.admission)
        store.discarded(of, Fate.ABORTED, "the run ended")
        require_balance(store, folder, aborted=of.num_sampled)
    return of


def test_recycled_tokens_are_in_flight_and_then_in_the_attempt_that_goes_on_from_them(folder, stopped):
    """I2."""
    failed = stopped.rollouts[3].num_sampled
    with SqliteStore.open(folder) as store:
        kept = take_up(store, folder)
        assert [rollout.sample for rollout in kept.rollouts] == [0, 1, 2]
        assert [bits(r.segments) for r in kept.rollouts] == [bits(r.segments) for r in stopped.rollouts[:3]]
        require_balance(store, folder, aborted=failed, in_flight=kept.num_sampled)
        now = continued(stopped)
        store.filled(now)
        require_balance(store, folder, aborted=failed, in_flight=now.num_sampled)
        assert now.num_sampled == kept.num_sampled + 3 + 4
        store.consumed(batch(0, [now]), REPORT, trained([now]))
        require_balance(store, folder, aborted=failed, trained=now.num_sampled)
    with read(folder) as run:
        assert_same_group(run.group(0), now)
        assert [rollout.sample for rollout in run.group(0, 0).rollouts] == [3]
        endings = run.query("SELECT attempt, ending FROM endings ORDER BY attempt")
        assert [tuple(row) for row in endings] == [(0, "recycled"), (1, "consumed")]


def test_what_was_recycled_is_found_again_when_the_process_dies_before_it_is_stored(folder, stopped):
    for attempt in (1, 2):
        with SqliteStore.open(folder) as store:  # closed without a word about the attempt
            kept = take_up(store, folder)
            assert kept.admission.attempt == 0
            require_balance(store, folder, aborted=stopped.rollouts[3].num_sampled, in_flight=kept.num_sampled)
            with read(folder) as run:
                assert run.admission(0).attempt == attempt
    with SqliteStore.open(folder) as store:
        assert take_up(store, folder, goes_on=False) is None
        require_balance(store, folder, aborted=stopped.num_sampled)
    with read(folder) as run:
        assert position_of(run).stopped == ()


def test_an_attempt_that_is_stopped_again_holds_what_it_went_on_from(folder, stopped):
    with SqliteStore.open(folder) as store:
        take_up(store, folder)
        store.discarded(replace(continued(stopped), failure="the run ended"), Fate.ABORTED, "the run ended")
        require_balance(store, folder, aborted=stopped.num_sampled + 3 + 4)
    with SqliteStore.open(folder) as store:
        kept = take_up(store, folder)
        assert (kept.admission.attempt, kept.num_sampled) == (1, continued(stopped).num_sampled)


def test_an_attempt_that_holds_nothing_of_it_leaves_it_aborted(folder, stopped):
    with SqliteStore.open(folder) as store:
        take_up(store, folder)
        nothing = Group(admission=replace(stopped.admission, attempt=1), failure="the environment raised")
        store.retried(nothing)
        require_balance(store, folder, aborted=stopped.num_sampled)
        assert store.recycled.take(replace(stopped.admission, attempt=2)) is None


@pytest.mark.parametrize("kind", [ROLLBACK, REMADE])
@pytest.mark.parametrize("is_taken", [True, False])
def test_nothing_goes_on_from_tokens_of_weights_that_do_not_count_any_more(folder, stopped, kind, is_taken):
    with SqliteStore.open(folder) as store:
        if is_taken:
            take_up(store, folder)
        else:
            store.lost([stopped.admission], "under way", stopped=[stopped], recycled=[can_go_on(stopped)])
        later = Branch(lineage=1, parent=0, first=2, kind=kind, reason="later")
        store.branched(later, [])
        failed = stopped.rollouts[3].num_sampled
        if kind == REMADE:  # versions below the first that differs count
            require_balance(store, folder, aborted=failed, in_flight=stopped.num_sampled - failed)
            store.branched(Branch(lineage=2, parent=1, first=1, kind=kind, reason="earlier"), [])
        require_balance(store, folder, aborted=stopped.num_sampled)
        assert store.recycled.take(replace(stopped.admission, attempt=1)) is None
        now = continued(stopped)
        store.retried(now, Fate.ABORTED, "cut off")
        anew = 0 if is_taken else now.num_sampled - 3 - 4  # as if drawn again
        require_balance(store, folder, aborted=now.num_sampled + failed + anew)


def test_retention_leaves_what_was_recycled_until_the_next_attempt_is_stored(folder, stopped):
    def may_go() -> set[tuple[int, int]]:
        store.flush()
        with contextlib.closing(sqlite3.connect(folder.store)) as connection:
            return {(row.admission, row.attempt) for row in next_portion(connection, oldest=2, steps=0)}

    with SqliteStore.open(folder) as store:
        take_up(store, folder)
        store.consumed(batch(0, [group(1)]), REPORT, trained([group(1)]))
        assert may_go() == {(1, 0)}
        now = continued(stopped)
        store.consumed(batch(1, [now]), REPORT, trained([now]))
        store.filled(group(2))
        failed, used = stopped.rollouts[3].num_sampled, group(1).num_sampled + now.num_sampled
        require_balance(store, folder, aborted=failed, trained=used, in_flight=group(2).num_sampled)
        assert may_go() == {(1, 0), (0, 1), (0, 0)}


def test_tokens_that_only_look_like_those_that_were_kept_do_not_take_their_place():
    of = stopped_group()
    before, now = of.rollouts[2], continued(of).rollouts[2]
    assert goes_on(before, now) and goes_on(before, before) and not goes_on(now, before) and not goes_on(before, None)
    part = now.segments[0]
    for name in ("token_ids", "versions", "behavior_logprobs"):
        other = np.array(getattr(part, name))
        other[0] += 1
        assert not goes_on(before, replace(now, segments=(replace(part, **{name: other}),)))


def test_recycled_tokens_survive_export_and_import(folder, stopped, tmp_path):
    with SqliteStore.open(folder) as store:
        kept = take_up(store, folder)
        expected = {Fate.ABORTED: stopped.rollouts[3].num_sampled, Fate.IN_FLIGHT: kept.num_sampled}
    for form in ("parquet", "jsonl"):
        export_run(folder.path, tmp_path / form, form)
        import_run(tmp_path / form, tmp_path / f"again-{form}")
        with RunReader(tmp_path / f"again-{form}") as run:
            assert run.ledger() == expected
            [group_again] = position_of(run).stopped
            assert bits(can_go_on(group_again).rollouts[2].segments) == bits(stopped.rollouts[2].segments)
