"""Calls that wait for the record, and the thread that hands them on: one after another, in the order they were made.

    say -> bounded queue -> thread: whatever waits, together -> `Sink`: a database, or a process that has one

One commit serves all calls that wait (group commit). Whoever flushes while the thread rests commits in its place, which
spares the two waking each other; while another program holds the database, only the thread waits for it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from nearpolicy.errors import NearpolicyError, RunFolderError, StandstillError
from nearpolicy.store.calls import Said
from nearpolicy.store.folder import RunFolder
from nearpolicy.waits import waiting

MAX_PENDING, STALL_S = 8192, 120.0
"""Calls that may wait; seconds without a commit that nobody waits longer for."""
MAX_PER_COMMIT = 512
_LINGER_S = 0.02
"""How long a commit waits for company. Only calls that nobody flushes for can be lost in it."""


class Sink(Protocol):
    """Where calls go. Used by one thread at a time."""

    due: float | None
    """When `settle` is to be called next, by the monotonic clock; None: no need."""

    def commit(self, calls: Sequence[Said], *, patient: bool) -> bool:
        """All of them, or those before the one at fault and its error. False, and nothing done, if that would have to
        wait for another program and is not ``patient``. May return before they are committed: see `finish`."""
        ...

    def finish(self) -> None:
        """Returns when all it was given is committed, or raises."""
        ...

    def settle(self, *, now: bool) -> None:
        """What is `due`; ``now``: earlier than that."""
        ...


class Commits:
    """The queue and its thread. Any thread may use it."""

    def __init__(
        self, folder: RunFolder, sink: Sink, *, max_pending: int, stall_s: float, most: int = MAX_PER_COMMIT
    ) -> None:
        """``most``: calls that the sink gets at a time."""
        self._folder = folder
        self._sink = sink
        self._stall_s = stall_s
        self._calls: deque[Said | _Signal] = deque()
        self._max_pending = max_pending
        self._most = most
        self._enough = min(MAX_PER_COMMIT, max_pending)
        """Calls that make a commit wait for no more company."""
        self._hurry = False
        """Somebody waits for the commit: it waits for no company either."""
        self._asleep = False
        """The thread looks for calls only if it is woken."""
        self._wake, self._room = _Signal(), _Signal()
        self._error: BaseException | None = None
        self._progress = time.monotonic()
        self._closed = False
        self._gate, self._turn = threading.Lock(), threading.Lock()
        """Held by whoever says something, and by whoever takes calls and commits them."""
        self._thread = threading.Thread(target=self._write, name=f"store {folder.name}", daemon=True)
        self._thread.start()

    def say(self, call: Said | _Signal) -> None:
        """Returns at once unless the queue is full."""
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

    def commit(self, calls: Sequence[Said]) -> None:
        """As `say` for each and `flush`, for a caller that bounds how many there are."""
        with self._gate:
            self._require_open()
            self._calls.extend(calls)  # the thread is not woken: they are committed here
        self.flush()

    def flush(self) -> None:
        """Returns when everything said so far is committed."""
        with waiting("the run", "the store to commit"):
            if not self._commit_here():
                done, since = _Signal(), time.monotonic()
                self.say(done)
                while not done.wait(0.1):
                    self.check(since)
        self.check()

    def close(self) -> None:
        """Commit what was said, and take nothing more. The error is raised by the next `check`."""
        with self._gate:
            self._closed = True
        self._wake.set()
        since = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._error is None:
                self.check(since)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def fail(self, error: BaseException) -> None:
        """Nothing is committed any more; the first error is the one that is told."""
        self._error = self._error or error

    def check(self, since: float | None = None) -> None:
        """Raise the error, or say that the sink hangs: nothing committed for too long after ``since``."""
        if self._error is not None:
            raise self._described() from self._error
        if since is not None and time.monotonic() - max(since, self._progress) > self._stall_s:
            raise StandstillError(
                f"the store of {self._folder.path} committed nothing for {self._stall_s:.0f} s with "
                f"{len(self._calls)} calls waiting: its disk hangs, or another program holds the database"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise NearpolicyError(f"the store of {self._folder.path} is closed; nothing more can be recorded")

    def _wait_for_room(self) -> None:
        since = time.monotonic()
        self.check(since)
        while len(self._calls) >= self._max_pending:
            self._room.wait(0.1)
            self.check(since)

    def _described(self) -> NearpolicyError:
        error = self._error
        if isinstance(error, sqlite3.OperationalError):
            return RunFolderError(f"the store {self._folder.store} cannot be written: {error}")
        if isinstance(error, OSError):
            return RunFolderError(f"the store {self._folder.store} cannot be pressed onto the disk: {error}")
        if isinstance(error, NearpolicyError):
            return type(error)(str(error))
        return NearpolicyError(f"the store's writer stopped: {type(error).__name__}: {error}")

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
                self._sink.settle(now=not going)
            except OSError as error:
                self.fail(error)

    def _commit_here(self) -> bool:
        """All that waits is committed by this thread, unless the writer's is at it or the database is not to be had."""
        with self._gate:
            self._require_open()
        if not self._turn.acquire(blocking=False):
            return False
        try:
            was_settled = self._sink.due is None
            while self._calls:
                if not self._commit_waiting(patient=False):
                    return False
            if was_settled and self._sink.due is not None:
                self._wake.set()  # the thread sees to that
        except BaseException as error:  # Ctrl-C: calls may be taken and not applied, so that no later one may be
            self.fail(error)
            raise
        finally:
            self._turn.release()
        return True

    def _commit_waiting(self, *, patient: bool) -> bool:
        """The next commit, by whoever has the turn; False, and nothing done, if another program holds the database."""
        self._hurry = False  # before the calls are taken: whoever says so later wakes the thread again
        calls = [self._calls.popleft() for _ in range(min(len(self._calls), self._most))]
        if self._calls:
            self._hurry = True
        self._room.set()
        signals = [call for call in calls if type(call) is _Signal]
        if not self._commit([call for call in calls if type(call) is not _Signal], bool(signals), patient):
            self._calls.extendleft(reversed(calls))
            return False
        for signal in signals:
            signal.set()
        return True

    def _commit(self, calls: Sequence[Said], somebody_waits: bool, patient: bool) -> bool:
        if self._error is not None:
            return True  # later calls must not be stored without the one that failed
        try:
            if calls and not self._sink.commit(calls, patient=patient):
                return False
            if somebody_waits or not self._calls:
                self._sink.finish()
            self._progress = time.monotonic()
        except BaseException as error:  # surfaces on the next call: the writer's thread has nobody to raise to
            self.fail(error)
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise  # Ctrl-C in a caller that commits
        return True

    def _wait_for_calls(self) -> None:
        """Until somebody waits for the commit, or the calls that are there have had time for company; or the sink is
        due."""
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
        """Until then, or until the sink is due."""
        ends = [moment for moment in (until, self._sink.due) if moment is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None


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
