"""``nearpolicy replay RUN``: train a recording once more, and say whether it gives the same weights.

    recorded batches, in recorded order -> the learner -> losses, weights -> compared with what the run told of them

No engine and no verifier: what was sampled and how it was judged is in the recording. On a machine of the same kind the
weights are the same bit for bit; where they are not, the step and the tensors are named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, RunFolderError
from nearpolicy.launch.rows import as_learned

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.learner.step import PolicyLearner
    from nearpolicy.records import StepReport, VersionRecord
    from nearpolicy.store.reader import RunReader

MAY_DIFFER = ("objective", "learner", "critic")
"""Sections that `--with` may change: what is done with a recording, not what was recorded."""
TOLD = ("policy/loss", "policy/grad_norm", "policy/entropy")
"""Metrics of a step that do not depend on time."""


def command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    until: Annotated[int | None, typer.Option(help="Steps to train; all if left out.", show_default=False)] = None,
    changed: Annotated[
        list[str] | None, typer.Option("--with", help="section.key=value of another way to learn from it.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="A folder for the weights at the end.", show_default=False)] = None,
) -> None:
    """Train a run's recording again: the same losses and weights, or the step and tensor that first differ."""
    from nearpolicy.launch.words import count
    from nearpolicy.store.reader import RunReader

    if save is not None and save.exists():
        raise ConfigError(f"--save {save}: it exists already; name a folder that is not there")
    with RunReader(run) as reader:
        config = _config(reader, changed or [])
        steps = _steps(reader, until)
        replay = Replay(reader, config, compares=not changed)
        for line in replay.train(steps):
            print(line, flush=True)
        if save is not None:
            replay.learner.policy.save_pretrained(save)
            replay.language.renderer.tokenizer.save_pretrained(str(save))
    if not changed:
        same = replay.difference is None
        print(f"{count(steps, 'step')}: {'the same, bit for bit' if same else replay.difference}")
    print(json.dumps(replay.result(steps)), flush=True)
    if replay.difference is not None:
        raise typer.Exit(1)


def _config(run: RunReader, changed: Sequence[str]) -> RunConfig:
    from nearpolicy.config import config_from_dict

    if not isinstance(run.config, dict):
        raise RunFolderError(f"{run.folder.path} holds no recipe, so it ended before it began; name another run")
    for override in changed:
        if override.partition(".")[0] not in MAY_DIFFER:
            raise ConfigError(
                f"--with {override}: a recording can be learned from in another way ({', '.join(MAY_DIFFER)}), but "
                "what was sampled stays what it is"
            )
    return config_from_dict(run.config, where=str(run.folder.path), overrides=changed)


def _steps(run: RunReader, until: int | None) -> int:
    there = len(run.steps())
    if not there:
        raise RunFolderError(f"{run.folder.path} has no finished step; there is nothing to replay")
    if until is not None and not 0 < until <= there:
        raise ConfigError(f"--until {until}: the recording has {there} steps")
    return until or there


@dataclass
class Replay:
    """A recording and the learner that learns from it."""

    run: RunReader
    config: RunConfig
    compares: bool
    difference: str | None = field(default=None, init=False)
    """The first one to what was recorded."""
    compared: int = field(default=0, init=False)
    """Published versions whose weights were compared."""

    def __post_init__(self) -> None:
        from nearpolicy.launch import build
        from nearpolicy.launch.inline import settle
        from nearpolicy.machine import num_cores

        self.language = build.Language.of(self.config)
        model = build.load_model(self.config, self.language, print)
        threads = min(num_cores(), model.numerics.max_threads)
        # A thread of its own: what it needs for the same bits would stay with this one.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner", initializer=settle, initargs=(threads,))
        self.learner: PolicyLearner = build.make_learner(self.config, self.language, model.numerics, threads=threads)
        self._recorded: Mapping[int, VersionRecord] = {record.version: record for record in self.run.versions()}
        self._told = {line["step"]: line for line in self.run.metrics()}

    def train(self, steps: int) -> Iterator[str]:
        """A line for each step; ends at the first difference."""
        from nearpolicy.launch.warm_start import supervised_batches
        from nearpolicy.objectives.objective import Supervised

        warm = self.config.warm_start
        if warm.steps:
            tasks, renderer = self.config.tasks, self.language.renderer
            for rows in supervised_batches(self.language.mixture, tasks, warm, renderer):
                self._there(self.learner.supervised_step, rows, Supervised(), warm.learning_rate)
            self.learner.begin()
        self._compare_weights()
        for step in range(steps):
            if self.difference is not None:
                return
            batch = as_learned(self.config, self.run.batch(step))
            report = self._there(self.learner.step, batch)
            if self.compares:
                self._compare_metrics(step, report)
                self._compare_weights()
            loss = report.metrics.get("policy/loss")
            verdict = f": {'same' if self.difference is None else 'differs'}" if self.compares else ""
            yield f"step {step}, loss {'-' if loss is None else format(loss, '.6g')}{verdict}"

    def _there(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On the learner's thread."""
        return self._thread.submit(function, *arguments).result()

    def _compare_metrics(self, step: int, report: StepReport) -> None:
        told = self._told.get(step, {})
        for name in TOLD:
            if name in told and told[name] is not None and told[name] != report.metrics.get(name):
                self._differs(f"step {step}: {name} was {told[name]!r} and is {report.metrics.get(name)!r} now")

    def _compare_weights(self) -> None:
        known = self._recorded.get(self.learner.version)
        if known is None or not self.compares or self.difference is not None:
            return
        now = self.learner.weights(None)
        self.compared += 1
        if now.record.fingerprint == known.fingerprint:
            return
        then = self.run.digests(known)
        names = sorted(name for name in now.digests if then.get(name) != now.digests[name])
        which = f"; the tensors {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} differ" if then else ""
        when = f"after step {known.version - 1}" if known.version else "before the first step"
        self._differs(f"{when}: version {known.version} was {known.fingerprint} and is {now.record.fingerprint}{which}")

    def _differs(self, what: str) -> None:
        self.difference = self.difference or what

    def result(self, steps: int) -> dict[str, Any]:
        final = self.learner.weights(None).record.fingerprint
        found: dict[str, Any] = {"steps": steps, "fingerprint": final}
        if self.compares:
            found |= {"equal": self.difference is None, "versions_compared": self.compared}
            found |= {"difference": self.difference} if self.difference is not None else {}
        return found
