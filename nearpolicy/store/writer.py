"""`SqliteStore`: the one writer of a run's store.

Promises
- What one call says is committed together or not at all, and calls are committed in the order in which they were made.
- After `flush` returns, everything said before it survives ``kill -9``. (Power loss may cost what was committed in the
  last 100 ms, never the order; ``sync="full"`` excludes that too, at the price of a disk flush per commit.)
- Memory is bounded: with ``max_pending`` calls waiting the next one waits as well. That wait has a bound and a name.
- An error in the writer's thread is raised by the next call, whoever makes it. Calls before the failed one are
  committed, it and those after it are not.
- A second writer of the same folder, in this or another process, is refused. The lock dies with its process.
- A folder that is removed or replaced while it is written ends the run: what went into it since can be read by nobody.
- I2 is checked before a commit: each attempt at an admission ends once, and a rollout's fates add up to its tokens.

    call -> bounded queue -> thread: BEGIN, apply each call, COMMIT

One commit serves all calls that wait (group commit), and one statement writes up to 64 rows: SQLite gives the
interpreter lock away for every statement, and beside busy threads getting it back costs more than a row. Whoever
flushes while the thread rests commits in its place, which spares the two waking each other; while another program holds
the database, only the thread waits for it. If a call fails, its commit is rolled back, and the calls before it are
applied again one by one: a savepoint for each would cost every commit what only the last one needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nearpolicy.errors import NearpolicyError, RunFolderError, StandstillError
from nearpolicy.records import (
    ROLLBACK,
    Admission,
    Batch,
    Branch,
    Event,
    Fate,
    Group,
    Outcome,
    Rollout,
    Row,
    StepReport,
    Verdict,
    VersionRecord,
)
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.payload import (
    decode_json,
    encode_arrays,
    encode_group,
    encode_json,
    encode_rows,
    encode_text,
)
from nearpolicy.store.recycled import Recycled, Resolved
from nearpolicy.store.retention import Moved, Mover, Retention, clear_unknown_files
from nearpolicy.store.schema import (
    APPLICATION_ID,
    CONSUMED,
    MIGRATIONS,
    RECYCLED,
    SCHEMA,
    SCHEMA_VERSION,
    SEGMENTS,
    TRAINED,
    EvaluatedSample,
)
from nearpolicy.store.tokens import TokenCounts
from nearpolicy.waits import waiting

_T = TypeVar("_T")
_MAX_PER_COMMIT = 512
_FULL = 2
"""SQLite's number for ``synchronous = FULL``."""
_BUSY_S = 30.0
"""How long another program may hold the database."""
_LINGER_S = 0.02
"""How long a commit waits for company. Only calls that nobody flushes for can be lost in it."""
DURABLE_WITHIN_S = 0.08
"""What is committed is pressed onto the disk this often: with the wait for company, 100 ms after it was said."""


class SqliteStore:
    """Implements `nearpolicy.roles.RunStore`. Thread-safe; make one with `create` or `open`."""

    def __init__(
        self,
        folder: RunFolder,
        connection: sqlite3.Connection,
        lock: Any,
        *,
        max_pending: int,
        stall_s: float,
        retention: Retention | None = None,
        tokens: TokenCounts | None = None,
    ) -> None:
        self.folder = folder
        self.wall_anchor: float = decode_json(_one(connection, "SELECT value FROM run WHERE key = 'wall_anchor'"))
        """Wall time of the run's time zero, stored once; see `nearpolicy.telemetry.events.Recorder`."""
        self._db = connection
        self._lock = lock
        self._path = str(folder.store)
        self._identity = _identity(self._path)
        self._stall_s = stall_s
        self._calls: deque[_Call | _Signal] = deque()
        self._max_pending = max_pending
        self._enough = min(_MAX_PER_COMMIT, max_pending)
        """Calls that make a commit wait for no more company."""
        self._hurry = False
        """Somebody waits for the commit: it waits for no company either."""
        self._asleep = False
        """The thread looks for calls only if it is woken."""
        self._wake, self._room = _Signal(), _Signal()
        self._error: BaseException | None = None
        self._progress = time.monotonic()
        self._full_sync = connection.execute("PRAGMA synchronous").fetchone()[0] >= _FULL
        self._durable_at: float | None = None
        """When what is committed and not yet on the disk has to be there; None if all of it is."""
        self._closed = False
        self._gate, self._turn = threading.Lock(), threading.Lock()
        """Held by whoever says something, and by whoever takes calls and commits them."""
        connection.execute("PRAGMA busy_timeout = 0")  # `_begin` waits, or does not
        self._tokens = tokens or TokenCounts({}, {}, {})
        self.recycled = Recycled()
        """What attempts of this life go on from."""
        self._thread = threading.Thread(target=self._write, name=f"store {folder.name}", daemon=True)
        self._thread.start()
        self._mover = retention and Mover(
            folder, retention, _connect(folder.store, "normal"), commit=self._moved, fail=self._cannot_move
        )

    @classmethod
    def create(
        cls,
        folder: RunFolder,
        *,
        config: Mapping[str, Any],
        packages: Mapping[str, str] | None = None,
        sync: str = "normal",
        retention: Retention | None = None,
        max_pending: int = 8192,
        stall_s: float = 120.0,
    ) -> SqliteStore:
        """A new store in an existing folder that holds none."""
        lock = _take_lock(folder)
        if folder.store.exists():
            lock.close()
            raise RunFolderError(f"{folder.path} already holds a run. Choose another run.dir")
        try:
            connection = _connect(folder.store, sync)
            facts = {"config": config, "packages": packages or {}, "wall_anchor": time.time()}
            # One transaction: a reader finds either no store or a whole one.
            connection.executescript(
                f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
            )
            connection.executemany("INSERT INTO run VALUES (?, ?)", [(k, encode_json(v)) for k, v in facts.items()])
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            for file in folder.path.glob("store.*"):  # ours alone: the lock is
                with contextlib.suppress(OSError):
                    file.unlink()
            lock.close()
            raise RunFolderError(f"no store can be made in {folder.path}: {error}. Choose another run.dir") from error
        return cls(folder, connection, lock, max_pending=max_pending, stall_s=stall_s, retention=retention)

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        *,
        sync: str = "normal",
        retention: Retention | None = None,
        max_pending: int = 8192,
        stall_s: float = 120.0,
    ) -> SqliteStore:
        """The store of a run that goes on."""
        from nearpolicy.store.reader import check_store

        check_store(folder).close()
        lock = _take_lock(folder)
        try:
            connection = _connect(folder.store, sync)
            _bring_up_to_date(connection)
            clear_unknown_files(folder, connection)
            tokens = TokenCounts.of(connection)
        except sqlite3.Error as error:
            lock.close()
            raise RunFolderError(f"the store {folder.store} cannot be written: {error}") from error
        return cls(
            folder, connection, lock, max_pending=max_pending, stall_s=stall_s, retention=retention, tokens=tokens
        )

    # What a run says. Every method returns at once unless the queue is full.

    def admitted(self, admission: Admission) -> None:
        self._say(admission)

    def filled(self, group: Group) -> None:
        self._say_of([group], group)
        self._tokens.filled(group)

    def consumed(self, batch: Batch, report: StepReport, fates: Mapping[tuple[int, int], Mapping[Fate, int]]) -> None:
        """``fates`` names every rollout that the step used up, also of groups that left their place empty."""
        frozen = {key: dict(value) for key, value in fates.items()}
        self._say_of(batch.groups, lambda: self._put_step(batch, report, frozen))
        self._tokens.ended(batch.groups, frozen.values())
        self._tokens.replayed(batch.step, report.rows or batch.rows)

    def discarded(self, group: Group, fate: Fate, reason: str) -> None:
        """All tokens of the group end with ``fate``; it needs not have been filled before."""
        self._say_of([group], lambda: self._put_discard(group, fate, reason))
        self._tokens.discarded(group, fate)

    def retried(self, group: Group, fate: Fate = Fate.FAILED, reason: str | None = None) -> None:
        """An attempt that came to nothing, and that another one follows: one transaction, so that no admission is ever
        without. ``reason``: the group's failure, if left out."""
        self._say_of([group], lambda: self._put_retry(group, fate, reason))
        self._tokens.discarded(group, fate)

    def branched(self, branch: Branch, stale: Sequence[Group]) -> None:
        """Weights from some version on are others than those that were recorded. ``stale`` are groups that wait for a
        step and hold tokens of the old ones: they expire, and their admissions go on as their next attempt. Nothing
        goes on from tokens of the old ones that were recycled, and after a rollback from none. After a rollback the
        steps that led to the old weights do not count any more."""
        frozen = tuple(stale)
        withdrawn = self.recycled.withdraw(0 if branch.kind == ROLLBACK else branch.first)
        self._say(lambda: self._put_branch(branch, frozen, withdrawn))
        self._tokens.given_up(withdrawn)
        for group in frozen:
            self._tokens.discarded(group, Fate.EXPIRED)
        if branch.kind == ROLLBACK:
            self._tokens.undone(branch.first - 1)

    def lost(
        self,
        admissions: Sequence[Admission],
        reason: str,
        *,
        stopped: Sequence[Group] = (),
        recycled: Sequence[Group] = (),
    ) -> None:
        """Attempts that were running when a process ended, and of which nothing is recorded. Each goes on as its next
        attempt; one that had ended as aborted is opened again.

        ``stopped``: what is stored of some of these admissions. ``recycled``: those of them, or the rollouts of them,
        that the next attempts go on from: their tokens are in flight again."""
        frozen, again = tuple(admissions), tuple(recycled)
        wanted = {group.index for group in again}
        left = [group for group in stopped if group.index not in wanted]
        self._say(lambda: self._put_lost(frozen, reason, left, again))
        self._tokens.given_up(left)
        self._tokens.recycled(again)
        self.recycled.keep(again)

    def published(self, record: VersionRecord, wall_s: float) -> None:
        self._say(lambda: self._put_version(record, wall_s))

    def event(self, event: Event) -> None:
        self._say(event)

    def evaluated(self, samples: Sequence[EvaluatedSample]) -> None:
        """Held-out samples of one evaluation; saying the same ones again replaces them."""
        self._say(lambda: self._put_evaluation(tuple(samples)))

    def note(self, key: str, value: Any) -> None:
        """A fact about the run as a whole, as JSON; the last value counts."""
        data = encode_json(value)
        self._say(lambda: self._run("INSERT OR REPLACE INTO run VALUES (?, ?)", key, data))

    def ledger(self) -> dict[Fate, int]:
        """Tokens by fate, as `RunReader.ledger` tells them once all that was said is committed."""
        return self._tokens.told()

    def checkpointed(self, oldest: int) -> None:
        """The oldest checkpoint that is kept contains so many steps: what came before may be moved or dropped, if
        `store.retention` says so."""
        if self._mover is not None:
            self._mover.release(oldest)

    def flush(self, *, durable: bool = False) -> None:
        """Returns when everything said so far is committed; ``durable``: and survives a power cut."""
        with waiting("the run", "the store to commit"):
            if not self._commit_here():
                done, since = _Signal(), time.monotonic()
                self._say(done)
                while not done.wait(0.1):
                    self._check(since)
        self._check()
        if durable:
            try:
                self._press()
            except OSError as error:
                self._error = self._error or error
                self._check()

    def close(self) -> None:
        """Commit what was said, move what was released, let go of the folder. A second call does nothing."""
        if self._mover is not None:
            self._mover, mover = None, self._mover
            mover.close()
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._wake.set()
        since = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._error is None:
                self._check(since)
        self._db.close()
        self._lock.close()
        self._check()

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # The queue.

    def _say_of(self, groups: Iterable[Group], call: _Call) -> None:
        """A call that stores these groups, unless they are stored already; what they go on from moves with it."""
        found = [resolved for resolved in map(self.recycled.resolve, groups) if resolved is not None]
        self._say((lambda: (self._put_resolved(found), self._apply([call]))) if found else call)
        self._tokens.resolved(found)

    def _say(self, call: _Call | _Signal) -> None:
        with self._gate:  # no call slips in behind the one that closes
            self._require_open()
            if self._error is not None or len(self._calls) >= self._max_pending:
                self._wait_for_room()
            self._calls.append(call)
            if type(call) is _Signal:
                self._hurry = True
                self._wake.set()
            elif self._asleep or len(self._calls) == self._enough:
                self._wake.set()

    def _require_open(self) -> None:
        if self._closed:
            raise NearpolicyError(f"the store of {self.folder.path} is closed; nothing more can be recorded")

    def _wait_for_room(self) -> None:
        since = time.monotonic()
        self._check(since)
        while len(self._calls) >= self._max_pending:
            self._room.wait(0.1)
            self._check(since)

    def _check(self, since: float | None = None) -> None:
        """Raise the writer's error, or say that it hangs: nothing committed for too long after ``since``."""
        if self._error is not None:
            raise self._described() from self._error
        if since is not None and time.monotonic() - max(since, self._progress) > self._stall_s:
            raise StandstillError(
                f"the store of {self.folder.path} committed nothing for {self._stall_s:.0f} s with "
                f"{len(self._calls)} calls waiting: its disk hangs, or another program holds the database"
            )

    def _described(self) -> NearpolicyError:
        error = self._error
        if isinstance(error, sqlite3.OperationalError):
            return RunFolderError(f"the store {self.folder.store} cannot be written: {error}")
        if isinstance(error, RunFolderError):
            return RunFolderError(str(error))
        if isinstance(error, OSError):
            return RunFolderError(f"the store {self.folder.store} cannot be pressed onto the disk: {error}")
        if isinstance(error, NearpolicyError):
            return NearpolicyError(str(error))
        return NearpolicyError(f"the store's writer stopped: {type(error).__name__}: {error}")

    # Retention.

    def _moved(self, rows: Sequence[Moved]) -> None:
        self._say(lambda: self._put_moved(rows))
        self.flush()

    def _cannot_move(self, error: NearpolicyError) -> None:
        def fail() -> None:
            raise error

        with contextlib.suppress(NearpolicyError):  # it is closed, or has another error already
            self._say(fail)

    # The thread.

    def _write(self) -> None:
        """Takes calls until it is closed and none is left; waits for the next call; wakes those who wait in `flush` and
        in a full queue."""
        going = True
        while going:
            self._wait_for_calls()
            with self._turn:
                self._commit_waiting(patient=True)
                # The flag first: once it is set nobody says anything more, so that no call is missed.
                going = not self._closed or bool(self._calls)
            try:
                self._make_durable(now=not going)
            except OSError as error:
                self._error = self._error or error

    def _commit_here(self) -> bool:
        """All that waits is committed by this thread, unless the writer's is at it or the database is not to be had."""
        with self._gate:
            self._require_open()
        if not self._turn.acquire(blocking=False):
            return False
        try:
            was_durable = self._durable_at is None
            while self._calls:
                if not self._commit_waiting(patient=False):
                    return False
            if was_durable and self._durable_at is not None:
                self._wake.set()  # the thread sees to that
        except BaseException as error:  # Ctrl-C: calls may be taken and not applied, so that no later one may be
            self._error = self._error or error
            raise
        finally:
            self._turn.release()
        return True

    def _commit_waiting(self, *, patient: bool) -> bool:
        """The next commit, by whoever has the turn; False, and nothing done, if another program holds the database."""
        self._hurry = False  # before the calls are taken: whoever says so later wakes the thread again
        calls = [self._calls.popleft() for _ in range(min(len(self._calls), _MAX_PER_COMMIT))]
        if self._calls:
            self._hurry = True
        self._room.set()
        if not self._commit([call for call in calls if type(call) is not _Signal], patient):
            self._calls.extendleft(reversed(calls))
            return False
        for call in calls:
            if type(call) is _Signal:
                call.set()
        return True

    def _make_durable(self, *, now: bool) -> None:
        if self._durable_at is None or not (now or time.monotonic() >= self._durable_at):
            return
        self._durable_at = None  # before: what is committed meanwhile has to be pressed again
        self._press()

    def _press(self) -> None:
        """What is committed onto the disk; `OSError` if it refuses."""
        try:
            log = os.open(f"{self.folder.store}-wal", os.O_RDONLY)
        except FileNotFoundError:
            return  # the folder is gone: the next commit says so
        try:
            os.fsync(log)
        finally:
            os.close(log)

    def _wait_for_calls(self) -> None:
        """Until somebody waits for the commit, or the calls that are there have had time for company; or what is
        committed has to be durable."""
        while True:
            until = time.monotonic() + _LINGER_S
            while not (self._hurry or self._closed or len(self._calls) >= self._enough):
                if not self._wake.wait(self._time_left(until)):
                    break
            if self._calls or self._closed:
                return
            # Only now do callers have to wake this thread; while calls keep coming it looks for itself.
            self._asleep = True
            if not (self._calls or self._closed):
                self._wake.wait(self._time_left(None))
            self._asleep = False
            if not self._calls:
                return

    def _time_left(self, until: float | None) -> float | None:
        """Until then, or until what is committed has to be durable."""
        ends = [moment for moment in (until, self._durable_at) if moment is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _commit(self, calls: Sequence[_Call], patient: bool = True) -> bool:
        """False if it has to wait for another program and is not ``patient``."""
        if self._error is not None or not calls:
            return True  # later calls must not be stored without the one that failed
        try:
            if _identity(self._path) != self._identity:
                raise RunFolderError(
                    f"{self.folder.path} was removed or replaced while the run wrote it; what it has recorded is lost. "
                    "Start the run again, and leave its folder alone"
                )
            if not self._begin(patient):
                return False
            self._apply(calls)
            self._db.execute("COMMIT")
            self._progress = time.monotonic()
            if self._durable_at is None and not self._full_sync:
                self._durable_at = self._progress + DURABLE_WITHIN_S
        except BaseException as error:  # surfaces on the next call: the writer's thread has nobody to raise to
            self._error = error
            with contextlib.suppress(sqlite3.Error):
                self._keep(calls)
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise  # Ctrl-C in a caller that commits
        return True

    def _begin(self, patient: bool) -> bool:
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the rest says in which way
                if not is_busy or (patient and time.monotonic() > until):
                    raise
                if not patient:
                    return False
                time.sleep(0.01)  # SQLite's own wait is for a connection, and a caller must not wait with this one

    def _keep(self, calls: Sequence[_Call]) -> None:
        """Of a commit that failed, the calls before the one at fault. A full disk may have no room for these either."""
        if not self._db.in_transaction:
            return  # it never began, or all of it is committed
        try:
            self._db.execute("ROLLBACK")
            before = self._try(calls)
            if before < len(calls):
                self._db.execute("ROLLBACK")
                self._try(calls[:before])
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _try(self, calls: Sequence[_Call]) -> int:
        """Apply one by one, up to the first that fails; how many did not. The transaction stays open."""
        self._begin(patient=True)
        for place, call in enumerate(calls):
            try:
                self._apply([call])
            except Exception:
                return place
        return len(calls)

    def _apply(self, calls: Sequence[_Call]) -> None:
        """What comes one after another of admissions and of groups is written together, admissions first: they do not
        depend on groups. Nothing in a commit depends on its events."""
        admissions: list[Admission] = []
        groups: list[Group] = []
        events: list[Event] = []
        alike: Mapping[type, list[Any]] = {Admission: admissions, Group: groups, Event: events}

        def write() -> None:
            self._put_admissions(admissions)
            self._put_groups(groups)
            admissions.clear()
            groups.clear()

        for call in calls:
            if (others := alike.get(type(call))) is not None:
                others.append(call)
            else:
                write()
                call()
        write()
        self._put_events(events)

    # What each call writes.

    def _run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        # Counters often come out of numpy, whose scalars sqlite3 refuses.
        return self._db.execute(sql, [v.item() if isinstance(v, np.generic) else v for v in values])

    def _insert(self, into: str, rows: Sequence[tuple[Any, ...]], otherwise: str = "") -> None:
        """In order, many rows by one statement. ``into``: table, with its columns unless all are given."""
        for part in _parts(rows):
            values = itertools.chain.from_iterable(part)
            self._run(_insertion(into, len(part[0]), len(part), otherwise), *values)

    def _found(self, select: str, admissions: Sequence[int]) -> list[tuple[Any, ...]]:
        """What ``select`` finds of these admissions, of all their attempts."""
        found: list[tuple[Any, ...]] = []
        for part in _parts(admissions):
            found += self._run(f"{select} WHERE admission IN ({', '.join('?' * len(part))})", *part)
        return found

    def _put_admissions(self, admissions: Sequence[Admission]) -> None:
        rows = []
        for admission in admissions:
            prompt = admission.prompt
            described = {"id": prompt.id, "text": prompt.text, "messages": prompt.messages, "columns": prompt.columns}
            numbers = (admission.index, admission.attempt, admission.seed, admission.version)
            rows.append((*numbers, encode_text(prompt.task), encode_json(described), admission.prompt_index))
        later = "ON CONFLICT (admission) DO UPDATE SET attempt = max(attempt, excluded.attempt)"
        self._insert("admissions", rows, later)

    def _put_groups(self, groups: Sequence[Group]) -> None:
        """Idempotent, so that whoever ends a group can be sure that it is there."""
        by_key = {_key(group): group for group in reversed(groups)}  # the first of a key stays
        indices = sorted({index for index, _ in by_key})
        there = set(self._found("SELECT admission, attempt FROM groups", indices))
        new = {key: by_key[key] for key in reversed(by_key) if key not in there}
        if not new:
            return
        attempts = dict(self._found("SELECT admission, attempt FROM admissions", indices))
        self._put_admissions([g.admission for (index, attempt), g in new.items() if attempts.get(index, -1) < attempt])
        rows: dict[str, list[tuple[Any, ...]]] = {"groups": [], "rollouts": [], "verdicts": [], "payloads": []}
        for key, group in new.items():
            failure = None if group.failure is None else encode_text(group.failure)
            rows["groups"].append((*key, group.admission.version, group.oldest_version, failure))
            # A failed group may hold rollouts that nobody has judged.
            judged = list(group.verdicts or ({},) * len(group.rollouts))
            rewards = list(group.rewards or (None,) * len(group.rollouts))
            if group.baseline is not None:
                judged, rewards = [*judged, group.baseline.verdicts], [*rewards, group.baseline.reward]
            for rollout, of_it, reward in zip(group.everything, judged, rewards, strict=True):
                rows["rollouts"].append(_rollout_row(key, rollout, reward))
                sample = (*key, int(rollout.sample))
                rows["verdicts"] += [_verdict_row(sample, *told) for told in enumerate(of_it.items())]
            rows["payloads"].append((*key, SEGMENTS, encode_group(group.everything)))
        for table, of_table in rows.items():
            self._insert(table, of_table)

    def _put_step(self, batch: Batch, report: StepReport, fates: Mapping[tuple[int, int], Mapping[Fate, int]]) -> None:
        self._run("INSERT INTO steps VALUES (?, ?, ?, ?)", batch.step, batch.places, report.version, report.updates)
        self._put_groups(batch.groups)
        attempts = {group.index: group.admission.attempt for group in batch.groups}
        placed: list[tuple[int | None, int, int]] = [(place, *_key(group)) for place, group in enumerate(batch.groups)]
        if further := sorted({index for index, _ in fates} - attempts.keys()):
            newest = dict(sorted(self._found("SELECT admission, attempt FROM groups", further)))
            for index in further:
                if index not in newest:
                    raise NearpolicyError(f"step {batch.step} used up group {index}, which was never filled")
            attempts |= newest
            placed += [(None, index, newest[index]) for index in further]
        self._end_all([(index, attempt) for _, index, attempt in placed], CONSUMED, f"step {batch.step}")
        consumption = [(batch.step, *where) for where in placed]
        self._insert("consumption (step, place, admission, attempt)", consumption)
        by_group: dict[tuple[int, int], dict[int, Mapping[Fate, int]]] = {key: {} for key in attempts.items()}
        for (index, sample), of_sample in fates.items():
            by_group[index, attempts[index]][sample] = of_sample
        self._put_fates(by_group)
        rows = report.rows or batch.rows
        self._put_rows(batch.groups, [row for row in rows if not row.replayed])
        self._put_replayed(batch, [row for row in rows if row.replayed])

    def _put_rows(self, batch_groups: Sequence[Group], rows: Sequence[Row]) -> None:
        groups = {group.index: group for group in batch_groups}
        by_group: dict[int, list[tuple[int, Row]]] = {}
        for row in rows:
            by_group.setdefault(row.group, []).append((_segment_index(groups[row.group], row), row))
        payloads = [(*_key(groups[index]), TRAINED, encode_rows(placed)) for index, placed in by_group.items()]
        self._insert("payloads", payloads)

    def _put_replayed(self, batch: Batch, rows: Sequence[Row]) -> None:
        groups = {group.index: group for group in batch.replayed}
        for ordinal, row in enumerate(rows):
            group = groups[row.group]
            self._run(
                "INSERT INTO replayed VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                *(batch.step, ordinal, row.group, group.admission.attempt, row.sample, _segment_index(group, row)),
                *(int(row.trained.sum()), encode_arrays({"trained": row.trained, "advantages": row.advantages})),
            )

    def _put_discard(self, group: Group, fate: Fate, reason: str) -> None:
        self._put_groups([group])
        self._end_all([_key(group)], fate.value, reason)
        self._put_fates({_key(group): {rollout.sample: {fate: rollout.num_sampled} for rollout in group.everything}})

    def _put_retry(self, group: Group, fate: Fate, reason: str | None) -> None:
        self._put_discard(group, fate, group.failure or "" if reason is None else reason)
        self._put_admissions([replace(group.admission, attempt=group.admission.attempt + 1)])

    def _put_branch(self, branch: Branch, stale: Sequence[Group], withdrawn: Sequence[Group]) -> None:
        self._run(
            "INSERT INTO branches VALUES (?, ?, ?, ?, ?)",
            *(branch.lineage, branch.parent, branch.first, branch.kind, encode_text(branch.reason)),
        )
        for group in stale:
            self._put_retry(group, Fate.EXPIRED, f"{branch.kind}: {branch.reason}")
        self._put_given_up(withdrawn)
        if branch.kind == ROLLBACK:
            self._undo_steps(branch)

    def _undo_steps(self, branch: Branch) -> None:
        first, reason = branch.first - 1, f"{branch.kind}: {branch.reason}"
        columns = "step, place, admission, attempt"
        self._run(
            f"INSERT INTO undone (lineage, {columns}) SELECT ?, {columns} FROM consumption WHERE step >= ?",
            *(branch.lineage, first),
        )
        self._run(
            "UPDATE endings SET reason = ? WHERE (admission, attempt) IN "
            "(SELECT admission, attempt FROM consumption WHERE step >= ?)",
            *(encode_text(reason), first),
        )
        self._run("DELETE FROM consumption WHERE step >= ?", first)
        self._run("DELETE FROM replayed WHERE step >= ?", first)
        self._run("DELETE FROM steps WHERE step >= ?", first)

    def _put_lost(
        self, admissions: Iterable[Admission], reason: str, left: Iterable[Group], recycled: Iterable[Group]
    ) -> None:
        for admission in admissions:
            query = "SELECT 1 FROM endings WHERE admission = ? AND attempt = ?"
            if not _one(self._db, query, admission.index, admission.attempt):
                self._end_all([(admission.index, admission.attempt)], Fate.LOST.value, reason)
            self._put_admissions([replace(admission, attempt=admission.attempt + 1)])
        self._put_given_up(left)
        for group in recycled:
            key = (group.index, group.admission.attempt)
            self._run("UPDATE endings SET ending = ? WHERE admission = ? AND attempt = ?", RECYCLED, *key)
            for rollout in group.rollouts:
                query = "DELETE FROM fates WHERE admission = ? AND attempt = ? AND sample = ?"
                self._run(query, *key, rollout.sample)

    def _put_given_up(self, groups: Iterable[Group]) -> None:
        """Aborted, those too that had been recycled."""
        for group in groups:
            key = (group.index, group.admission.attempt)
            query = "UPDATE endings SET ending = ? WHERE admission = ? AND attempt = ? AND ending = ?"
            self._run(query, Fate.ABORTED.value, *key, RECYCLED)
            self._put_left(key)

    def _put_resolved(self, found: Iterable[Resolved]) -> None:
        """What the attempts that are stored now hold is there alone; the rest is aborted."""
        for each in found:
            key = (each.index, each.attempt)
            for sample in each.moved:
                for table in ("fates", "verdicts", "rollouts"):
                    self._run(f"DELETE FROM {table} WHERE admission = ? AND attempt = ? AND sample = ?", *key, sample)
            self._put_left(key)

    def _put_left(self, key: tuple[int, int]) -> None:
        """Rollouts of an attempt without a fate are aborted."""
        self._run(
            "INSERT INTO fates SELECT admission, attempt, sample, ?, sampled FROM rollouts WHERE admission = ? AND "
            "attempt = ? AND sampled > 0 AND sample NOT IN "
            "(SELECT sample FROM fates WHERE admission = ? AND attempt = ?)",
            *(Fate.ABORTED.value, *key, *key),
        )

    def _end_all(self, keys: Sequence[tuple[int, int]], ending: str, reason: str) -> None:
        told = self._found("SELECT admission, attempt, ending FROM endings", [index for index, _ in keys])
        before = {(index, attempt): ended for index, attempt, ended in told}
        for index, attempt in keys:
            if (index, attempt) in before:
                found = before[index, attempt]
                raise NearpolicyError(f"admission {index} (attempt {attempt}) ended as {found} and again as {ending}")
            before[index, attempt] = ending
        self._insert("endings", [(*key, ending, encode_text(reason)) for key in keys])

    def _put_fates(self, by_group: Mapping[tuple[int, int], Mapping[int, Mapping[Fate, int]]]) -> None:
        """Every rollout of each group at once, and I2 checked: what the fates say is what was sampled."""
        sampled: dict[tuple[int, int], dict[int, int]] = {}
        query = "SELECT admission, attempt, sample, sampled FROM rollouts"
        for index, attempt, sample, tokens in self._found(query, [index for index, _ in by_group]):
            sampled.setdefault((index, attempt), {})[sample] = tokens
        rows = []
        for (index, attempt), fates in by_group.items():
            _require_sum(index, sampled.get((index, attempt), {}), fates)
            rows += [
                (int(index), int(attempt), int(sample), fate.value, int(tokens))
                for sample, of_sample in fates.items()
                for fate, tokens in of_sample.items()
                if tokens
            ]
        self._insert("fates", rows)

    def _put_version(self, record: VersionRecord, wall_s: float) -> None:
        query = "SELECT fingerprint FROM versions WHERE lineage = ? AND version = ?"
        known = _one(self._db, query, record.lineage, record.version)
        if known is not None and known != record.fingerprint:
            raise NearpolicyError(
                f"version {record.version} of lineage {record.lineage} has fingerprint {known}; the same name cannot "
                f"be given to weights with fingerprint {record.fingerprint}: open a new lineage"
            )
        self._run(
            "INSERT OR IGNORE INTO versions (lineage, version, updates, fingerprint, parent, wall_s, digests) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(record.lineage, record.version, record.updates, record.fingerprint, record.parent, float(wall_s)),
            encode_json(record.digests) if record.digests else None,
        )

    def _put_events(self, events: Sequence[Event]) -> None:
        rows = [
            (
                *(event.time, event.role, event.kind, event.instance, event.admission, event.sample, event.segment),
                *(event.version, event.seconds, encode_json(event.numbers)),
            )
            for event in events
        ]
        self._insert(_EVENTS, rows)

    def _put_moved(self, rows: Sequence[Moved]) -> None:
        told = [(row.admission, row.attempt, row.what, row.file, row.part) for row in rows]
        self._db.executemany("INSERT INTO moved VALUES (?, ?, ?, ?, ?)", told)
        query = "DELETE FROM payloads WHERE admission = ? AND attempt = ? AND what = ?"
        self._db.executemany(query, [row[:3] for row in told])

    def _put_evaluation(self, samples: Iterable[EvaluatedSample]) -> None:
        for s in samples:
            self._run(
                "INSERT OR REPLACE INTO evaluations (lineage, version, task, mode, temperature, row, sample, prompt, "
                "text, correct, value, tokens, finish) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(s.lineage, s.version, encode_text(s.task), s.mode, float(s.temperature), s.row, s.sample),
                *(encode_text(s.prompt), encode_text(s.text)),
                *(None if s.correct is None else int(s.correct), s.value, s.num_tokens, s.finish),
            )


class _Signal:
    """An event of one thread that waits, lighter than `threading.Event`; set twice before the wait, it counts once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Whether it was set; it is not any more."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)


_Call = Admission | Group | Event | Callable[[], Any]
"""Something to write: as it is, if there are many of its kind."""
_EVENTS = "events (time, role, kind, instance, admission, sample, segment, version, seconds, numbers)"
_TOGETHER = (64, 16, 4, 1)
"""Rows in one statement: few lengths, so that SQLite has all of them prepared."""


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    begin = 0
    while begin < len(items):
        count = next(size for size in _TOGETHER if size <= len(items) - begin)
        yield items[begin : begin + count]
        begin += count


@functools.lru_cache(maxsize=256)
def _insertion(into: str, columns: int, rows: int, otherwise: str) -> str:
    marks = f"({', '.join('?' * columns)})"
    return f"INSERT INTO {into} VALUES {', '.join([marks] * rows)} {otherwise}"


def _key(group: Group) -> tuple[int, int]:
    return int(group.index), int(group.admission.attempt)


def _require_sum(index: int, sampled: Mapping[int, int], fates: Mapping[int, Mapping[Fate, int]]) -> None:
    told = {sample: sum(of_sample.values()) for sample, of_sample in fates.items()}
    wrong = {s for s in sampled.keys() | told.keys() if sampled.get(s, 0) != told.get(s, 0)}
    if wrong:
        lines = [f"sample {s}: {sampled.get(s, 0)} sampled, {told.get(s, 0)} told" for s in sorted(wrong)]
        raise NearpolicyError(f"the fates of group {index} do not add up ({'; '.join(lines)})")
    if any(Fate.IN_FLIGHT in of_sample for of_sample in fates.values()):
        raise NearpolicyError(f"group {index} ended with tokens in flight; that is not an ending")


def _rollout_row(key: tuple[int, int], rollout: Rollout, reward: float | None) -> tuple[Any, ...]:
    admission, attempt = key
    told = None if reward is None else float(reward)
    sampled, text = rollout.num_sampled, encode_text(rollout.text)
    return admission, attempt, int(rollout.sample), int(rollout.lineage), rollout.numerics, sampled, told, text, b""


def _verdict_row(key: tuple[int, int, int], position: int, told: tuple[str, Verdict]) -> tuple[Any, ...]:
    source, verdict = told
    value = None if verdict.value is None else float(verdict.value)
    parts = encode_json(verdict.parts) if verdict.parts else _NO_PARTS
    arrays = encode_arrays(verdict.arrays) if verdict.arrays else None
    outcome, reason = _OUTCOMES[verdict.outcome], encode_text(verdict.reason)
    return (*key, position, encode_text(source), outcome, value, parts, reason, float(verdict.seconds), arrays)


_NO_PARTS = encode_json({})
_OUTCOMES = {outcome: outcome.value for outcome in Outcome}


def _identity(file: str) -> tuple[int, int] | None:
    """Which file stands at a path; None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _segment_index(group: Group, row: Row) -> int:
    rollout = next(r for r in group.rollouts if r.sample == row.sample)
    for place, segment in enumerate(rollout.segments):
        if segment is row.segment:
            return place
    raise NearpolicyError(f"a row of group {row.group}, sample {row.sample} trains a segment that is not the group's")


def _connect(path: Path, sync: str) -> sqlite3.Connection:
    if sync not in ("normal", "full"):
        raise ValueError(f"store.sync is {sync!r}; use normal or full")
    # Transactions are begun and ended by hand; the thread that uses the connection is not the one that makes it.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {sync.upper()}")
    return connection


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """From the schema that the file has to the one that is written here, all or nothing."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    steps = " ".join(MIGRATIONS[schema] for schema in range(found, SCHEMA_VERSION))
    if found < SCHEMA_VERSION:
        connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def _take_lock(folder: RunFolder) -> Any:
    """An advisory lock that the kernel drops with the process, however it ends."""
    try:
        lock = folder.lock.open("ab")
    except OSError as error:
        raise RunFolderError(f"{folder.path} cannot be written: {error}. Choose another run.dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise RunFolderError(f"{folder.path} is being written by another run; wait for it, or stop it") from error
    return lock


def _one(connection: sqlite3.Connection, sql: str, *values: Any) -> Any:
    row = connection.execute(sql, values).fetchone()
    return None if row is None else row[0]
