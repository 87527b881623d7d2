"""The command line itself: how it is started, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nearpolicy
from nearpolicy.errors import StandstillError
from nearpolicy.launch import cli, commands


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["--version"])
    assert (end.value.code or 0, capsys.readouterr().out) == (0, f"nearpolicy {nearpolicy.__version__}\n")


def test_python_m_nearpolicy_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "nearpolicy", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_what_a_message_quotes_cannot_act_on_the_terminal(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["check", "\x1b[31mred\u202e.yaml"])
    assert end.value.code == 2
    assert "\\x1b[31mred\\u202e.yaml: cannot be read" in capsys.readouterr().err


def test_a_standstill_is_a_message_with_a_status_of_its_own(capsys, monkeypatch):
    def stand_still(*_, **__):
        raise StandstillError("the learner has waited 5 s; 3 have failed, the last because: no key")

    monkeypatch.setattr(commands, "app", stand_still)
    with pytest.raises(SystemExit) as end:
        cli.run(["train"])
    assert (end.value.code, capsys.readouterr().err) == (
        3,
        "nearpolicy: the learner has waited 5 s; 3 have failed, the last because: no key\n",
    )
