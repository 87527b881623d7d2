"""Work that may never end, done where it can be ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearpolicy.bounded import Answer, bounded
from nearpolicy.errors import NearpolicyError

HERE = f"{__name__}:"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))


def add(fixed, item):
    print("what a function prints is no answer")
    return fixed + item


def sleep_over_odd(fixed, item):
    if item % 2:
        time.sleep(1000)
    return item


def fill_memory(fixed, item):
    return len(bytearray(item))


def end_the_process(fixed, item):
    os._exit(3)


def test_answers_come_in_order_over_many_chunks():
    assert [a.value for a in bounded(HERE + "add", 100, range(1000), chunk=64)] == list(range(100, 1100))
    assert [a.value for a in bounded(HERE + "add", "half \ud800 ", ["\x00é"])] == ["half \ud800 \x00é"]
    assert list(bounded(HERE + "add", 0, [])) == []


def test_items_that_never_end_are_told_from_their_neighbours():
    answers = list(bounded(HERE + "sleep_over_odd", None, [0, 1, 2, 4, 6, 7], limit_s=0.5, chunk=3))
    late = Answer(error="no answer after 0.5 s", out_of_time=True)
    assert answers == [Answer(0), late, Answer(2), Answer(4), Answer(6), late]


def test_an_exception_costs_its_item_only_and_memory_is_limited():
    answers = list(bounded(HERE + "add", 1, [1, "a", 2]))
    assert [a.value for a in answers] == [2, None, 3]
    assert answers[1].error.startswith("TypeError: ")
    huge, small = bounded(HERE + "fill_memory", None, [2**40, 10])
    assert (huge.error, small.value) == ("MemoryError", 10)


def test_a_child_that_dies_is_an_error():
    with pytest.raises(NearpolicyError, match="ended with status 3"):
        list(bounded(HERE + "end_the_process", None, [1]))


def test_nobody_is_left_behind_when_the_caller_loses_interest_or_is_killed():
    def children() -> str:
        return subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "nearpolicy.bounded"], stdout=-1).stdout.decode()

    answers = bounded(HERE + "add", 0, range(1000), chunk=2)
    next(answers)
    assert children()
    answers.close()
    assert not children()
    program = (
        "import os; from nearpolicy.bounded import bounded; import test_bounded\n"
        "answers = bounded('test_bounded:sleep_over_odd', None, [0, 1], chunk=1, limit_s=1000); next(answers)\n"
        "print(answers.gi_frame.f_locals['child']._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    state = Path(f"/proc/{int(killed.stdout)}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
