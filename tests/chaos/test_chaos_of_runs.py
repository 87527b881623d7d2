"""Runs that are killed and disturbed, and go on: nothing lost, nothing twice, the bound kept, the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


def counts(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, CHAOS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ten_kills_and_twenty_faults_leave_what_an_undisturbed_run_leaves():
    """I1, I2, I7; K22 to K33 by their kind."""
    found = counts("--kills", "10", "--faults", "20")
    assert found["disturbances"] == 30 and found["final_weights_compared_and_equal"] >= 2


@pytest.mark.large
@pytest.mark.timeout(3600)
def test_five_hundred_disturbances():
    found = counts("--kills", "350", "--faults", "150", "--seed", "7")
    assert found["disturbances"] == 500 and found["final_weights_compared_and_equal"] >= 30
