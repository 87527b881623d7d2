"""The one writer of a run's store: a queue, a database, and what moves payloads out of it.

Promises (beside those of `nearpolicy.store.record`)
- A second writer of the same folder, in this or another process, is refused. The lock dies with its process.
- A folder that is removed or replaced while it is written ends the run: what went into it since can be read by nobody.
- I2 is checked before a commit: each attempt at an admission ends once, and a rollout's fates add up to its tokens.

    call -> bounded queue (`commits`) -> thread: BEGIN, apply each call (`statements`), COMMIT (`database`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from nearpolicy.errors import NearpolicyError
from nearpolicy.store.calls import Call
from nearpolicy.store.commits import MAX_PENDING, STALL_S, Commits
from nearpolicy.store.database import Database, connect
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.record import RunRecord
from nearpolicy.store.retention import Moved, Mover, Retention


class StoreWriter:
    """Implements `nearpolicy.store.record.Writer` in this process."""

    def __init__(
        self, folder: RunFolder, database: Database, retention: Retention | None, *, max_pending: int, stall_s: float
    ) -> None:
        self.database = database
        self.commits = Commits(folder, database, max_pending=max_pending, stall_s=stall_s)
        self.say = self.commits.say
        self._mover = retention and Mover(
            folder, retention, connect(folder.store, "normal"), commit=self._moved, fail=self._cannot_move
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
        max_pending: int = MAX_PENDING,
        stall_s: float = STALL_S,
    ) -> Self:
        """Of a new store, in an existing folder that holds none."""
        database = Database.create(folder, config=config, packages=packages, sync=sync)
        return cls(folder, database, retention, max_pending=max_pending, stall_s=stall_s)

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        *,
        sync: str = "normal",
        retention: Retention | None = None,
        max_pending: int = MAX_PENDING,
        stall_s: float = STALL_S,
        lock_within_s: float = 0.0,
    ) -> Self:
        """Of the store of a run that goes on. ``lock_within_s``: how long a process that had it may take to end."""
        database = Database.open(folder, sync=sync, lock_within_s=lock_within_s)
        return cls(folder, database, retention, max_pending=max_pending, stall_s=stall_s)

    def flush(self, *, durable: bool = False) -> None:
        self.commits.flush()
        if durable:
            try:
                self.database.press()
            except OSError as error:
                self.commits.fail(error)
                self.commits.check()

    def release(self, oldest: int) -> None:
        if self._mover is not None:
            self._mover.release(oldest)

    def close(self) -> None:
        """Moves what was released, too."""
        if self._mover is not None:
            self._mover, mover = None, self._mover
            mover.close()
        if not self.commits.is_closed:
            self.commits.close()
            self.database.close()
            self.commits.check()

    def _moved(self, rows: Sequence[Moved]) -> None:
        self.say(Call("moved", (rows,)))
        self.commits.flush()

    def _cannot_move(self, error: NearpolicyError) -> None:
        with contextlib.suppress(NearpolicyError):  # it is closed, or has another error already
            self.say(Call("failed", (error,)))


class SqliteStore(RunRecord):
    """A record that is written in this process; make one with `create` or `open`."""

    def __init__(self, folder: RunFolder, writer: StoreWriter) -> None:
        found = writer.database
        super().__init__(folder, writer, wall_anchor=found.wall_anchor, tokens=found.tokens)

    @classmethod
    def create(cls, folder: RunFolder, *, config: Mapping[str, Any], **options: Any) -> Self:
        """A new store in an existing folder that holds none; ``options`` as of `StoreWriter.create`."""
        return cls(folder, StoreWriter.create(folder, config=config, **options))

    @classmethod
    def open(cls, folder: RunFolder, **options: Any) -> Self:
        """The store of a run that goes on; ``options`` as of `StoreWriter.open`."""
        return cls(folder, StoreWriter.open(folder, **options))
