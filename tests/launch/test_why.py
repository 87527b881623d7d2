"""A run that stands still says who waits for whom; one that has ended says what is left."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_resume import RECIPE

from nearpolicy.launch.cli import run as cli
from nearpolicy.launch.watch import STATUS, Watch, in_words
from nearpolicy.launch.why import let_go
from nearpolicy.store.folder import RunFolder
from nearpolicy.waits import waiting, waits

SLOW = """\
import time
def judge(completions, **_):
    time.sleep(600)
"""


def test_waits_are_named_while_they_last_and_told_longest_first():
    before = len(waits())
    with waiting("a", "x"), waiting("b", "y"), waiting("b", "y"):
        mine = waits()[before:]
        assert [(wait.who, wait.what) for wait in mine] == [("a", "x"), ("b", "y"), ("b", "y")]
        status = {"waits": [{"who": w.who, "for": w.what, "seconds": 7.2} for w in mine]}
        assert in_words(status) == ["a waits for x since 7 s", "b (2 of them) waits for y since 7 s"]
    assert len(waits()) == before


def test_when_nothing_moves_it_is_said_once_until_something_moves(tmp_path):
    said, quiet = [], [200.0]
    watch = Watch(tmp_path, last_events=lambda: {"learner": ("optim", quiet[0])}, say=said.append, quiet_s=120)
    with waiting("the learner", "a batch of 8 groups"):
        status = {"waits": [{"who": "the learner", "for": "a batch of 8 groups", "seconds": 200.0}]}
        for _ in range(3):
            watch._tell_if_nothing_moves(status)
        assert len(said) == 1
        assert said[0].startswith("nothing has moved for 200 s: the learner waits for a batch of 8 groups since 200 s.")
        quiet[0] = 1.0
        watch._tell_if_nothing_moves(status)
        quiet[0] = 130.0
        watch._tell_if_nothing_moves(status)
        assert len(said) == 2


def exit_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli(arguments)
    return ended.value.code


@pytest.fixture
def stuck(tmp_path, monkeypatch):
    """A run whose reward does not come back."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"question": "1 + 1 =", "answer": "2"}) + "\n")
    Path("reward.py").write_text(SLOW)
    Path("demo.yaml").write_text(RECIPE.replace("verifier: {in_process: true}", "verifier: {timeout_s: 500}"))
    command = [sys.executable, "-m", "nearpolicy.launch.cli", "train", "demo.yaml", "queue.stall_timeout_s=2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    try:
        while not waits_for_verdicts(Path("run/status.json")):
            assert time.monotonic() < deadline and process.poll() is None
            threading.Event().wait(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def waits_for_verdicts(status: Path) -> bool:
    try:
        return any(wait["for"] == "verdicts" for wait in json.loads(status.read_text())["waits"])
    except (OSError, ValueError):
        return False


def test_a_run_that_is_stuck_says_who_waits_for_whom_and_a_dead_one_how_to_go_on(stuck, capsys):
    """I8."""
    assert exit_of("why", "run") == 0
    out = capsys.readouterr().out
    assert "the learner waits for a batch of 2 groups since" in out
    assert "group 0" in out and "waits for verdicts since" in out
    assert "queue: admit" in out
    assert "Current thread" in out and "commits.py" in out and "pipeline.py" in out  # stacks, places of tasks
    assert json.loads(out.splitlines()[-1])["alive"] is True
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.wait()
    assert exit_of("why", "run") == 0
    out = capsys.readouterr().out
    assert "has died after 0 steps" in out and "were under way" in out
    assert "nearpolicy train --resume" in out
    assert exit_of("why", "absent") == 2


@pytest.fixture
def locked(tmp_path):
    """A run folder that some process has, and how to let go of it."""
    folder = RunFolder(tmp_path)
    with folder.lock.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, lambda: fcntl.flock(lock, fcntl.LOCK_UN)


def says(folder: RunFolder, pid: int, node: str) -> None:
    (folder.path / STATUS).write_text(json.dumps({"pid": pid, "node": node}))


def test_what_a_dead_controller_has_left_is_waited_for(locked, monkeypatch):
    folder, let_go_of_it = locked
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    says(folder, dead.pid, platform.node())
    monkeypatch.setattr("nearpolicy.launch.why.time.sleep", lambda seconds: let_go_of_it())
    assert let_go(folder)


@pytest.mark.parametrize(
    ("pid", "node"), [(os.getpid(), platform.node()), (2**22 + 1, "elsewhere")], ids=["lives", "elsewhere"]
)
def test_who_lives_or_is_elsewhere_is_not_waited_for(locked, monkeypatch, pid, node):
    folder, _ = locked
    says(folder, pid, node)
    monkeypatch.setattr("nearpolicy.launch.why.time.sleep", lambda seconds: pytest.fail("it waits"))
    assert not let_go(folder)
