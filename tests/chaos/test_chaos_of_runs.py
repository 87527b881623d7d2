"""Runs that are killed and disturbed, and go on: nothing lost, nothing twice, the bound kept, the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import chaos
import pytest

from nearpolicy.config import load_recipe
from nearpolicy.launch.session import Session, run_session

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


def whole(folder: Path, steps: int, setting: str) -> None:
    chaos.prepare(folder)
    # A policy that collapses to one answer leaves dynamic sampling nothing to train on, and ends the run.
    settings = (*chaos.SETTINGS[setting], f"run.steps={steps}", "checkpoint.every=0", "learner.learning_rate=1e-4")
    recipe = load_recipe(folder / "demo.yaml", settings)
    run_session(Session(config=recipe, say=lambda text: None))
    bound = recipe.queue.max_staleness
    chaos.require_whole(folder, bound=bound, steps=steps)


@pytest.mark.parametrize("setting", ["ahead", "dropped"])
def test_a_hundred_real_groups_keep_the_bound_and_end_once(tmp_path, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    whole(tmp_path, 50, setting)


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", ["synchronous", "ahead", "ready", "dropped", "filtered"])
def test_ten_thousand_real_groups(tmp_path, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    whole(tmp_path, 1000, setting)
