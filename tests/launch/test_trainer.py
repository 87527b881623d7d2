"""`Trainer`: what it takes from Python, and what it refuses before a run folder is made."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
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


# Ctrl-C in a script.

SCRIPT = """\
from nearpolicy import Trainer

def score(completions, **columns):
    return [float(len(text)) for text in completions]

if __name__ == "__main__":
    config = {
        "run": {"steps": 500, "dir": "run"},
        "sampling": {"num_generations": 4, "max_completion_length": LENGTH, "max_prompt_length": 16},
        "queue": {"prompts_per_step": 2},
    }
    rows = [{"prompt": f"letter {letter}"} for letter in "abcd"]
    summary = Trainer("random:llama", score, rows, config).train()
    print("after:", summary["ended"], summary["steps"], flush=True)
"""


def start_script(folder: Path, length: int) -> subprocess.Popen:
    (folder / "script.py").write_text(SCRIPT.replace("LENGTH", str(length)))
    return subprocess.Popen(
        [sys.executable, "-u", "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(stream, pattern: str) -> None:
    for line in stream:
        if re.search(pattern, line):
            return
    raise AssertionError(f"{pattern!r} never came")


def test_ctrl_c_once_in_a_script_saves_what_was_learned_and_the_script_goes_on(tmp_path):
    script = start_script(tmp_path, length=5)
    try:
        wait_for(script.stdout, r"^ +0 +1/500 ")
        script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=120)
    finally:
        script.kill()
    assert script.returncode == 0, (out, err)
    assert "stopping after this step; press Ctrl-C again" in err and "Traceback" not in err
    steps = int(re.search(r"^after: stopped (\d+)$", out, re.M)[1])
    assert 1 <= steps < 500
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{steps}"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended"] == "stopped"


def test_ctrl_c_twice_in_a_script_is_a_keyboard_interrupt(tmp_path):
    script = start_script(tmp_path, length=200)
    try:
        wait_for(script.stdout, r"^ +0 +1/500 ")
        script.send_signal(signal.SIGINT)
        wait_for(script.stderr, "press Ctrl-C again")
        script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=60)
    finally:
        script.kill()
    assert script.returncode in (1, -signal.SIGINT), (out, err)
    assert "KeyboardInterrupt" in err and "after:" not in out
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_ctrl_c_before_the_first_step_is_a_keyboard_interrupt(monkeypatch):
    def interrupted(session):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr("nearpolicy.launch.supervised.run_session", interrupted)
    with pytest.raises(KeyboardInterrupt, match="before the first step"):
        trainer().train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_whoever_listens_to_ctrl_c_already_is_left_alone_and_so_is_any_other_thread(monkeypatch):
    heard = []

    def look(session):
        heard.append(signal.getsignal(signal.SIGINT))
        return {}

    monkeypatch.setattr("nearpolicy.launch.supervised.run_session", look)
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        trainer().train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [mine]
    made = trainer()
    thread = threading.Thread(target=made.train)
    thread.start()
    thread.join()
    assert heard == [mine, signal.default_int_handler]
