"""``nearpolicy compare``: several objectives on the same recorded rollouts, without generating anything.

    recorded batch of a step + kept weights -> gradient of each objective by group -> table, JSON, page
    --train N: each objective trains on the same N recorded batches from the same weights, then is evaluated

The gap between the weights that sampled and those the batch is put under is the staleness: ``--weights`` chooses it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, RunFolderError, UserError

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.learner.step import PolicyLearner
    from nearpolicy.objectives.comparison import GroupGradients
    from nearpolicy.objectives.config import ObjectiveConfig
    from nearpolicy.records import Batch
    from nearpolicy.store.reader import RunReader

RECORDED = "recorded"
"""The name of the objective that the run itself had."""
ROUNDS = 400
"""Resampled updates of the bootstrap."""


def command(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    files: Annotated[list[str], typer.Argument(metavar="OBJECTIVE...", help="YAML files, or key=value,key=value.")],
    objectives: Annotated[bool, typer.Option("--objectives", help="May stand before the objectives.")] = False,
    at: Annotated[
        int | None, typer.Option(help="The recorded step; the last one that can be used, unless given.")
    ] = None,
    weights: Annotated[
        int | None, typer.Option(help="Version of the weights; those the step began with, unless given.")
    ] = None,
    train: Annotated[int, typer.Option(help="Also train each on so many recorded steps, and evaluate.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page and the JSON; RUN/compare unless given.")
    ] = None,
) -> None:
    """Compare objectives on a run's recorded rollouts; the last line is one JSON object."""
    from nearpolicy.config import config_from_dict
    from nearpolicy.launch.compare_page import comparison_page, print_table
    from nearpolicy.store.reader import RunReader

    with RunReader(run) as reader:
        config = config_from_dict(reader.config, where=str(run))
        chosen = {RECORDED: config.objective}
        for name, settings in map(load_objective, files):
            if name in chosen:
                raise ConfigError(f"two objectives are called {name}; rename one of the files")
            chosen[name] = config_from_dict({**reader.config, "objective": settings}, where=name).objective
        step, version = choose(reader, at, weights)
        result = asyncio.run(compare(reader, config, chosen, step=step, version=version, train=train))
    print_table(result)
    folder = out or run / "compare"
    stem = f"step-{step}-weights-{version}"
    _write(folder, {f"{stem}.json": json.dumps(result, indent=1), f"{stem}.html": comparison_page(result)})
    print(f"page: {folder / stem}.html")
    print(json.dumps(result))


def load_objective(given: str) -> tuple[str, dict[str, Any]]:
    """(name, settings) of a YAML file with a section `objective` or its keys alone, or of ``key=value,key=value``."""
    from nearpolicy.config import parse_mapping

    path = Path(given)
    if "=" in given and not path.exists():
        return given, parse_mapping("\n".join(part.replace("=", ": ", 1) for part in given.split(",")), given)
    try:
        data = parse_mapping(path.read_text(encoding="utf-8"), given)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{given}: cannot be read as an objective ({getattr(error, 'strerror', None) or error}); "
            "name a YAML file, or write key=value,key=value"
        ) from None
    inside = data.get("objective", data)
    return path.stem, inside if isinstance(inside, dict) else data


def choose(run: RunReader, at: int | None, weights: int | None) -> tuple[int, int]:
    """The step to look at and the version to put it under; `UserError` says which there are."""
    steps = [record.step for record in run.steps()]
    kept = kept_versions(run)
    if not steps:
        raise RunFolderError(f"{run.folder.path} has no finished step; there is nothing recorded to compare on")
    if not kept:
        raise RunFolderError(
            f"{run.folder.path} kept no weights of its versions, so no objective can be put under those of a step; "
            "train with run.keep_versions=true"
        )
    step = at if at is not None else max((s for s in steps if s in kept), default=steps[-1])
    if step not in steps:
        raise UserError(f"--at {step}: the run holds steps {_ranges(steps)}")
    version = weights if weights is not None else step
    if version not in kept:
        raise UserError(f"--weights {version}: the run kept the versions {_ranges(kept)}; choose one of them")
    return step, version


def kept_versions(run: RunReader) -> list[int]:
    """Versions whose weights lie in the run folder."""
    found = (path.stem.removeprefix("version-") for path in run.folder.weights.glob("version-*.safetensors"))
    return sorted(int(number) for number in found if number.isdecimal())


async def compare(
    run: RunReader,
    config: RunConfig,
    objectives: Mapping[str, ObjectiveConfig],
    *,
    step: int,
    version: int,
    train: int,
) -> dict[str, Any]:
    """Everything that is printed and drawn, as one JSON object."""
    import numpy as np

    from nearpolicy.learner.gradients import GradientSketch, group_gradients
    from nearpolicy.objectives.comparison import cosine, distance

    batch = run.batch(step)
    newest = max((int(row.segment.versions.max(initial=0)) for row in batch.rows), default=0)
    if version < newest:
        raise UserError(
            f"--weights {version}: step {step} holds tokens of version {newest}, so these weights are older than the "
            "data; choose that version or a later one"
        )
    refuse_without_baselines(run, batch, objectives)
    workshop = Workshop(run, config, version)
    rows, gradients = {}, {}
    sketch = None
    for name, objective in objectives.items():
        learner = workshop.learner(objective)
        sketch = sketch or GradientSketch(learner.policy)
        found = group_gradients(learner, batch, sketch)
        exact = group_gradients(workshop.learner(full_importance_sampling(objective)), batch, sketch)
        gap = distance(found, exact, rounds=ROUNDS, seed=config.run.seed)
        gradients[name] = found.gradient()
        rows[name] = _row(found) | {
            "gradient_norm_by_part": {
                part: float(np.linalg.norm(gradients[name] - without.gradient()))
                for part, other in without_a_part(objective).items()
                for without in [group_gradients(workshop.learner(other), batch, sketch)]
            },
            "cosine_to_importance_sampling": cosine(gradients[name], exact.gradient()),
            "importance_sampling": None if gap is None else asdict(gap),
        }
    staleness = [version - group.oldest_version for group in batch.groups]
    result = {
        "run": run.name,
        "step": step,
        "weights": version,
        "groups": len(batch.groups),
        "tokens": batch.num_tokens,
        "staleness": {"mean": sum(staleness) / len(staleness), "max": max(staleness)},
        "gradients": "exact" if sketch.is_exact else "sketched",
        "objectives": rows,
        "cosines": {a: {b: cosine(x, y) for b, y in gradients.items()} for a, x in gradients.items()},
    }
    if train:
        result["trained"] = await workshop.train_each(objectives, first=step, steps=train)
    return result


def refuse_without_baselines(run: RunReader, batch: Batch, objectives: Mapping[str, ObjectiveConfig]) -> None:
    """`UserError` for an objective that compares with greedy completions where the run recorded none."""
    if all(group.baseline is not None for group in batch.groups):
        return
    for name, objective in objectives.items():
        if objective.greedy_baseline:
            raise UserError(
                f"{name}: objective.advantage={objective.advantage} compares with a greedy completion of each prompt, "
                f"and {run.folder.path} recorded none. Train with objective.advantage={objective.advantage} for a "
                "recording that has them (any other advantage can be compared on it), or use rloo here"
            )


def full_importance_sampling(objective: ObjectiveConfig) -> ObjectiveConfig:
    """The same advantages and divisor with whole-sequence importance weights, uncapped: no bias, any variance."""
    from nearpolicy.objectives.config import ObjectiveConfig

    kept = {
        key: getattr(objective, key)
        for key in ("mask_truncated_completions", "overlong_buffer", "overlong_penalty", "length_cost", "length_reward")
    }
    if objective.advantage == "vtrace":
        kept["advantage"] = "rloo"  # what V-trace is between equal policies at gamma 1
    elif objective.advantage != "teacher":
        kept |= {key: getattr(objective, key) for key in ("advantage", "scale_rewards", "pass_k", "gamma")}
    return ObjectiveConfig(
        loss="pg", correction="sequence_truncate", correction_cap=1e20, loss_agg=objective.loss_agg, **kept
    )


def without_a_part(objective: ObjectiveConfig) -> dict[str, ObjectiveConfig]:
    """Each part of the loss beside the policy's -> the objective without it; the gradient is the sum of its parts."""
    others = {}
    if objective.kl_in == "loss":
        others["kl"] = objective.model_copy(update={"kl_coef": 0.0, "kl_in": None, "reference": "none"})
    if objective.entropy_coef:
        others["entropy"] = objective.model_copy(update={"entropy_coef": 0.0})
    return others


class Workshop:
    """The run's learner at one version of its weights, under one objective after another."""

    def __init__(self, run: RunReader, config: RunConfig, version: int) -> None:
        from nearpolicy.launch import build

        self._run = run
        self._config = config
        self._version = version
        self._language = build.Language.of(config)
        self._model = build.load_model(config, self._language, print)
        self._learner: PolicyLearner | None = None

    def learner(self, objective: ObjectiveConfig) -> PolicyLearner:
        """The learner with this objective, at the version's weights, with fresh moments."""
        import torch

        from nearpolicy.launch import build
        from nearpolicy.machine import num_cores

        config = self._config.model_copy(update={"objective": objective})
        if self._learner is None:
            threads = min(num_cores(), self._model.numerics.max_threads)
            torch.set_num_threads(threads)
            self._learner = build.make_learner(config, self._language, self._model.numerics, threads=threads)
        learner = self._learner
        learner.objective = build.make_objective(config)
        learner.reference = build.load_reference(config, self._language, learner.policy)
        if objective.reference == "initial":
            self._load(learner, 0)
            learner.settle_reference()
        self._load(learner, self._version)
        learner.restart(self._version)
        return learner

    async def train_each(
        self, objectives: Mapping[str, ObjectiveConfig], *, first: int, steps: int
    ) -> dict[str, dict[str, Any]]:
        """Objective -> metrics of its last step, and held-out accuracy before and after."""
        from nearpolicy.objectives.assign import assign_advantages

        recorded = [record.step for record in self._run.steps() if record.step >= first][:steps]
        if len(recorded) < steps:
            raise UserError(f"--train {steps}: the run holds {len(recorded)} steps from step {first} on")
        results: dict[str, dict[str, Any]] = {}
        before = await self._held_out(self.learner(self._config.objective))
        for name, objective in objectives.items():
            learner, lines = self.learner(objective), []
            for step in recorded:
                batch = self._run.batch(step)
                rows = assign_advantages(
                    batch.groups,
                    objective,
                    max_completion_length=self._config.sampling.max_completion_length,
                )
                lines.append(dict(learner.step(replace(batch, rows=rows)).metrics))
            results[name] = {
                "steps": lines,
                "held_out": {"before": before, "after": await self._held_out(learner)},
            }
            print(f"{name}: trained on steps {recorded[0]} to {recorded[-1]}", flush=True)
        return results

    async def _held_out(self, learner: PolicyLearner) -> Mapping[str, object]:
        from nearpolicy.evaluate.evaluator import summary_of
        from nearpolicy.launch import build
        from nearpolicy.models.weights import load_weights
        from nearpolicy.verifier.service import VerifierService

        config = self._config
        if not any(task.held_out for task in config.tasks):
            return {}
        load_weights(self._model.policy.model, learner.policy.weights())
        verifier = VerifierService({task.name: task.rewards for task in config.tasks}, config.verifier)
        await verifier.start()
        parts = build.start_engine(config, self._language, self._model, lambda *_, **__: None, print)
        try:
            await parts.runner.set_threads(parts.all_threads)
            evaluator = build.make_evaluator(config, self._language, parts.runner, verifier)
            return summary_of(await evaluator.run(0, with_pass=False), config.evaluation.pass_k)
        finally:
            parts.runner.close()
            await verifier.close()

    def _load(self, learner: PolicyLearner, version: int) -> None:
        from nearpolicy.learner.checkpoint import load_saved_weights

        load_saved_weights(learner, self._run.folder.weights / f"version-{version}.safetensors")


def _row(found: GroupGradients) -> dict[str, Any]:
    """What the table says of one objective."""
    import numpy as np

    clipped = [
        found.means[f"policy/clip_{side}_share"]
        for side in ("low", "high")
        if f"policy/clip_{side}_share" in found.means
    ]
    return {
        "loss": found.loss,
        "gradient_norm": float(np.linalg.norm(found.gradient())),
        "ess": found.means.get("mismatch/ess"),
        "weight_mean": found.means.get("correction/weight_mean"),
        "clipped_share": sum(clipped) if clipped else None,
        "rejected_share": found.means.get("correction/rejected_share"),
    }


def _ranges(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 12 else f"{numbers[0]} to {numbers[-1]}"


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
