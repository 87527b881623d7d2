"""Runs over several nodes: one dies with all that lives there, or one comes (`nodes.py`: each has its own Ray)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("nodes.py")


def played(role: str) -> dict:
    done = subprocess.run([sys.executable, SCRIPT, role], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] and found["used_once"], found
    return found


@pytest.mark.large
@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("generator", r"generator \d was lost"),
        ("learner", "a rank of the learner died"),
        ("verifier", "verifier 0 died"),
        ("controller", "the controller is lost"),
    ],
)
def test_a_node_that_dies_in_the_middle_of_a_run_changes_no_bit(role, says):
    found = played(role)
    assert role in found["gone"][0] and any(re.search(says, text) for text in found["said"]), found


@pytest.mark.large
def test_a_generator_joins_with_a_node_that_comes_in_the_middle_of_a_run():
    assert played("join")["generators"] == 2
