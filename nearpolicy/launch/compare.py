"""``nearpolicy compare``: several objectives on the same recorded rollouts, without generating anything.

    recorded batch of a step + kept weights -> gradient of each objective by group -> table, JSON, page
    --train N: each objective trains on the same N recorded batches from the same weights, then is evaluated

The gap between the weights that sampled and those the batch is put under is the staleness: ``--weights`` chooses it.
Whatever can be refused is refused before a model is loaded, and what has been computed is shown and written before
training begins.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, RunFolderError, SyncError, UserError
from nearpolicy.launch.words import count
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.learner.step import PolicyLearner
    from nearpolicy.models.policy import PolicyModel
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
    from nearpolicy.launch.compare_page import print_table, print_training
    from nearpolicy.store.folder import finite
    from nearpolicy.store.reader import RunReader

    with RunReader(run) as reader:
        config, chosen = choose_objectives(reader, files)
        step, version = choose(reader, at, weights)
        steps = steps_to_train(reader, step, train)
        refuse_impossible(reader, config, chosen, steps or [step], version)
        target = _free_place(out or run / "compare", f"step-{step}-weights-{version}")
        workshop = Workshop(reader, config, version)
        result = compare(workshop, chosen, step=step)
        try:
            print_table(result)
            _write(target, result)
            if steps:
                result["trained"] = finite(asyncio.run(workshop.train_each(chosen, steps)))
                print_training(result)
                _write(target, result)
            print(f"page: {target}.html")
        finally:
            print(json.dumps(result, allow_nan=False), flush=True)


def choose_objectives(run: RunReader, given: Sequence[str]) -> tuple[RunConfig, dict[str, ObjectiveConfig]]:
    """The run's recipe, and by name its own objective and those that are given, as parts of that recipe."""
    from nearpolicy.config import config_from_dict

    if not isinstance(run.config, dict):
        raise RunFolderError(f"{run.folder.path} holds no recipe, so it ended before it began; name another run")
    config = config_from_dict(run.config, where=str(run.folder.path))
    chosen = {RECORDED: config.objective}
    if config.critic is not None:
        _say("the recorded objective is left out: it needs its critic, and no recording holds a critic's weights")
        chosen, config = {}, config.model_copy(update={"critic": None})
    without_critic = {section: values for section, values in run.config.items() if section != "critic"}
    for source in given:
        name, settings = load_objective(source)
        if name == RECORDED:
            raise ConfigError(f"{source}: {RECORDED} is what the run's own objective is called; rename the file")
        if name in chosen:
            raise ConfigError(f"{source}: another objective is called {name} too; give it once, or rename one file")
        wanted = config_from_dict({**without_critic, "objective": settings}, where=name)
        if wanted.critic is not None:
            raise ConfigError(
                f"{name}: objective.advantage={wanted.objective.advantage} needs a critic, and no recording holds a "
                "critic's weights; compare another advantage"
            )
        chosen[name] = wanted.objective
    return config, chosen


def load_objective(given: str) -> tuple[str, dict[str, Any]]:
    """(name, settings) of a YAML file with a section `objective` or its keys alone, or of ``key=value,key=value``."""
    from nearpolicy.config import RunConfig, parse_mapping, read_yaml

    if "=" in given and not os.path.exists(given):  # unlike `Path.exists` it takes a name that no file can have
        pairs = [part.partition("=") for part in given.split(",") if part.strip()]
        if not pairs or not all(key.strip() and equals for key, equals, _ in pairs):
            raise ConfigError(f"{given}: cannot be read as an objective; write key=value,key=value")
        lines = [f"{key.strip().removeprefix('objective.')}: {value}" for key, _, value in pairs]
        return given, parse_mapping("\n".join(lines), given)
    data = parse_mapping(read_yaml(given, "an objective", "name a YAML file, or write key=value,key=value"), given)
    others = [key for key in data if key != "objective" and ("objective" in data or key in RunConfig.model_fields)]
    if others:
        raise ConfigError(
            f"{given}: holds {', '.join(map(str, others))}, and objectives are compared under the run's own recipe; "
            "name a file with the section objective alone"
        )
    settings = data.get("objective", data)
    if not isinstance(settings, dict):
        raise ConfigError(f"{given}: objective should be a mapping of keys, found {settings or 'nothing'!r}")
    return Path(given).stem, settings


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
    if at is not None and at not in steps:
        raise UserError(f"--at {at}: the run holds the steps {_ranges(steps)}")
    if weights is not None and weights not in kept:
        raise UserError(f"--weights {weights}: the run kept the versions {_ranges(kept)}; choose one of them")
    step = _last_usable(run, steps, kept, weights) if at is None else at
    if not _filled(run, step):
        raise UserError(f"--at {step}: no group was left for step {step} to train on; choose another one")
    version = step if weights is None else weights
    if version not in kept:
        raise UserError(
            f"step {step} began with version {version}, whose weights were not kept; choose --weights among "
            f"{_ranges(kept)}"
        )
    return step, version


def _last_usable(run: RunReader, steps: Sequence[int], kept: Sequence[int], weights: int | None) -> int:
    """The last step that has groups, and whose tokens are no newer than the weights."""
    for step in reversed(steps):
        if (step in kept if weights is None else step <= weights) and _filled(run, step):
            return step
    under = "the versions that were kept" if weights is None else f"--weights {weights}"
    raise UserError(f"{run.folder.path} has no step with groups that could be put under {under}; name one by --at")


def _filled(run: RunReader, step: int) -> bool:
    return any(consumed.place is not None for consumed in run.consumption(step))


def kept_versions(run: RunReader) -> list[int]:
    """Published versions whose weights lie in the run folder."""
    published = sorted({record.version for record in run.versions()})
    return [version for version in published if weights_file(run, version).is_file()]


def steps_to_train(run: RunReader, first: int, wanted: int) -> list[int]:
    """So many recorded steps from ``first`` on."""
    steps = [record.step for record in run.steps() if record.step >= first]
    if len(steps) < wanted:
        raise UserError(
            f"--train {wanted}: the run holds {count(len(steps), 'step')} from step {first} on; lower it, or begin "
            "earlier with --at"
        )
    return steps[:wanted]


def refuse_impossible(
    run: RunReader,
    config: RunConfig,
    objectives: Mapping[str, ObjectiveConfig],
    steps: Sequence[int],
    version: int,
) -> None:
    """Raise `UserError` for what would fail later: data newer than the weights, weights that are not those of the run,
    models and data that are gone, rewards that an objective has no formula for."""
    from nearpolicy.launch.build import reference_folder
    from nearpolicy.launch.check import refuse
    from nearpolicy.objectives.assign import assign_advantages

    batches = [run.batch(step) for step in steps]
    for place, batch in enumerate(batches):
        refuse_without_baselines(run, batch, objectives)
        newest = max((int(row.segment.versions.max(initial=0)) for row in batch.rows), default=0)
        if version + place < newest:
            raise UserError(
                f"--weights {version}: step {batch.step} holds tokens of version {newest}, so these weights are older "
                "than the data; choose that version or a later one"
            )
    for name, objective in objectives.items():
        try:
            refuse(config.model_copy(update={"objective": objective}), makes_run=False)
            if objective.reference not in ("none", "initial", "adapter_off"):
                reference_folder(objective.reference)
            for batch in batches:
                assign_advantages(batch.groups, objective, max_completion_length=config.sampling.max_completion_length)
        except UserError as error:
            raise ConfigError(f"{name}: {error}") from error
    from_the_start = [name for name, objective in objectives.items() if objective.reference == "initial"]
    if from_the_start and 0 not in kept_versions(run):
        raise UserError(
            f"{from_the_start[0]}: objective.reference=initial is version 0, whose weights are not in "
            f"{run.folder.weights}; name a model as objective.reference"
        )
    for needed in {version, *([0] if from_the_start else [])}:
        require_weights(run, needed, adapter=config.learner.lora is not None)


def compare(workshop: Workshop, objectives: Mapping[str, ObjectiveConfig], *, step: int) -> dict[str, Any]:
    """Everything that is printed and drawn of one batch, as one JSON object."""
    import numpy as np

    from nearpolicy.learner.gradients import GradientSketch, group_gradients
    from nearpolicy.objectives.comparison import cosine, distance
    from nearpolicy.store.folder import finite

    run, version = workshop.run, workshop.version
    batch = run.batch(step)
    rows, gradients = {}, {}
    sketch = None
    for name, objective in objectives.items():
        learner = workshop.learner(objective)
        sketch = sketch or GradientSketch(learner.policy)
        found = group_gradients(learner, batch, sketch)
        exact = group_gradients(workshop.learner(full_importance_sampling(objective)), batch, sketch)
        gap = distance(found, exact, rounds=ROUNDS, seed=workshop.config.run.seed)
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
        workshop.say(f"{name}: gradient of step {step} under version {version}")
    staleness = [version - group.oldest_version for group in batch.groups]
    return finite(
        {
            "run": run.name,
            "step": step,
            "weights": version,
            "groups": len(batch.groups),
            "tokens": batch.num_tokens,
            "staleness": {"mean": sum(staleness) / len(staleness), "max": max(staleness)},
            "gradients": "exact" if sketch.is_exact else "sketched",
            "objectives": rows,
            "cosines": {a: {b: cosine(x, y) for b, y in gradients.items()} for a, x in gradients.items()},
            "settings": {name: objective.model_dump(mode="json") for name, objective in objectives.items()},
        }
    )


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
    from nearpolicy.objectives.config import SHAPING, ObjectiveConfig

    same = ["loss_agg", "mask_truncated_completions", "same_support", "overlong_penalty", *SHAPING]
    if objective.kl_in == "reward" or objective.loss == "opd":
        same += ["kl_coef", "kl_in", "kl_estimator", "reference"]
    if objective.advantage not in ("vtrace", "teacher"):
        same += ["advantage", "scale_rewards", "pass_k", "gamma"]
    kept = {key: getattr(objective, key) for key in same}
    if objective.advantage == "vtrace":
        kept["advantage"] = "rloo"  # what V-trace is between equal policies at gamma 1
    loss = "opd" if objective.loss == "opd" else "pg"
    return ObjectiveConfig(loss=loss, correction="sequence_truncate", correction_cap=1e20, **kept)


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

    def __init__(
        self, run: RunReader, config: RunConfig, version: int, say: Callable[[str], None] | None = None
    ) -> None:
        from nearpolicy.launch import build

        self.say = say or _say
        self.run = run
        self.config = config
        self.version = version
        self._language = build.Language.of(config)
        self._model = build.load_model(config, self._language, self.say)
        self._learner: PolicyLearner | None = None
        self._references: dict[str, PolicyModel | None] = {"none": None}
        """By `objective.reference`: the models there, loaded once."""

    def learner(self, objective: ObjectiveConfig) -> PolicyLearner:
        """The learner with this objective, at the version's weights, with fresh moments."""
        import torch

        from nearpolicy.launch import build
        from nearpolicy.machine import num_cores
        from nearpolicy.models.weights import load_weights
        from nearpolicy.objectives.config import ObjectiveConfig

        config = self.config.model_copy(update={"objective": objective})
        if self._learner is None:
            threads = min(num_cores(), self._model.numerics.max_threads)
            torch.set_num_threads(threads)
            plain = self.config.model_copy(update={"objective": ObjectiveConfig()})
            self._learner = build.make_learner(plain, self._language, self._model.numerics, threads=threads)
        learner = self._learner
        if objective.reference not in self._references:
            reference = build.load_reference(config, self._language, learner.policy)
            if objective.reference == "initial" and reference.model is not learner.policy.model:
                self._load(learner, 0)
                load_weights(reference.model, learner.policy.weights())
            self._references[objective.reference] = reference
        learner.objective = build.make_objective(config)
        learner.reference = self._references[objective.reference]
        learner.config = config.learner
        self._load(learner, self.version)
        learner.restart(self.version)
        return learner

    async def train_each(
        self, objectives: Mapping[str, ObjectiveConfig], steps: Sequence[int]
    ) -> dict[str, dict[str, Any]]:
        """Objective -> metrics of each recorded step, and held-out accuracy before and after. A step is trained on with
        the learning rate that it had in the run, whatever the version is."""
        from nearpolicy.objectives.assign import assign_advantages
        from nearpolicy.objectives.config import ObjectiveConfig

        results: dict[str, dict[str, Any]] = {}
        before = await self._held_out(self.learner(ObjectiveConfig()))
        for name, objective in objectives.items():
            learner, lines = self.learner(objective), []
            for step in steps:
                batch = self.run.batch(step)
                rows = assign_advantages(
                    batch.groups, objective, max_completion_length=self.config.sampling.max_completion_length
                )
                learner.config = self._as_in(step)
                lines.append({"step": step, **learner.step(replace(batch, rows=rows)).metrics})
            results[name] = {
                "steps": lines,
                "held_out": {"before": before, "after": await self._held_out(learner)},
            }
            self.say(f"{name}: trained on {count(len(steps), 'recorded step')} from step {steps[0]} on")
        return results

    def _as_in(self, step: int) -> Any:
        """The learner's settings with the rate of a recorded step."""
        from nearpolicy.learner.schedule import learning_rate

        config = self.config.learner
        rate = learning_rate(
            step,
            peak=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self.config.run.steps,
        )
        return config.model_copy(update={"learning_rate": rate, "lr_schedule": "constant", "warmup_steps": 0})

    async def _held_out(self, learner: PolicyLearner) -> Mapping[str, object]:
        from nearpolicy.evaluate.evaluator import summary_of
        from nearpolicy.launch import build
        from nearpolicy.models.weights import load_weights
        from nearpolicy.verifier.service import VerifierService

        config = self.config
        if not any(task.held_out for task in config.tasks):
            return {}
        load_weights(self._model.policy.model, learner.policy.weights())
        verifier = VerifierService({task.name: task.rewards for task in config.tasks}, config.verifier)
        await verifier.start()
        parts = build.start_engine(config, self._language, self._model, lambda *_, **__: None, self.say)
        try:
            evaluator = build.make_evaluator(config, self._language, parts.runner, verifier)
            return summary_of(await evaluator.run(0, with_pass=False), config.evaluation.pass_k)
        finally:
            parts.runner.close()
            await verifier.close()

    def _load(self, learner: PolicyLearner, version: int) -> None:
        """Put the kept weights of a version into the learner, proved by the fingerprint under which they were
        published."""
        from nearpolicy.learner.checkpoint import load_saved_weights
        from nearpolicy.models.weights import digests, fingerprint

        file = weights_file(self.run, version)
        try:
            load_saved_weights(learner, file)
        except SyncError as error:
            raise RunFolderError(
                f"{file} does not fit {self.config.model.path}, which the run was made with: {error}; put that model "
                "back"
            ) from error
        _require_published(self.run, version, fingerprint(digests(learner.policy.weights())))


def _say(text: str) -> None:
    print(visible(text), flush=True)


def weights_file(run: RunReader, version: int) -> Path:
    return run.folder.weights / f"version-{version}.safetensors"


ADVICE = "fetch a copy of the run folder, or choose another --weights"


def require_weights(run: RunReader, version: int, *, adapter: bool) -> None:
    """Refuse weights of a version that cannot be read or are not those that the run published. Those of an ``adapter``
    are proved when they are loaded: the fingerprint is of the merged ones."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from nearpolicy.models.weights import digests, fingerprint

    file = weights_file(run, version)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}; {ADVICE}") from error
    if not adapter:
        _require_published(run, version, fingerprint(digests(tensors)))


def _require_published(run: RunReader, version: int, found: str) -> None:
    published = next(record.fingerprint for record in run.versions() if record.version == version)
    if found != published:
        raise RunFolderError(
            f"{weights_file(run, version)} holds weights with the fingerprint {found}, and the run published version "
            f"{version} as {published}; {ADVICE}"
        )


def _row(found: GroupGradients) -> dict[str, Any]:
    """What the table says of one objective."""
    import numpy as np

    stopped = ("policy/clip_low_share", "policy/clip_high_share", "policy/outside_trust_share")
    clipped = [found.means[name] for name in stopped if name in found.means]
    return {
        "loss": found.loss,
        "gradient_norm": float(np.linalg.norm(found.gradient())),
        "ess": found.means.get("mismatch/ess"),
        "weight_mean": found.means.get("correction/weight_mean"),
        "clipped_share": sum(clipped) if clipped else None,
        "rejected_share": found.means.get("correction/rejected_share"),
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, neighbours together: ``0 to 3, 5, 7 to 12``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(words if len(words) <= 12 else [*words[:10], "...", words[-1]])


def _free_place(folder: Path, stem: str) -> Path:
    """Where the page and the JSON go, without their endings: never over those of an earlier comparison."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{stem}.tmp"
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
    return next(place for place in _names(folder / stem) if not any(map(os.path.exists, _files(place))))


def _names(first: Path) -> Iterator[Path]:
    yield first
    number = 2
    while True:
        yield first.with_name(f"{first.name}-{number}")
        number += 1


def _files(place: Path) -> tuple[Path, Path]:
    return place.with_name(f"{place.name}.json"), place.with_name(f"{place.name}.html")


def _write(place: Path, result: Mapping[str, Any]) -> None:
    from nearpolicy.launch.compare_page import comparison_page

    texts = json.dumps(result, indent=1, allow_nan=False), comparison_page(result)
    try:
        for file, text in zip(_files(place), texts, strict=True):
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{place} cannot be written ({error.strerror}); choose another --out") from error
