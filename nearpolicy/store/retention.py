"""What becomes of the payloads of groups that nobody needs any more: moved to Parquet, or dropped.

Promises
- A payload stays in the database while a resume may ask for it: while its step is not in every checkpoint that is kept,
  or ended fewer than `store.retention_steps` steps ago. A group that was given up goes with the steps whose groups were
  admitted with it or later; one that was recycled, once the attempt that goes on from it is stored.
- A kill at any instant loses and doubles nothing. The file is written beside, made durable and renamed; then one
  transaction notes where the payloads are and removes them. A file that no row tells of is removed at the next start.
- The run goes on meanwhile: all but that transaction is done by a thread of its own, a portion at a time.

    checkpoint -> `release(oldest)` -> portion -> payloads/N.parquet -> one call of the store: moved + , payloads -
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from nearpolicy.errors import NearpolicyError, RunFolderError, described
from nearpolicy.store.folder import RunFolder

if TYPE_CHECKING:
    from nearpolicy.store.config import StoreConfig

_PORTION_BYTES = 32 * 2**20
"""Payloads that are moved by one transaction, and make one file."""
_PORTION_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Retention:
    """`store.retention` and `store.retention_steps`."""

    how: Literal["parquet", "drop"]
    steps: int

    @classmethod
    def of(cls, config: StoreConfig) -> Retention | None:
        """None if everything stays in the database."""
        if config.retention == "keep" or config.retention_steps is None:
            return None
        return cls(config.retention, config.retention_steps)


@dataclass(frozen=True, slots=True)
class Moved:
    """A row of the table `moved`."""

    admission: int
    attempt: int
    what: str
    file: int | None = None
    part: int | None = None


class Mover:
    """The thread. ``commit`` hands a portion to the store and returns when it is there; ``fail`` ends the run."""

    def __init__(
        self,
        folder: RunFolder,
        retention: Retention,
        connection: sqlite3.Connection,
        *,
        commit: Callable[[Sequence[Moved]], None],
        fail: Callable[[NearpolicyError], None],
    ) -> None:
        self._folder, self._retention, self._db = folder, retention, connection
        self._commit, self._fail = commit, fail
        self._released: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"retention {folder.name}", daemon=True)
        self._thread.start()

    def release(self, oldest: int) -> None:
        """No resume goes back further than to the weights that contain ``oldest`` steps."""
        self._released.put(oldest)

    def close(self) -> None:
        """Returns when all that was released is moved, or moving has failed."""
        self._released.put(None)
        self._thread.join()
        self._db.close()

    def _run(self) -> None:
        try:
            while (oldest := self._released.get()) is not None:
                while rows := next_portion(self._db, oldest=oldest, steps=self._retention.steps):
                    self._commit(self._written(rows) if self._retention.how == "parquet" else rows)
        except NearpolicyError:
            pass  # the store has failed or is closed, and says so itself
        except Exception as error:
            target = self._folder.payloads if self._retention.how == "parquet" else self._folder.store
            self._fail(
                RunFolderError(
                    f"payloads cannot be moved to {target}: {described(error)}. Nothing is lost. Make room, or set "
                    "store.retention: keep, and take the run up again"
                )
            )

    def _written(self, rows: Sequence[Moved]) -> list[Moved]:
        """``rows`` in a new file, and where in it they are."""
        from nearpolicy.store.parquet import table_schema, write_rows

        number = next_file(self._folder, self._db)
        path = self._folder.moved_payloads(number)
        draft = path.with_name(f".{path.name}.tmp")
        path.parent.mkdir(exist_ok=True)
        columns = {"admission": "INTEGER", "attempt": "INTEGER", "what": "TEXT", "payload": "BLOB"}
        sizes = write_rows(draft, table_schema(columns), self._payloads(rows))
        _make_durable(draft)
        draft.rename(path)
        _make_durable(path.parent)
        _make_durable(self._folder.path)
        parts = [part for part, size in enumerate(sizes) for _ in range(size)]
        return [Moved(r.admission, r.attempt, r.what, number, part) for r, part in zip(rows, parts, strict=True)]

    def _payloads(self, rows: Sequence[Moved]) -> Iterator[dict[str, object]]:
        query = "SELECT payload FROM payloads WHERE admission = ? AND attempt = ? AND what = ?"
        for row in rows:
            key = (row.admission, row.attempt, row.what)
            (payload,) = self._db.execute(query, key).fetchone()
            yield dict(zip(("admission", "attempt", "what", "payload"), (*key, payload), strict=True))


def next_portion(connection: sqlite3.Connection, *, oldest: int, steps: int) -> list[Moved]:
    """What may go next, by admission: of steps that ended ``steps`` or more ago and are in every checkpoint that is
    kept, the ``oldest`` of which contains so many."""
    done = connection.execute("SELECT coalesce(max(step) + 1, 0) FROM steps").fetchone()[0]
    rows = connection.execute(
        "SELECT admission, attempt, what, length(payload) FROM payloads JOIN endings USING (admission, attempt) "
        "LEFT JOIN consumption USING (admission, attempt) WHERE step < :before OR (step IS NULL AND admission <= "
        "(SELECT max(admission) FROM consumption WHERE step < :before) AND (ending <> 'recycled' OR EXISTS "
        "(SELECT 1 FROM groups WHERE groups.admission = payloads.admission AND groups.attempt > payloads.attempt))) "
        "ORDER BY admission, attempt, what",
        {"before": min(oldest, done - steps)},
    )
    found: list[Moved] = []
    size = 0
    for admission, attempt, what, length in rows:
        found.append(Moved(admission, attempt, what))
        size += length
        if size >= _PORTION_BYTES or len(found) == _PORTION_ROWS:
            break
    return found


def next_file(folder: RunFolder, connection: sqlite3.Connection) -> int:
    """A number that no file has, and none that somebody has put elsewhere."""
    there = [int(path.stem) for path in folder.payloads.glob("[0-9]*.parquet") if path.stem.isdecimal()]
    known = connection.execute("SELECT max(file) FROM moved").fetchone()[0]
    return max([*there, -1 if known is None else known], default=-1) + 1


def clear_unknown_files(folder: RunFolder, connection: sqlite3.Connection) -> None:
    """Remove what a process that died has left of a move that the store knows nothing of."""
    if not folder.payloads.is_dir():
        return
    known = {file for (file,) in connection.execute("SELECT DISTINCT file FROM moved")}
    for path in folder.payloads.iterdir():
        name = path.name
        ours = name.startswith(".") and name.endswith(".parquet.tmp")
        if ours or (path.suffix == ".parquet" and path.stem.isdecimal() and int(path.stem) not in known):
            with contextlib.suppress(OSError):
                path.unlink()


def _make_durable(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
