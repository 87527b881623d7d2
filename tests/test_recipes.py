"""The recipes and examples that are shipped: they resolve, and the short ones do what they say."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nearpolicy.config import load_recipe

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves(recipe):
    assert load_recipe(recipe).run.name == recipe.stem


@pytest.mark.large
def test_the_one_file_loop_learns_to_count():
    done = subprocess.run([sys.executable, ROOT / "examples" / "one_file_loop.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.strip().splitlines()[-1].split()[-1].rstrip("%")) > 80


@pytest.mark.large
def test_the_own_loop_trains_what_it_chooses():
    names = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))
    import asyncio

    rewards = asyncio.run(names["main"]())
    assert len(rewards) == names["STEPS"]
    assert sum(rewards[-5:]) > sum(rewards[:5])


@pytest.mark.large
def test_the_trainer_example_raises_the_reward(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "trainer.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    from nearpolicy.store.reader import RunReader

    with RunReader(tmp_path / "runs" / "letters-1") as run:
        rewards = [line["reward/mean"] for line in run.metrics() if "reward/mean" in line]
    assert rewards[0] < 0.1 and rewards[-1] > 0.4
