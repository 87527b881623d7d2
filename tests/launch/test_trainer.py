"""`Trainer`: what it takes from Python, and what it refuses before a run folder is made."""

from __future__ import annotations

import asyncio
import datetime
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from nearpolicy import Trainer
from nearpolicy.errors import ConfigError, DataError, UserError

CONFIG = {
    "run": {"steps": 1},
    "sampling": {"num_generations": 2, "max_completion_length": 3, "max_prompt_length": 16},
    "queue": {"prompts_per_step": 2},
    "verifier": {"in_process": True},
}
ROWS = [{"prompt": f"letter {letter}", "gold": letter} for letter in "abcd"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def score(completions, **columns):
    return [1.0 for _ in completions]


def trainer(rows=ROWS, functions=score, config=CONFIG, **more) -> Trainer:
    return Trainer(model="random:llama", reward_funcs=functions, train_dataset=rows, config=config, **more)


def test_functions_of_one_name_are_all_asked():
    made = trainer(functions=[score, lambda completions: [0.0], score, lambda completions: [0.5]])
    sources = [reward.source for reward in made.config.tasks[0].rewards]
    assert sources == ["score", "reward_1", "score_2", "reward_3"]


@pytest.mark.parametrize("key", ["rewards", "source", "name"])
def test_a_task_setting_that_the_arguments_make_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"task sets `{key}`"):
        trainer(task={key: "x"})


def test_numpy_values_are_kept_as_the_numbers_they_are():
    row = {"prompt": "x", "level": np.int64(3), "share": np.float32(0.5), "ids": np.arange(3), "yes": np.bool_(True)}
    made = trainer(rows=[row, {**row, "nested": {"a": [np.int8(1)]}}])
    lines = [json.loads(line) for line in (made.run_dir / "train.jsonl").read_text().splitlines()]
    assert lines[0] == {"prompt": "x", "level": 3, "share": 0.5, "ids": [0, 1, 2], "yes": True}
    assert lines[1]["nested"] == {"a": [1]}


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), np.datetime64("2026-01-01"), {1, 2}, b"x", object()])
def test_a_value_that_json_cannot_hold_is_refused_by_row_and_column(value):
    with pytest.raises(DataError, match="row 2 column `when`"):
        trainer(rows=[ROWS[0], {**ROWS[0], "when": value}])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"functions": lambda completions, gould: [0.0]}, "train_dataset has no column `gould`.* mean `gold`"),
        ({"rows": [*ROWS, {"prompt": None}]}, "train_dataset row 5 column `prompt`: no value"),
        ({"config": {**CONFIG, "generator": {"kv_memory_mb": 0.001}}}, "kv_memory_mb=0.001 cannot hold one sequence"),
        ({"config": {**CONFIG, "run": {"steps": 1, "name": "my run"}}}, "run.name is 'my run'"),
    ],
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(more, says):
    with pytest.raises(UserError, match=says):
        trainer(**more)
    assert not Path("runs").exists()


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="already holds a run"):
        trainer(config={**CONFIG, "run": {"steps": 1, "dir": "old"}})


def test_it_trains_in_a_notebook_too():
    async def cell():
        return trainer().train()

    assert asyncio.run(cell())["steps"] == 1


def test_memory_that_is_not_there_is_a_warning(monkeypatch):
    monkeypatch.setattr("nearpolicy.launch.sizes.available_memory_mb", lambda: 100.0)
    with pytest.warns(RuntimeWarning, match="may need .* MB of memory and 100 MB are free"):
        trainer()


def test_torch_loaded_too_early_is_a_warning(monkeypatch):
    import torch  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.warns(RuntimeWarning, match="torch was loaded before"):
        trainer()
