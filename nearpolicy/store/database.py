"""The one connection that writes a run's database: its lock, its transactions, and the disk.

If a call fails, its commit is rolled back, and the calls before it are applied again one by one: a savepoint for each
would cost every commit what only the last one needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nearpolicy.errors import RunFolderError
from nearpolicy.store.calls import Said
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.payload import decode_json, encode_json
from nearpolicy.store.retention import clear_unknown_files
from nearpolicy.store.schema import APPLICATION_ID, MIGRATIONS, SCHEMA, SCHEMA_VERSION
from nearpolicy.store.statements import Statements, one
from nearpolicy.store.tokens import TokenCounts

_FULL = 2
"""SQLite's number for ``synchronous = FULL``."""
_BUSY_S = 30.0
"""How long another program may hold the database."""
DURABLE_WITHIN_S = 0.08
"""What is committed is pressed onto the disk this often: with the wait for company, 100 ms after it was said."""


class Database:
    """Implements `nearpolicy.store.commits.Sink`."""

    def __init__(self, folder: RunFolder, connection: sqlite3.Connection, lock: Any, tokens: TokenCounts) -> None:
        self.connection = connection
        self.tokens = tokens
        """What it held when it was opened."""
        self.wall_anchor: float = decode_json(one(connection, "SELECT value FROM run WHERE key = 'wall_anchor'"))
        self.due: float | None = None
        """When what is committed and not yet on the disk has to be there; None if all of it is."""
        self._folder = folder
        self._lock = lock
        self._path = str(folder.store)
        self._identity = _identity(self._path)
        self._statements = Statements(connection)
        self._full_sync = connection.execute("PRAGMA synchronous").fetchone()[0] >= _FULL
        connection.execute("PRAGMA busy_timeout = 0")  # `_begin` waits, or does not

    @classmethod
    def create(
        cls, folder: RunFolder, *, config: Mapping[str, Any], packages: Mapping[str, str] | None, sync: str
    ) -> Self:
        """A new one in an existing folder that holds none."""
        lock = _take_lock(folder)
        if folder.store.exists():
            lock.close()
            raise RunFolderError(f"{folder.path} already holds a run. Choose another run.dir")
        try:
            facts = {"config": config, "packages": packages or {}, "wall_anchor": time.time()}
            _make(folder.store, facts)
            connection = connect(folder.store, sync)
        except (sqlite3.Error, OSError) as error:
            for file in folder.path.glob("store.*"):  # ours alone: the lock is
                with contextlib.suppress(OSError):
                    file.unlink()
            lock.close()
            raise RunFolderError(f"no store can be made in {folder.path}: {error}. Choose another run.dir") from error
        return cls(folder, connection, lock, TokenCounts({}, {}, {}))

    @classmethod
    def open(cls, folder: RunFolder, *, sync: str, lock_within_s: float = 0.0) -> Self:
        """That of a run that goes on. ``lock_within_s``: how long a process that had it may take to end."""
        from nearpolicy.store.reader import check_store

        check_store(folder).close()
        lock = _take_lock(folder, lock_within_s)
        try:
            connection = connect(folder.store, sync)
            _bring_up_to_date(connection)
            clear_unknown_files(folder, connection)
            tokens = TokenCounts.of(connection)
        except sqlite3.Error as error:
            lock.close()
            raise RunFolderError(f"the store {folder.store} cannot be written: {error}") from error
        return cls(folder, connection, lock, tokens)

    def commit(self, calls: Sequence[Said], *, patient: bool) -> bool:
        try:
            if _identity(self._path) != self._identity:
                raise RunFolderError(
                    f"{self._folder.path} was removed or replaced while the run wrote it; what it has recorded is "
                    "lost. Start the run again, and leave its folder alone"
                )
            if not self._begin(patient):
                return False
            self._statements.apply(calls)
            self.connection.execute("COMMIT")
            if self.due is None and not self._full_sync:
                self.due = time.monotonic() + DURABLE_WITHIN_S
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._keep(calls)
            raise
        return True

    def finish(self) -> None:
        """Nothing is ever under way."""

    def settle(self, *, now: bool) -> None:
        if self.due is None or not (now or time.monotonic() >= self.due):
            return
        self.due = None  # before: what is committed meanwhile has to be pressed again
        self.press()

    def press(self) -> None:
        """What is committed onto the disk; `OSError` if it refuses. From any thread."""
        try:
            log = os.open(f"{self._path}-wal", os.O_RDONLY)
        except FileNotFoundError:
            return  # the folder is gone: the next commit says so
        try:
            os.fsync(log)
        finally:
            os.close(log)

    def close(self) -> None:
        self.connection.close()
        self._lock.close()

    def _begin(self, patient: bool) -> bool:
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the rest says in which way
                if not is_busy or (patient and time.monotonic() > until):
                    raise
                if not patient:
                    return False
                time.sleep(0.01)  # SQLite's own wait is for a connection, and a caller must not wait with this one

    def _keep(self, calls: Sequence[Said]) -> None:
        """Of a commit that failed, the calls before the one at fault. A full disk may have no room for these either."""
        connection = self.connection
        if not connection.in_transaction:
            return  # it never began, or all of it is committed
        try:
            connection.execute("ROLLBACK")
            before = self._try(calls)
            if before < len(calls):
                connection.execute("ROLLBACK")
                self._try(calls[:before])
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _try(self, calls: Sequence[Said]) -> int:
        """Apply one by one, up to the first that fails; how many did not. The transaction stays open."""
        self._begin(patient=True)
        for place, call in enumerate(calls):
            try:
                self._statements.apply([call])
            except Exception:
                return place
        return len(calls)


def _identity(file: str) -> tuple[int, int] | None:
    """Which file stands at a path; None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make(path: Path, facts: Mapping[str, Any]) -> None:
    """A whole one with these facts or, if the process dies meanwhile, none: what is left then is no run."""
    draft = path.with_suffix(".draft")
    for left in path.parent.glob(f"{draft.name}*"):  # its journal too
        left.unlink()
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        connection.executescript(
            f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
        )
        connection.executemany("INSERT INTO run VALUES (?, ?)", [(k, encode_json(v)) for k, v in facts.items()])
        connection.execute("COMMIT")
    draft.replace(path)


def connect(path: Path, sync: str) -> sqlite3.Connection:
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


def _take_lock(folder: RunFolder, within_s: float = 0.0) -> Any:
    """An advisory lock that the kernel drops with the process, however it ends."""
    until = time.monotonic() + within_s
    try:
        lock = folder.lock.open("ab")
    except OSError as error:
        raise RunFolderError(f"{folder.path} cannot be written: {error}. Choose another run.dir") from error
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() >= until:
                lock.close()
                text = f"{folder.path} is being written by another run; wait for it, or stop it"
                raise RunFolderError(text) from error
        time.sleep(0.02)
