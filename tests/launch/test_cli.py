"""The command line itself: how it is started, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nearpolicy
from nearpolicy.launch import cli


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["--version"])
    assert (end.value.code or 0, capsys.readouterr().out) == (0, f"nearpolicy {nearpolicy.__version__}\n")


def test_python_m_nearpolicy_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "nearpolicy", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)
