"""Payloads that leave the database: in time, without loss, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import NASTY, admission, batch, group, segment, trained
from test_export import dump
from test_store import bits, with_baseline

from nearpolicy.errors import RunFolderError
from nearpolicy.launch.inspect import inspect_run
from nearpolicy.launch.report import write_report
from nearpolicy.records import Fate, Group, Rollout, StepReport, Verdict
from nearpolicy.store import retention
from nearpolicy.store.export import export_run, import_run
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.retention import Retention, next_portion
from nearpolicy.store.schema import SCHEMA
from nearpolicy.store.writer import SqliteStore

STEPS, PER_STEP = 6, 2


def nasty_group(index: int) -> Group:
    """Two segments of which one is empty, arrays beside the tokens, text that few formats hold."""
    numbers = np.random.default_rng(index)
    parts = (segment(4, 0, numbers, kept=np.array([np.nan, -0.0, 1e-310, 1.0])), segment(0, 0, numbers))
    rollout = Rollout(sample=0, segments=parts, text=NASTY, numerics="fast")
    return Group(
        admission=admission(index),
        rollouts=(rollout,),
        verdicts=({NASTY: Verdict.scored(0.5)},),
        rewards=(0.5,),
    )


def tell_step(store: SqliteStore, step: int) -> None:
    """Two groups that are consumed, one with a baseline, and after each step one that is given up."""
    first = 3 * step
    groups = [with_baseline(group(first)), group(first + 1)]
    fates = trained(groups) | {(first, -1): {Fate.BASELINE: 5}}
    store.consumed(batch(step, groups), StepReport(version=step + 1, updates=step + 1, metrics={}), fates)
    store.discarded(nasty_group(first + 2), Fate.FILTERED, "no signal")


def make(path: Path, keeps: Retention | None, checkpoint: int = STEPS) -> RunFolder:
    folder = create_run_folder("", directory=path)
    with SqliteStore.create(folder, config={}, retention=keeps) as store:
        for step in range(STEPS):
            tell_step(store, step)
        store.filled(group(3 * STEPS))
        store.flush()
        store.checkpointed(checkpoint)
    return folder


def left(folder: RunFolder) -> set[int]:
    """Groups whose payloads are in the database."""
    with RunReader(folder.path) as run:
        return {row[0] for row in run.query("SELECT admission FROM payloads")}


def everything(folder: RunFolder) -> list:
    """All that a reader gives, in plain values."""
    with RunReader(folder.path) as run:
        rollouts = [
            (
                *(item.admission, item.rollout.text, bits(item.rollout.segments), item.verdicts, item.reward),
                *(item.ending, item.reason, item.step, item.fates, item.is_dropped),
                *((place, r.trained.tobytes(), r.advantages.tobytes()) for place, r in item.rows.items()),
            )
            for item in run.rollouts()
        ]
        groups = [(g.admission, g.rewards, [bits(r.segments) for r in g.everything]) for g in run.groups()]
        rows = [
            [(r.group, r.sample, bits([r.segment]), r.trained.tobytes(), r.advantages.tobytes()) for r in batch.rows]
            for batch in (run.batch(step.step) for step in run.steps())
        ]
        return [rollouts, groups, rows, run.ledger(), run.consumption()]


@pytest.mark.parametrize("portion", [1, 2**20], ids=["each payload alone", "all in one"])
def test_moved_payloads_are_read_bit_for_bit_by_whoever_reads_a_run(tmp_path, monkeypatch, portion):
    monkeypatch.setattr(retention, "_PORTION_BYTES", portion)
    kept, moved = make(tmp_path / "kept", None), make(tmp_path / "moved", Retention("parquet", 2))
    assert left(moved) == {11, *range(12, 18), 18}  # 11 was given up after the last group that is old enough
    assert (len(list(moved.payloads.iterdir())) > 10) == (portion == 1)
    assert everything(moved) == everything(kept)

    for form in ("parquet", "jsonl"):
        export_run(moved.path, tmp_path / form, form)
        import_run(tmp_path / form, tmp_path / f"back-{form}")
        back, there = dump(tmp_path / f"back-{form}"), dump(kept.path)
        assert back.pop("run") != there.pop("run")  # each began at its own time
        assert back == there


def test_dropped_payloads_leave_texts_rewards_fates_and_a_message(tmp_path, capsys):
    kept, dropped = make(tmp_path / "kept", None), make(tmp_path / "dropped", Retention("drop", 2))
    assert not dropped.payloads.exists()
    with RunReader(dropped.path) as run, RunReader(kept.path) as whole:
        for ask in (lambda: run.group(0), lambda: run.batch(0), lambda: list(run.groups())):
            with pytest.raises(
                RunFolderError, match=r"tokens of group 0 .* were dropped, as its setting store\.retention: drop"
            ):
                ask()
        assert len(run.batch(4).rows) == len(whole.batch(4).rows)
        assert run.ledger() == whole.ledger() and run.consumption() == whole.consumption()
        for one, other in zip(run.rollouts(), whole.rollouts(), strict=True):
            assert (one.rollout.text, one.reward, one.verdicts) == (other.rollout.text, other.reward, other.verdicts)
            assert (one.fates, one.ending, one.step) == (other.fates, other.ending, other.step)
            assert one.is_dropped == (not one.rollout.segments) == (one.admission.index < 11)
            assert one.rows.keys() == (set() if one.is_dropped else other.rows.keys())
    write_report(dropped.path)
    inspect_run(dropped.path, group=0, limit=1)
    assert "dropped (store.retention: drop)" in capsys.readouterr().out
    export_run(dropped.path, tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "back")
    assert dump(tmp_path / "back") == dump(dropped.path)


@given(done=st.integers(0, 9), steps=st.integers(0, 9), oldest=st.integers(0, 9))
def test_a_payload_goes_when_it_is_old_enough_and_in_every_checkpoint_and_never_before(done, steps, oldest):
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(SCHEMA)
    for step in range(done):
        connection.execute("INSERT INTO steps VALUES (?, 1, ?, ?)", (step, step + 1, step + 1))
        connection.execute("INSERT INTO consumption VALUES (?, ?, 0, ?, 0)", (step, step, step))
        connection.execute("INSERT INTO endings VALUES (?, 0, 'consumed', x'')", (step,))
        connection.execute("INSERT INTO payloads VALUES (?, 0, 'segments', x'00')", (step,))
    connection.execute("INSERT INTO payloads VALUES (?, 0, 'segments', x'00')", (done,))  # waits for a step
    found = next_portion(connection, oldest=oldest, steps=steps)
    assert [row.admission for row in found] == [step for step in range(done) if step < min(oldest, done - steps)]


@pytest.mark.parametrize(("checkpoint", "expected"), [(0, 0), (2, 2), (STEPS, 4)])
def test_a_resume_finds_in_the_database_what_is_not_in_the_oldest_checkpoint(tmp_path, checkpoint, expected):
    folder = make(tmp_path / "run", Retention("drop", 2), checkpoint)
    assert min(left(folder)) == 3 * expected - (expected > 0)  # and the group given up after the last of them


_DIES = """
import os, signal, sys
from pathlib import Path
from test_payload_retention import *
from nearpolicy.store import retention, statements, writer

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def at(owner, name, count, after):
    original, calls = getattr(owner, name), [0]
    def struck(*arguments, **named):
        calls[0] += 1
        if calls[0] == count and not after:
            die()
        result = original(*arguments, **named)
        if calls[0] == count and after:
            die()
        return result
    setattr(owner, name, struck)

owner, name, count, after = sys.argv[2:]
owners = {"retention": retention, "statements": statements.Statements, "writer": writer.StoreWriter}
at(owners[owner], name, int(count), after == "after")
retention._PORTION_BYTES = 1500
make(Path(sys.argv[1]), Retention("parquet", 2))
"""


@pytest.mark.parametrize(
    ("owner", "name", "count", "when"),
    [
        ("retention", "_make_durable", 1, "before"),  # the file is written under another name
        ("retention", "_make_durable", 2, "before"),  # it has its name, and nobody knows of it
        ("statements", "moved", 1, "before"),
        ("statements", "moved", 1, "after"),  # inside the transaction
        ("writer", "_moved", 1, "after"),  # it is committed
        ("statements", "moved", 2, "after"),
        ("retention", "_make_durable", 5, "before"),
    ],
)
def test_a_kill_while_payloads_are_moved_loses_and_doubles_nothing(tmp_path, owner, name, count, when):
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", _DIES, str(tmp_path / "run"), owner, name, str(count), when]
    died = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    kept, folder = make(tmp_path / "kept", None), RunFolder(tmp_path / "run")
    assert everything(folder) == everything(kept)
    with SqliteStore.open(folder, retention=Retention("parquet", 2)) as store:
        with RunReader(folder.path) as run:
            known = {f"{row[0]}.parquet" for row in run.query("SELECT DISTINCT file FROM moved")}
        assert {file.name for file in folder.payloads.iterdir()} == known
        store.checkpointed(STEPS)
    assert left(folder) == left(make(tmp_path / "straight", Retention("parquet", 2)))
    assert everything(folder) == everything(kept)


def test_the_database_stops_growing(tmp_path):
    def sizes(path: Path, keeps: Retention | None) -> list[int]:
        folder, found = create_run_folder("", directory=path), []
        SqliteStore.create(folder, config={}).close()
        for life in range(12):
            with SqliteStore.open(folder, retention=keeps) as store:
                for step in range(4 * life, 4 * life + 4):
                    groups = [group(8 * step + place, size=64) for place in range(8)]
                    report = StepReport(version=step + 1, updates=step + 1, metrics={})
                    store.consumed(batch(step, groups), report, trained(groups))
                store.flush()
                store.checkpointed(4 * life + 4)
            with RunReader(folder.path) as run:
                pages = run.query("PRAGMA page_count")[0][0]
                of_payloads = run.query("SELECT coalesce(sum(length(payload)), 0) FROM payloads")[0][0]
            found.append((pages, of_payloads))
        return found

    kept, dropped = sizes(tmp_path / "kept", None), sizes(tmp_path / "dropped", Retention("drop", 4))
    assert max(of_payloads for _, of_payloads in dropped) < 2 * kept[0][1]
    growth = dropped[-1][0] - dropped[2][0], kept[-1][0] - kept[2][0]
    assert 4096 * (growth[1] - growth[0]) > 0.8 * (kept[-1][1] - kept[2][1])  # all that grows is what stays


def test_a_folder_that_takes_no_files_ends_the_run_with_a_message_and_loses_nothing(tmp_path):
    folder = create_run_folder("", directory=tmp_path / "run")
    store = SqliteStore.create(folder, config={}, retention=Retention("parquet", 2))
    for step in range(STEPS):
        tell_step(store, step)
    store.filled(group(3 * STEPS))
    store.flush()
    folder.payloads.write_text("in the way")
    store.checkpointed(STEPS)
    with pytest.raises(RunFolderError, match=r"payloads cannot be moved to .*payloads: .*Make room"):
        store.close()
    assert everything(folder) == everything(make(tmp_path / "kept", None))


@pytest.mark.parametrize("damage", ["removed", "torn", "another"])
def test_a_file_that_is_not_what_it_was_is_named(tmp_path, damage):
    folder = make(tmp_path / "run", Retention("parquet", 2))
    file = folder.moved_payloads(0)
    if damage == "removed":
        file.unlink()
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        with RunReader(folder.path) as run:
            export_run(run.folder.path, tmp_path / "out")
        file.write_bytes((tmp_path / "out" / "tables" / "groups.parquet").read_bytes())
    with RunReader(folder.path) as run, pytest.raises(RunFolderError, match=r"0\.parquet"):
        run.group(0)
    with RunReader(folder.path) as run:
        assert run.group(12).index == 12


def test_files_of_others_in_the_folder_stay(tmp_path):
    folder = make(tmp_path / "run", Retention("parquet", 2))
    for name in ("notes.txt", "mine.parquet", "7.parquet", ".7.parquet.tmp"):
        (folder.payloads / name).write_text("x")
    SqliteStore.open(folder).close()
    assert sorted(path.name for path in folder.payloads.iterdir()) == ["0.parquet", "mine.parquet", "notes.txt"]
