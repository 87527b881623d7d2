"""The run's record in an actor: what it promises in one process, and what else may happen to it there."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from record_contract import REPORT, RecordContract, assert_same_group, read
from synthetic_run import CONFIG, admission, batch, group, trained

from nearpolicy.distant import Distant
from nearpolicy.errors import NearpolicyError, RecordLost, RunFolderError, StandstillError
from nearpolicy.launch.ray.parcels import Keeper, as_sent, awaited, losses_told, received, sent
from nearpolicy.launch.ray.record import ActorRecord, start_record_actor
from nearpolicy.records import Event, Fate
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.retention import Retention
from nearpolicy.store.wire import pack_calls
from nearpolicy.store.writer import SqliteStore


class Records:
    """Each with an actor of its own; those that have closed theirs are used again."""

    _idle: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.actors: dict[RunFolder, Any] = {}

    def create(self, folder: RunFolder, **options: Any) -> ActorRecord:
        return ActorRecord.create(self._actor(folder), folder, **self._of_actor(folder), **options)

    def open(self, folder: RunFolder, **options: Any) -> ActorRecord:
        return ActorRecord.open(self._actor(folder), folder, **self._of_actor(folder), **options)

    def _actor(self, folder: RunFolder) -> Any:
        self.actors[folder] = self._alive() or start_record_actor()
        return self.actors[folder]

    def _alive(self) -> Any:
        import ray

        while self._idle:
            actor = self._idle.pop()
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.rest.remote(), timeout=20)
                return actor
        return None

    def _of_actor(self, folder: RunFolder) -> dict[str, Any]:
        return {"end": partial(self._idle.append, self.actors[folder]), "limit_s": 60.0}


@pytest.fixture
def records(ray_here) -> Records:
    return Records()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run_folder("run", parent=tmp_path)


class TestRecordInAnActor(RecordContract):
    pass


def tell(store: ActorRecord, count: int) -> None:
    for number in range(count):
        store.event(Event(time=number, role="queue", kind="admit"))


def inside(actor: Any, function: Any) -> Any:
    """What a function of the host gives there."""
    import ray

    return ray.get(actor.__ray_call__.remote(function))


def kill(actor: Any) -> None:
    """Until it is known here."""
    import ray

    ray.kill(actor, no_restart=True)
    with pytest.raises(ray.exceptions.RayError):
        while True:
            ray.get(actor.__ray_ready__.remote())


def test_both_forms_leave_the_same_rows(records, tmp_path):
    """What travels is what is written where nothing travels, to the byte."""
    found = []
    for place, made in (("here", SqliteStore), ("there", records)):
        folder = create_run_folder("", directory=tmp_path / place)
        with made.create(folder, config={}) as store:
            for step in range(3):
                groups = [group(2 * step + i, size=3) for i in range(2)]
                for each in groups:
                    store.admitted(each.admission)
                    store.event(Event(time=1.5, role="queue", kind="ready", admission=each.index, numbers={"a": [1]}))
                store.filled(groups[0])  # the other one is stored with its step
                store.consumed(batch(step, groups), REPORT, trained(groups))
            store.retried(group(10), Fate.ABORTED, "cut off")
        with read(folder) as run:
            tables = [name for (name,) in run.query("SELECT name FROM sqlite_master WHERE type = 'table'")]
            found.append({t: run.query(f"SELECT * FROM {t}") for t in tables if t != "run"})
    assert found[0] == found[1]


def test_what_many_threads_say_is_there_once_and_in_the_order_of_each(records, folder):
    def say(thread: int) -> None:
        for number in range(500):
            store.event(Event(time=number, role="queue", kind="admit", instance=thread))

    with records.create(folder, config={}) as store:
        threads = [threading.Thread(target=say, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with read(folder) as run:
        events = list(run.events())
    for thread in range(4):
        assert [event.time for event in events if event.instance == thread] == list(range(500))


def test_a_death_is_told_by_the_next_calls_and_by_a_flush_and_what_was_committed_is_there(records, folder):
    store = records.create(folder, config=CONFIG)
    store.filled(group(0))
    store.flush()
    kill(records.actors[folder])
    with pytest.raises(RecordLost, match=r"has died .*train --resume .*run"):
        store.flush()
    with pytest.raises(RecordLost):
        store.admitted(admission(1))
    with pytest.raises(RecordLost):
        store.close()
    with records.open(folder) as again:  # the lock died with it
        again.filled(group(1))
    assert [each.index for each in read(folder).groups()] == [0, 1]


def test_a_death_nobody_flushes_for_is_told_all_the_same(records, folder):
    store = records.create(folder, config=CONFIG)
    kill(records.actors[folder])
    with pytest.raises(RecordLost):
        while True:
            tell(store, 1)
    with pytest.raises(RecordLost):
        store.close()


def test_a_full_disk_is_an_error_of_the_folder_and_lets_go_of_it(records, folder):
    def fill(host) -> None:
        connection = host._writer.database.connection
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")

    store = records.create(folder, config=CONFIG)
    inside(records.actors[folder], fill)
    with pytest.raises(RunFolderError, match=r"store\.sqlite cannot be written: database or disk is full"):
        for index in range(1000):
            store.filled(group(index))
            store.flush()
    with pytest.raises(RunFolderError, match="disk is full"):
        store.close()
    records.open(folder).close()


def test_what_cannot_travel_is_an_error_and_what_was_said_before_is_kept(records, folder):
    store = records.create(folder, config=CONFIG)
    store.filled(group(0))
    store.event(Event(time=0, role="queue", kind="admit", numbers={"lock": threading.Lock()}))
    store.filled(group(1))
    with pytest.raises(NearpolicyError, match=r"writer stopped: TypeError: cannot pickle"):
        store.flush()
    with pytest.raises(NearpolicyError, match="cannot pickle"):
        store.close()
    assert [each.index for each in read(folder).groups()] == [0]


def test_a_database_that_another_program_holds_pushes_back_and_is_named_within_the_bound(records, folder):
    store = records.create(folder, config=CONFIG, max_pending=4, stall_s=0.3)
    blocker = sqlite3.connect(folder.store, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    said = []
    with pytest.raises(StandstillError, match="committed nothing for"):
        while True:
            tell(store, 1)
            said.append(1)
    assert len(said) <= 4 + 4  # those that wait here, and those of the message that is there
    blocker.execute("ROLLBACK")
    with pytest.raises(StandstillError):
        store.close()


def test_a_folder_of_another_writer_is_refused_with_its_text(records, folder):
    with SqliteStore.create(folder, config=CONFIG):
        with pytest.raises(RunFolderError, match="is being written by another run"):
            records.open(folder, lock_within_s=0.1)
        with pytest.raises(RunFolderError, match="is being written by another run"):
            records.create(folder, config=CONFIG)
    with pytest.raises(RunFolderError, match="already holds a run"):
        records.create(folder, config=CONFIG)
    with pytest.raises(RunFolderError, match="cannot be written"):
        records.create(RunFolder(folder.path / "nowhere"), config=CONFIG)


def test_parcels_are_kept_while_the_actor_commits_nothing(records, folder):
    """They do not wait for a commit that waits for another program."""
    import ray

    with records.create(folder, config=CONFIG):
        actor = records.actors[folder]
        blocker = sqlite3.connect(folder.store, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        committing = actor.commit.remote(as_sent(pack_calls([Event(time=0, role="queue", kind="admit")])))
        assert bytes(Keeper(actor).keep_now(b"tokens").read()) == b"tokens"
        assert ray.wait([committing], timeout=0)[0] == []
        blocker.execute("ROLLBACK")
        assert ray.get(committing).error is None


def test_whoever_meets_the_loss_of_tokens_first_names_the_record(records, folder):
    """The controller that looks at them, a rank or verifier that gets them, and who hears of it from another actor."""
    records.create(folder, config=CONFIG)
    actor, another = records.actors[folder], start_record_actor()
    parcel = Keeper(actor).keep_now(b"tokens" * 100_000)
    rows = sent([Distant(parcel, 0, (4,), np.dtype(np.uint8))])
    kill(actor)
    with pytest.raises(RecordLost, match="record's actor, which keeps them, has died"):
        while True:  # what is on this node is there until the node, too, has heard of it
            parcel.read()
    with pytest.raises(RecordLost):
        received(rows)
    with pytest.raises(RecordLost):
        asyncio.run(awaited(rows))
    with pytest.raises(RecordLost, match="has died"), losses_told():
        inside(another, lambda host: received(rows))
    with pytest.raises(ZeroDivisionError), losses_told():
        inside(another, lambda host: 1 / 0)
    kill(another)


def test_a_record_that_cannot_keep_tokens_says_so(records, folder):
    """An object store, and then a disk, that are full, say."""

    def fill(host) -> None:
        import ray

        def full(value: Any) -> None:
            raise ray.exceptions.ObjectStoreFullError("no room")

        ray.put = full

    with records.create(folder, config=CONFIG):
        actor = records.actors[folder]
        inside(actor, fill)
        with pytest.raises(RecordLost, match=r"which keeps them, cannot keep more .*no room"):
            Keeper(actor).keep_now(b"tokens")
    kill(records._idle.pop())


def test_payloads_that_were_released_are_moved_when_it_is_closed(records, folder):
    with records.create(folder, config={}, retention=Retention("parquet", 2)) as store:
        for step in range(4):
            groups = [group(step)]
            store.consumed(batch(step, groups), REPORT, trained(groups))
        store.flush(durable=True)
        store.checkpointed(4)
    assert folder.moved_payloads(0).exists()
    with read(folder) as run:
        assert run.query("SELECT count(DISTINCT admission) FROM payloads")[0][0] == 2
        assert_same_group(run.group(0), group(0))


def test_the_modules_of_the_record_load_no_torch():
    code = "import sys, nearpolicy.launch.ray.record; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
