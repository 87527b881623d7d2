"""What the store promises: nothing confirmed is lost, nothing is half there, nobody else writes, I2 holds."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from record_contract import (
    REPORT,
    RecordContract,
    assert_same_group,
    bits,
    continued,
    read,
    stopped_group,
    with_baseline,
)
from synthetic_run import CONFIG, batch, group, make_run, trained

from nearpolicy.errors import RunFolderError, StandstillError
from nearpolicy.records import (
    REMADE,
    Branch,
    Event,
    Fate,
    Group,
)
from nearpolicy.store import database
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.payload import encode_arrays, encode_json
from nearpolicy.store.reader import RunReader
from nearpolicy.store.recycled import goes_on
from nearpolicy.store.schema import BRANCHES, PAYLOADS, SCHEMA, SCHEMA_VERSION
from nearpolicy.store.writer import SqliteStore


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run_folder("run", parent=tmp_path)


@pytest.fixture
def store(folder: RunFolder):
    with SqliteStore.create(folder, config=CONFIG) as store:
        yield store


@pytest.fixture
def records() -> type[SqliteStore]:
    return SqliteStore


class TestRecordInThisProcess(RecordContract):
    pass


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


def test_the_ledger_adds_up_to_all_that_was_sampled(tmp_path):
    run = RunReader(make_run(tmp_path).path)
    sampled = sum(each.num_sampled for each in run.groups())
    assert sum(run.ledger().values()) == sampled > 0
    assert run.ledger()[Fate.IN_FLIGHT] == run.group(17).num_sampled
    assert [each.index for each in run.unfinished()] == [17]


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


def test_tokens_that_only_look_like_those_that_were_kept_do_not_take_their_place():
    of = stopped_group()
    before, now = of.rollouts[2], continued(of).rollouts[2]
    assert goes_on(before, now) and goes_on(before, before) and not goes_on(now, before) and not goes_on(before, None)
    part = now.segments[0]
    for name in ("token_ids", "versions", "behavior_logprobs"):
        other = np.array(getattr(part, name))
        other[0] += 1
        assert not goes_on(before, replace(now, segments=(replace(part, **{name: other}),)))


def test_a_process_that_dies_while_it_makes_a_store_leaves_none_and_no_harm(tmp_path):
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from nearpolicy.store.folder import create_run_folder\nfrom nearpolicy.store.writer import SqliteStore\n"
        "Path.replace = lambda *_: os._exit(9)\n"
        "SqliteStore.create(create_run_folder('', directory=sys.argv[1]), config={})\n"
    )
    folder = tmp_path / "run"
    assert subprocess.run([sys.executable, "-c", script, folder]).returncode == 9
    assert (folder / "store.draft").exists() and not RunFolder(folder).store.exists()
    (folder / "store.draft-journal").write_bytes(b"of a transaction that never ended")
    SqliteStore.create(create_run_folder("", directory=folder), config=CONFIG).close()
    assert not list(folder.glob("store.draft*"))
    with RunReader(folder) as run:
        assert run.config == CONFIG
