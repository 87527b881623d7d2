"""The queue before a record: everything in order, nothing twice, in bunches as large as their sink takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
from synthetic_run import admission

from nearpolicy.errors import NearpolicyError
from nearpolicy.store.calls import Said
from nearpolicy.store.commits import Commits
from nearpolicy.store.folder import RunFolder


class Slow:
    """A sink that takes what it is given once it is let."""

    due = None

    def __init__(self) -> None:
        self.bunches: list[list[int]] = []
        self.finished: list[int] = []
        """How many calls it had been given each time that it was waited for."""
        self.busy, self.let = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def commit(self, calls: Sequence[Said], *, patient: bool) -> bool:
        self.busy.set()
        assert self.let.wait(30)
        if self.error is not None:
            raise self.error
        self.bunches.append([call.index for call in calls])
        return True

    def finish(self) -> None:
        self.finished.append(sum(map(len, self.bunches)))

    def settle(self, *, now: bool) -> None: ...


def started(sink: Slow, **options: int) -> Commits:
    return Commits(RunFolder(Path("run")), sink, **{"max_pending": 100, "stall_s": 30.0, **options})


def test_what_waits_while_the_sink_is_busy_goes_together_and_no_more_than_it_takes():
    sink = Slow()
    commits = started(sink, most=4)
    commits.say(admission(0))
    assert sink.busy.wait(30)
    for index in range(1, 10):
        commits.say(admission(index))
    sink.let.set()
    commits.close()
    assert sink.bunches == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert sink.finished[-1] == 10 and 5 not in sink.finished  # more waited: one is packed while the other is written


def test_whoever_flushes_waits_for_what_is_under_way_though_more_is_said():
    sink = Slow()
    commits = started(sink, most=2)
    for index in range(2):
        commits.say(admission(index))
    assert sink.busy.wait(30)
    flushing = threading.Thread(target=commits.flush)
    flushing.start()
    sink.let.set()
    flushing.join(30)
    assert sink.finished[-1] == 2
    commits.close()


def test_calls_of_one_message_are_committed_behind_what_was_said_before():
    sink = Slow()
    sink.let.set()
    commits = started(sink)
    commits.say(admission(0))
    commits.commit([admission(1), admission(2)])
    assert list(chain(*sink.bunches)) == [0, 1, 2]
    commits.close()
    with pytest.raises(NearpolicyError, match="closed"):
        commits.commit([admission(3)])


def test_calls_of_one_message_are_not_committed_behind_one_that_failed():
    sink = Slow()
    sink.error = OSError("no space left")
    sink.let.set()
    commits = started(sink)
    with pytest.raises(NearpolicyError, match="no space left"):
        commits.commit([admission(0)])
    sink.error = None
    with pytest.raises(NearpolicyError, match="no space left"):
        commits.commit([admission(1)])
    assert sink.bunches == []
    commits.close()
