"""The recipes and examples that are shipped: they resolve, and the short ones do what they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nearpolicy.config import load_recipe
from nearpolicy.evaluate.evaluator import CORRECT, correctness
from nearpolicy.records import Prompt
from nearpolicy.store.reader import RunReader
from nearpolicy.tasks.mixture import load_task
from nearpolicy.verifier.config import FunctionReward
from nearpolicy.verifier.functions import prepare
from nearpolicy.verifier.rewards import Sample, score

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves(recipe):
    assert load_recipe(recipe).run.name == recipe.stem


def test_own_data_and_own_reward_train_as_the_recipe_says(tmp_path):
    """What docs/getting-started.md goes through, as a user runs it: from the root of the repository."""
    command = ["train", "recipes/own_data.yaml", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "nearpolicy", *command], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = rewards_of(tmp_path / "run")
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])


def rewards_of(folder: Path) -> list[float]:
    """Mean reward by step."""
    with RunReader(folder) as run:
        return [line["reward/mean"] for line in run.metrics() if "reward/mean" in line]


def test_the_two_shapes_of_the_example_reward_agree_on_what_is_right():
    path = ROOT / "examples" / "own_data" / "rewards.py"
    verdicts = {}
    for name in ("right_word", "compute_score"):
        function = prepare(FunctionReward(path=f"{path}:{name}"))
        for text in ("one", " one ", "one of many", "many"):
            of_text = Sample(
                text=text, columns={"answer": "one"}, prompt="One or many: cat", completion_ids=[], task="t"
            )
            [verdict] = function.verdicts(function.begin([of_text]), 1)
            verdicts[name, text] = correctness(verdict) >= CORRECT
    assert [verdicts["right_word", text] for text in ("one", " one ", "one of many", "many")] == [1, 1, 0, 0]
    assert all(verdicts["right_word", text] == verdicts["compute_score", text] for _, text in verdicts)


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
    rewards = rewards_of(tmp_path / "runs" / "letters-1")
    assert f"reward {rewards[0]:.3f} in step 0, {rewards[-1]:.3f} in step 59" in done.stdout
    assert rewards[0] < 0.1 and rewards[-1] > 0.4


def shared_data() -> Path:
    """The folder with public data sets that are not part of this project."""
    folder = Path(os.environ.get("NEARPOLICY_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set NEARPOLICY_DATA to a folder that holds gsm8k/train.jsonl.gz")
    return folder


def test_the_gsm8k_recipe_reads_the_real_file_and_its_reward_knows_the_gold_answers(monkeypatch):
    monkeypatch.setenv("NEARPOLICY_DATA", str(shared_data()))
    [task] = load_recipe(ROOT / "recipes" / "gsm8k.yaml").tasks
    data = load_task(task, seed=0, renderer=None, max_prompt_length=None)
    assert (data.rows, len(data.held_out), dict(data.skipped)) == (7473, 200, {})
    correct, boxed = task.rewards
    for prompt in data.training[:12]:
        right = f"So the answer is \\boxed{{{prompt.columns['final']}}}."
        for reward in (correct, boxed):
            assert score(reward, sample(prompt, right)).value == 1.0
        assert score(correct, sample(prompt, "\\boxed{123456.5}")).value == 0.0
        assert score(boxed, sample(prompt, "The answer is 5.")).value == 0.0


def sample(prompt: Prompt, text: str) -> Sample:
    return Sample(text=text, columns=prompt.columns, completion_ids=[], task=prompt.task)
