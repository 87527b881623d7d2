"""The whole recipe: one field per section, the checks that involve two of them, and the way from YAML and back.

    file.yaml + section.key=value  ->  load_recipe  ->  RunConfig  ->  dump_resolved  ->  the run folder's config.yaml

Every key is used or refused. All problems of a recipe are reported at once, one line each. Nothing here loads
torch or transformers."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from nearpolicy.errors import ConfigError, described, nearest
from nearpolicy.evaluate.config import EvaluationConfig
from nearpolicy.generator.config import GeneratorConfig, SamplingConfig
from nearpolicy.learner.config import CheckpointConfig, CriticConfig, LearnerConfig, WarmStartConfig
from nearpolicy.models.config import ModelConfig
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.placement import RuntimeConfig
from nearpolicy.recipe_keys import explain_unknown_key, other_names
from nearpolicy.rollout_queue.config import QueueConfig
from nearpolicy.settings import ConfigModel, PathText, Seed
from nearpolicy.store.config import LONGEST_RUN_NAME, RUN_NAME, RUN_NAME_RULE, StoreConfig
from nearpolicy.sync.config import SyncConfig
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.telemetry.config import MonitorConfig, TelemetryConfig
from nearpolicy.verifier.config import VerifierConfig
from nearpolicy.visible import visible

MOST_SLOTS = 100_000
MOST_COMPLETIONS = 10_000_000
LARGEST_WHOLE = 10**9
"""For every whole number that is no seed."""
SMALLEST, LARGEST = 1e-30, 1e20
"""For every other number that is not 0."""
LONGEST_RECIPE = 1_000_000
"""Bytes."""
MOST_VALUES = 20_000
"""Values in a recipe, those that an alias repeats counted each time."""
IN_A_WORD = {"runtime": "kind"}
"""Section -> the key that is meant where it is a word."""
DEEPEST = 40
"""Levels of mappings and lists in a recipe."""
HALF_CHARACTER = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
"""Half of a surrogate pair alone; the two together, as JSON writes them, are one character."""


class RunSection(ConfigModel):
    """Section `run`: what the run is called, where it lives, how long it goes on."""

    name: str = "run"
    """Names the run and its folder; unless set, the file name of the recipe. Letters, digits, `-`, `_`, `+`, `.`."""
    dir: PathText | None = Field(None, min_length=1)
    """The run folder. Left out: `runs/NAME-NUMBER`, with the first free number."""
    seed: Seed = 0
    """Decides prompts, held-out sets and every sampled token."""
    steps: PositiveInt
    """Steps to train."""
    numerics: Literal["exact", "fast"] | None = None
    """`exact`: engine and learner agree bit for bit (float32 on a CPU). `fast`: the gap is measured and corrected. Left
    out: `exact` wherever it is to be had."""
    keep_versions: bool = False
    """Keep the weights of every published version in the run folder."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name) or len(name.encode()) > LONGEST_RUN_NAME:
            raise ValueError(f"run.name is {name!r}; {RUN_NAME_RULE}")
        return name


class RunConfig(ConfigModel):
    """A resolved recipe. Roles get their own section, never this."""

    run: RunSection
    """Name, folder, seed, length."""
    model: ModelConfig
    """The weights the run starts from."""
    tasks: list[TaskConfig] = Field(min_length=1)
    """Prompts and rewards."""
    sampling: SamplingConfig = SamplingConfig()
    """How training completions are drawn."""
    generator: GeneratorConfig = GeneratorConfig()
    """The embedded engine."""
    queue: QueueConfig = QueueConfig()
    """Batch size, staleness, time limits."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Advantages, loss, correction."""
    learner: LearnerConfig = LearnerConfig()
    """Optimizer and micro-batches."""
    critic: CriticConfig | None = Field(default_factory=lambda data: _critic_for(data.get("objective")))
    """The value model; there with `objective.advantage: gae`."""
    sync: SyncConfig = SyncConfig()
    """Publication of weights."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    verifier: VerifierConfig = VerifierConfig()
    """Workers and limits of rewards."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised steps before step 0."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept of the weights."""
    store: StoreConfig = StoreConfig()
    """The durable record."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Where metrics go."""
    monitors: list[MonitorConfig] = Field(default_factory=list)
    """Metrics that raise an alarm."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where the roles live."""

    @property
    def numerics(self) -> Literal["exact", "fast"]:
        """The mode asked for; what the machine can really do is probed at start."""
        return self.run.numerics or ("exact" if self.model.dtype == "float32" else "fast")

    @property
    def same_support(self) -> bool:
        """Whether log-probabilities are over the tokens that could be sampled, which are then recorded."""
        return self.sampling.leaves_out if self.objective.same_support is None else self.objective.same_support

    @property
    def num_slots(self) -> int:
        """Groups admitted but not yet in published weights, at most."""
        return math.floor(self.generator.oversample * self.queue.num_slots + 1e-6)  # 1.15 * 20 is 22.999...

    @property
    def hands_over(self) -> bool:
        """Whether a rank of the learner gives its generator weights by handles to the memory of a device that both have
        (`sync.transport: device_handles`, or auto on GPUs that they share)."""
        runtime = self.runtime
        if self.sync.transport != "auto":
            return self.sync.transport == "device_handles"
        parts = runtime.gpus_per_learner, runtime.gpus_per_generator
        return runtime.kind == "ray" and runtime.placement == "colocated" and min(parts) > 0 and sum(parts) <= 1

    @property
    def reference_is_base(self) -> bool:
        """Whether the policy to compare with is the model without its adapter, of which no second copy is needed.

        Without a warm start an adapter begins as no change, so that this is the initial policy too.
        """
        initial = self.objective.reference == "initial" and not self.warm_start.steps
        return self.learner.lora is not None and (initial or self.objective.reference == "adapter_off")

    @property
    def completions_per_group(self) -> int:
        """Samples, and the greedy completion where the objective needs one."""
        return self.sampling.num_generations + self.objective.greedy_baseline

    @property
    def completions_per_step(self) -> int:
        return self.queue.prompts_per_step * self.completions_per_group

    @model_validator(mode="after")
    def _roles_fit_together(self) -> Self:
        problems = list(contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _critic_for(objective: ObjectiveConfig | None) -> CriticConfig | None:
    """The section `critic` where nobody writes it. No objective: it was refused."""
    return CriticConfig() if objective is not None and objective.advantage == "gae" else None


def contradictions(config: RunConfig) -> Iterator[str]:
    """Settings of different sections that cannot work together, one sentence each."""
    queue, sampling, learner = config.queue, config.sampling, config.learner
    if config.sync.weight_sync_steps - 1 > queue.max_staleness:
        yield (
            f"sync.weight_sync_steps={config.sync.weight_sync_steps} lets weights grow "
            f"{config.sync.weight_sync_steps - 1} steps old before the next publication, but "
            f"queue.max_staleness={queue.max_staleness}; raise the bound or publish more often"
        )
    if queue.prompts_per_step % learner.minibatches:
        yield (
            f"queue.prompts_per_step={queue.prompts_per_step} cannot be cut into "
            f"learner.minibatches={learner.minibatches} equal parts; make it a multiple"
        )
    longest = sampling.max_prompt_length + sampling.max_completion_length
    if longest > learner.max_tokens_per_microbatch:
        yield (
            f"learner.max_tokens_per_microbatch={learner.max_tokens_per_microbatch} cannot hold one sequence of "
            f"sampling.max_prompt_length + sampling.max_completion_length = {longest} tokens; "
            "raise it or shorten sequences"
        )
    if config.evaluation.every % config.sync.weight_sync_steps:
        yield (
            f"evaluation.every={config.evaluation.every} falls on steps whose weights are not published, every "
            f"sync.weight_sync_steps={config.sync.weight_sync_steps}; make it a multiple"
        )
    if config.run.numerics == "exact" and config.model.dtype != "float32":
        yield f"run.numerics=exact needs model.dtype=float32, found {config.model.dtype}; use run.numerics=fast"
    if config.generator.weights != "same":
        yield from _packed_contradictions(config)
    samples = queue.prompts_per_step * sampling.num_generations
    if config.generator.oversample > 1 and queue.at_bound == "wait":
        yield (
            f"generator.oversample={config.generator.oversample:g} starts more groups than may be trained within the "
            "bound; set queue.order: ready and queue.at_bound: drop or requeue, or leave it out"
        )
    if config.generator.oversample > 1 and config.num_slots == queue.num_slots:
        yield (
            f"generator.oversample={config.generator.oversample:g} adds no group to the {queue.num_slots} of "
            f"(queue.max_staleness + 1) * queue.prompts_per_step; use at least {1 + 1 / queue.num_slots:.3g}, or leave "
            "it out"
        )
    rounds = math.ceil(config.num_slots / queue.prompts_per_step)
    if config.generator.oversample > 1 and queue.dynamic_sampling and rounds > (queue.max_rounds or 0):
        yield (
            f"queue.max_rounds={queue.max_rounds} would keep generator.oversample={config.generator.oversample:g} "
            f"from starting {config.num_slots} groups; use at least {rounds}"
        )
    if config.num_slots > MOST_SLOTS or samples > MOST_COMPLETIONS:
        yield (
            f"{_slots_in_words(config)} = {config.num_slots:,} groups at once and "
            f"sampling.num_generations * queue.prompts_per_step = {samples:,} completions per step "
            f"are more than the {MOST_SLOTS:,} and {MOST_COMPLETIONS:,} that this program is made for; lower them"
        )
    yield from _runtime_contradictions(config)
    yield from _objective_contradictions(config)
    yield from _critic_contradictions(config)
    yield from _task_contradictions(config)
    yield from _retention_contradictions(config)
    yield from _idle_settings(config)
    yield from _out_of_range(config.model_dump(), ())


def _runtime_contradictions(config: RunConfig) -> Iterator[str]:
    """What roles cannot do where they live."""
    if config.generator.most_replicas is not None and config.runtime.kind == "inline":
        yield "generator.most_replicas needs a cluster; set runtime.kind=ray, or leave it out"
    replicas, ranks, one_process = config.generator.replicas, config.learner.ranks, config.runtime.kind == "inline"
    if replicas > 1 and one_process:
        yield (f"generator.replicas={replicas} needs processes of their own; set runtime.kind=ray, or leave it out")
    if (alone := config.learner.needs_processes) is not None and one_process:
        yield f"{alone} needs processes of their own; set runtime.kind=ray, or leave it out"
    transport = config.sync.transport
    if transport not in ("auto", "direct") and one_process:
        yield (
            f"sync.transport={transport} has no effect where learner and generator are one process; set "
            "runtime.kind=ray, or leave it out"
        )
    if transport == "direct" and not one_process:
        yield "sync.transport=direct needs learner and generator in one process; leave it out with runtime.kind=ray"
    if not one_process:
        yield from _handle_contradictions(config)
    if config.runtime.placement == "colocated":
        if not one_process and replicas != ranks:
            yield (
                f"runtime.placement=colocated puts a generator and a rank of the learner in each place, and there are "
                f"generator.replicas={replicas} and learner.ranks={ranks}; make them equal"
            )
        if config.generator.most_replicas is not None:
            yield (
                "generator.most_replicas adds generators that have no rank of the learner beside them, which "
                "runtime.placement=colocated does not do; leave one of them out"
            )


def _handle_contradictions(config: RunConfig) -> Iterator[str]:
    """What rank and generator of a place cannot do, where weights go from one to the other by handles."""
    runtime, sync = config.runtime, config.sync
    if sync.transport == "device_handles" and runtime.placement != "colocated":
        yield (
            "sync.transport=device_handles leads from a rank of the learner to the generator on the same device; set "
            "runtime.placement: colocated, or leave it out"
        )
    elif config.hands_over and runtime.rank_timeout_s <= 2 * sync.timeout_s:
        yield (
            f"a rank of the learner hands weights over itself, which may take twice sync.timeout_s={sync.timeout_s:g}, "
            f"and would count as lost after runtime.rank_timeout_s={runtime.rank_timeout_s:g}; raise the latter or "
            "lower the former"
        )


def _slots_in_words(config: RunConfig) -> str:
    over = " * generator.oversample" if config.generator.oversample > 1 else ""
    return f"(queue.max_staleness + 1) * queue.prompts_per_step{over}"


def _packed_contradictions(config: RunConfig) -> Iterator[str]:
    """What an engine with another form of the weights cannot keep."""
    wanted = f"generator.weights={config.generator.weights}"
    if config.numerics == "exact":
        yield f"{wanted} makes engine and learner differ; set run.numerics=fast, or leave it out for exact numerics"
    if config.model.dtype != "float32":
        yield f"{wanted} is a copy of float32 weights and model.dtype is {config.model.dtype}; leave it out"


def _objective_contradictions(config: RunConfig) -> Iterator[str]:
    """Parts of the objective that need other sizes or another way of sampling."""
    sampling, learner, objective = config.sampling, config.learner, config.objective
    smallest = objective.parts["advantage"].smallest_group
    if sampling.num_generations < smallest:
        yield (
            f"sampling.num_generations={sampling.num_generations} leaves objective.advantage={objective.advantage} "
            f"nothing to compare with, every advantage would be 0; use at least {smallest}"
        )
    if config.queue.replay is not None:
        yield from _replay_contradictions(objective)
        if config.sampling.num_generations == 1:
            yield (
                "queue.replay draws groups whose completions have different rewards, and sampling.num_generations=1 "
                "makes none; sample more, or leave queue.replay out"
            )
    if config.queue.soft_staleness is not None and objective.needs_annotations:
        yield (
            "queue.soft_staleness multiplies advantages before the learner sees them, and those of "
            f"objective.advantage={objective.advantage} are made there; leave one of them out"
        )
    drops = config.queue.drop_zero_variance_groups or config.queue.dynamic_sampling
    if drops and sampling.num_generations == 1 and not objective.greedy_baseline:
        key = "dynamic_sampling" if config.queue.dynamic_sampling else "drop_zero_variance_groups"
        yield (
            f"queue.{key}=true leaves out groups whose rewards are all equal, and with sampling.num_generations=1 that "
            "is every group; leave it out or draw more completions"
        )
    if objective.pass_k is not None and objective.pass_k >= sampling.num_generations:
        yield (
            f"objective.pass_k={objective.pass_k} takes the whole group, "
            f"sampling.num_generations={sampling.num_generations}, so that no two subsets of k could be compared and "
            "every advantage would be 0; lower it"
        )
    if objective.advantage == "grpo_passk":
        yield from _rewards_beside_0_and_1(config)
    if objective.parts["loss"].one_update and learner.updates_per_step > 1:
        yield (
            f"objective.loss={objective.loss} is right for one update per step, but learner.num_iterations x "
            f"learner.minibatches is {learner.updates_per_step}; "
            f"{'use objective.loss=ppo_clip, or ' if objective.loss == 'pg' else ''}set both to 1"
        )
    if objective.same_support and not sampling.leaves_out:
        yield (
            "objective.same_support=true has no effect where every token can be sampled; leave it out, or set "
            "sampling.top_p, top_k or min_p"
        )
    if objective.reference == "adapter_off" and learner.lora is None:
        yield (
            "objective.reference=adapter_off is the model without its adapter, but every weight is trained; set "
            "learner.lora, or use objective.reference=initial"
        )
    if objective.overlong_buffer is not None and objective.overlong_buffer > sampling.max_completion_length:
        yield (
            f"objective.overlong_buffer={objective.overlong_buffer} is longer than "
            f"sampling.max_completion_length={sampling.max_completion_length}; lower it"
        )


def _replay_contradictions(objective: ObjectiveConfig) -> Iterator[str]:
    if objective.correction == "none" and "correction" not in objective.parts["loss"].fixes:
        yield (
            "queue.replay trains tokens of much older weights, and objective.correction=none would weigh them as if "
            "they were of now; choose a correction, or leave queue.replay out"
        )
    if objective.needs_annotations or not objective.by_group:
        cause = next(
            f"objective.{key}={getattr(objective, key)}"
            for key in ("kl_in", "advantage", "scale_rewards")
            if objective.needs_annotations or key != "kl_in"
            if getattr(objective, key) in ("reward", "vtrace", "teacher", "gae", "reinforce_baseline", "batch")
        )
        yield (
            f"queue.replay keeps the advantages that completions have in their group, and with {cause} they depend on "
            "more than the group; change that, or leave queue.replay out"
        )


def _rewards_beside_0_and_1(config: RunConfig) -> Iterator[str]:
    """What pass@k cannot be computed of, as far as a recipe says what rewards will be."""
    for index, task in enumerate(config.tasks):
        counted = [reward for reward in task.rewards if reward.weight]
        plain = [reward for reward in counted if reward.kind not in ("judge", "rubric", "reward_model")]
        fits = [reward for reward in plain if reward.weight == 1 and not _gives_parts(reward)]
        if len(counted) != 1 or not fits:
            yield (
                f"tasks.{index}.rewards: objective.advantage=grpo_passk needs rewards of 0 or 1; give one reward the "
                "weight 1 (and partial 0 or 1, credit all) and any others the weight 0"
            )


def _gives_parts(reward: Any) -> bool:
    """Whether a setting of a reward asks for values between 0 and 1."""
    return getattr(reward, "partial", 1) not in (0, 1) or getattr(reward, "credit", "all") != "all"


def _critic_contradictions(config: RunConfig) -> Iterator[str]:
    critic, advantage = config.critic, config.objective.advantage
    if critic is None:
        if advantage == "gae":
            yield "objective.advantage=gae needs a critic; leave `critic` out for its defaults"
        return
    if not config.objective.parts["advantage"].uses_values:
        yield (
            f"critic is set, but objective.advantage={advantage} has no use for values; leave `critic` out, or set "
            "objective.advantage=gae"
        )
    if advantage == "vtrace":
        why = "but the targets of objective.advantage=vtrace have no lambda; leave it out"
        yield from _changed("critic", critic, ("gae_lambda",), why)
    if critic.pretraining_steps >= config.run.steps:
        yield (
            f"critic.pretraining_steps={critic.pretraining_steps} trains the critic alone for all of the run's "
            f"run.steps={config.run.steps}; lower it or train longer"
        )


def _out_of_range(value: Any, path: tuple[Any, ...]) -> Iterator[str]:
    """Numbers that are a slip of the hand in any setting: products of them would leave the range of numbers."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from _out_of_range(inside, (*path, key))
    elif isinstance(value, list | tuple):
        for place, inside in enumerate(value):
            yield from _out_of_range(inside, (*path, place))
    elif isinstance(value, int) and "seed" not in path and abs(value) > LARGEST_WHOLE:
        yield f"{'.'.join(map(str, path))} is {_shown(value)}; use at most {LARGEST_WHOLE:,}"
    elif isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
        yield f"{'.'.join(map(str, path))} is {value:g}; use 0 or something between {SMALLEST:g} and {LARGEST:g}"


def _retention_contradictions(config: RunConfig) -> Iterator[str]:
    store, steps = config.store, config.store.retention_steps
    if steps is None:
        return
    if not config.checkpoint.every:
        yield (
            f"store.retention: {store.retention} could never act: with checkpoint.every=0 a resume learns all recorded "
            "steps again, so that the payloads of all of them must stay. Set checkpoint.every, or store.retention: keep"
        )
    elif steps >= config.run.steps:
        yield (
            f"store.retention_steps={steps} never ends in a run of run.steps={config.run.steps} steps, so that "
            f"store.retention: {store.retention} has no effect; lower it, or set store.retention: keep"
        )
    if store.retention == "drop" and any(monitor.action == "rollback" for monitor in config.monitors):
        yield (
            "store.retention: drop removes what a monitor with action: rollback may have to learn again; use "
            "store.retention: parquet, or another action"
        )
    if store.retention == "drop" and config.queue.replay is not None:
        yield (
            "store.retention: drop removes what queue.replay may draw, and a resume has to learn again; use "
            "store.retention: parquet"
        )


def _idle_settings(config: RunConfig) -> Iterator[str]:
    """Settings that nothing reads because another one switches off what they belong to."""
    if not any(task.held_out for task in config.tasks):
        keys = ("every", "pass_k", "prompts", "temperature", "num_samples", "pass_temperature", "max_completion_length")
        why = "but no task holds out questions; set tasks.0.held_out or leave it out"
        yield from _changed("evaluation", config.evaluation, keys, why)
    if not config.warm_start.steps:
        why = "but there is no warm start; set warm_start.steps or leave it out"
        yield from _changed("warm_start", config.warm_start, ("learning_rate", "batch_size"), why)
    if not config.checkpoint.every:
        why = "but the only checkpoint is the one at the end; set checkpoint.every or leave it out"
        yield from _changed("checkpoint", config.checkpoint, ("keep_last", "keep_best"), why)
    elif config.checkpoint.keep_best and (
        not config.evaluation.every or config.checkpoint.every % config.evaluation.every
    ):
        yield (
            f"checkpoint.keep_best={config.checkpoint.keep_best} goes by held-out accuracy, which checkpoints every "
            f"{config.checkpoint.every} steps do not have with evaluation.every={config.evaluation.every}; set it to a "
            "number that divides checkpoint.every"
        )
    if config.learner.lora is None:
        why = "but no adapter is trained; set learner.lora or leave it out"
        yield from _changed("sync", config.sync, ("adapters",), why)
    if not any(reward.kind == "function" for task in config.tasks for reward in task.rewards):
        why = "but no reward is a function of yours; leave it out"
        yield from _changed("verifier", config.verifier, ("in_process",), why)


def _changed(name: str, section: ConfigModel, keys: Iterable[str], why: str) -> Iterator[str]:
    """A sentence per key that differs from its default. Being set is no sign: a resolved recipe sets every key."""
    for key in keys:
        value = getattr(section, key)
        if value != type(section).model_fields[key].get_default(call_default_factory=True):
            yield f"{name}.{key}={_shown(value)}, {why}"


def _task_contradictions(config: RunConfig) -> Iterator[str]:
    names = [task.name for task in config.tasks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"tasks: {names.count(name)} of them are called `{name}`; metrics need different names"
    if config.warm_start.steps:
        for index, task in enumerate(config.tasks):
            if task.answer_column is None:
                yield f"warm_start.steps={config.warm_start.steps} needs answers; set tasks.{index}.answer_column"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe in a YAML file with ``section.key=value`` overrides; `ConfigError` names every problem in it."""
    path = Path(path)
    text = read_yaml(path, "a recipe", "name a recipe")
    data = _parse_yaml(text, str(path))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections (run:, model:, ...), found {_shown(data)}")
    origins = _Origins(str(path), data)
    data = {key: value for key, value in _plain(data).items() if value is not None or key not in RunConfig.model_fields}
    for override in overrides:
        _apply_override(data, override, origins)
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return _validated(data, origins)


def read_yaml(path: str | Path, what: str, advice: str) -> str:
    """The text of a file that should be ``what``; `ConfigError` gives the advice."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(LONGEST_RECIPE + 1).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as {what} ({reason}); {advice}") from None
    if len(text) > LONGEST_RECIPE:
        raise ConfigError(f"{path}: longer than {LONGEST_RECIPE:,} bytes, which {what} is not; {advice}")
    return text


def config_from_dict(data: dict[str, Any], *, where: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
    """The same checks and messages for settings that come from Python, which stay as they are."""
    _refuse_monsters(data, where)
    data = copy.deepcopy(data)
    origins = _Origins(where, data)
    for override in overrides:
        _apply_override(data, override, origins)
    return _validated(data, origins)


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """YAML text that must be a mapping; ``where`` stands in messages."""
    data = _plain(_parse_yaml(text, where))
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: should be a mapping of keys, found {_shown(data)}")
    return data


def parse_value(text: str, where: str) -> Any:
    """What stands behind the ``=`` of an override; ``where`` stands in messages."""
    return _plain(_parse_yaml(text, where))


def dump_resolved(config: RunConfig) -> str:
    """Every key with its value, as YAML that `load_recipe` reads back into an equal config."""
    import io

    out, yaml = io.StringIO(), _yaml(typ="safe")
    yaml.representer.add_representer(str, _text_as_it_is)
    yaml.dump(config.model_dump(mode="json"), out)
    return out.getvalue()


_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Ends of lines to YAML, which single quotes do not keep; double quotes escape them."""


def _text_as_it_is(representer: Any, text: str) -> Any:
    style = '"' if _BREAKS.search(text) else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


class _Origins:
    """Where each value of a recipe was written, for messages."""

    def __init__(self, source: str, data: Any):
        self._source = source
        self._lines: dict[tuple[Any, ...], int] = {}
        self._overrides: list[tuple[tuple[Any, ...], str]] = []
        self._collect(data, ())

    def _collect(self, node: Any, path: tuple[Any, ...]) -> None:
        position = getattr(node, "lc", None)
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            here = (*path, key)
            if position is not None and key in (position.data or {}):  # a merged key (<<) has no place of its own
                self._lines[here] = position.data[key][0] + 1
            self._collect(value, here)

    def overridden(self, path: tuple[Any, ...], text: str) -> None:
        self._overrides.append((path, text))

    def place(self, path: tuple[Any, ...]) -> str:
        """``demo.yaml line 7`` or ``override learner.lr=1``: the value at ``path``, or what it stands in."""
        for overridden, text in reversed(self._overrides):
            if path[: len(overridden)] == overridden:
                return f"override {text}"
        while path and path not in self._lines:
            path = path[:-1]
        return f"{self._source} line {self._lines[path]}" if path else self._source


def _yaml(typ: str) -> Any:
    from ruamel.yaml import YAML

    yaml = YAML(typ=typ, pure=True)  # YAML 1.2: 1e-5 is a number and `on` is a word; equal keys are refused
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 120
    return yaml


def _parse_yaml(text: str, source: str) -> Any:
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        data = _yaml(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem or error).splitlines()[0].split(" with value")[0]
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{source}: values lie too deep in one another; no setting needs that") from None
    except Exception as error:  # the parser meets an endless number, or a tag that it makes nothing of
        raise ConfigError(f"{source}: cannot be read as YAML: {described(error)}") from None
    _refuse_monsters(data, source)
    return data


def _refuse_monsters(data: Any, source: str) -> None:
    """`ConfigError` for what no recipe is, before anything walks through it: endless, bottomless, or without a name.

    An alias stands for all that it repeats, and may even hold itself.
    """
    waiting, count = [(data, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > DEEPEST:
            raise ConfigError(f"{source}: values lie more than {DEEPEST} deep in one another; no setting needs that")
        if count > MOST_VALUES:
            raise ConfigError(f"{source}: more than {MOST_VALUES:,} values, each alias counted with all it repeats")
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, str | int | float | None):
                    raise ConfigError(f"{source}: a key is a word, found {_shown(key)}")
            waiting += [(inside, depth + 1) for inside in (*node, *node.values())]
        elif isinstance(node, list | tuple):
            waiting += [(inside, depth + 1) for inside in node]
        elif isinstance(node, str) and (half := HALF_CHARACTER.search(node)):
            raise ConfigError(f"{source}: {_shown(node)} holds \\u{ord(half[0]):x}, half of a character; fix it")
        elif isinstance(node, int) and node.bit_length() > 256:
            raise ConfigError(
                f"{source}: a whole number of {node.bit_length() * 0.301:.0f} digits; no setting needs that"
            )


def _plain(node: Any) -> Any:
    """Round-trip YAML nodes as ordinary Python values."""
    from ruamel.yaml.scalarbool import ScalarBoolean  # a truth value with an anchor; a kind of int

    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if isinstance(node, (bool, ScalarBoolean)):
        return bool(node)
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _apply_override(data: dict[str, Any], override: str, origins: _Origins) -> None:
    """Set ``tasks.0.weight=2`` in ``data``; mappings on the way are made, list places must exist."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"override {override}: write it as section.key=value")
    path: list[Any] = name.strip().split(".")
    value = parse_value(text, f"override {override}")
    node: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not part.isdecimal() or len(part) > 5 or int(part) >= len(node):
                before = ".".join(map(str, path[:depth]))
                raise ConfigError(f"override {override}: {before} has the entries 0 to {len(node) - 1}, found `{part}`")
            path[depth] = part = int(part)
        if last:
            for other in other_names(".".join(map(str, path))):
                node.pop(other, None)
            key = IN_A_WORD.get(".".join(map(str, path)))
            if key is not None and isinstance(value, str) and isinstance(node.get(part), dict):
                node[part][key] = value  # the other keys of the section stay
            else:
                node[part] = value
        else:
            inside = node[part] if isinstance(node, list) else node.get(part)
            if not isinstance(inside, (dict, list)):  # what one word says is one of its keys
                key = IN_A_WORD.get(".".join(map(str, path[: depth + 1]))) if isinstance(inside, str) else None
                inside = node[part] = {} if key is None else {key: inside}
            node = inside
    origins.overridden(tuple(path), override)


def _validated(data: dict[str, Any], origins: _Origins) -> RunConfig:
    try:
        # JSON, so that strict checking ("8" and true are no numbers) still takes a YAML list for a tuple.
        return RunConfig.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        # A default that depends on a bad value is a consequence, not a problem.
        problems = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
    lines = [line for problem in problems for line in _messages(problem, data, origins)]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


_WANTED = {
    "model_type": "should be a mapping of keys",
    "model_attributes_type": "should be a mapping of keys",
    "dict_type": "should be a mapping of keys",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
}
"""Kinds of problems that pydantic words for programmers."""


def _messages(problem: Any, data: dict[str, Any], origins: _Origins) -> Iterator[str]:
    """The lines for one problem that pydantic found."""
    path = _path_in_recipe(problem["loc"], data)
    name = ".".join(map(str, path))
    kind, found = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        for key in _leaves_of_unknown(path, found):
            yield f"{origins.place(key)}: {explain_unknown_key(RunConfig, key)}"
    elif kind == "missing":
        yield f"{origins.place(path)}: {name} is missing and has no default"
    elif kind == "union_tag_not_found":
        yield f"{origins.place(path)}: {name}.kind is missing; it decides what else belongs there"
    elif kind == "union_tag_invalid":
        kinds = [word.strip(" '") for word in problem["ctx"]["expected_tags"].split(",")]
        close = nearest(str(problem["ctx"]["tag"]), kinds)
        hint = f"did you mean {close}?" if close else f"should be one of {', '.join(kinds)}"
        yield f"{origins.place((*path, 'kind'))}: {name}.kind is {_shown(problem['ctx']['tag'])}; {hint}"
    elif kind == "value_error":
        for sentence in str(problem["ctx"]["error"]).splitlines():
            prefix = "" if name in sentence else f"{name} " if sentence.startswith(("is ", "holds ")) else f"{name}: "
            yield f"{origins.place(path)}: {prefix}{sentence}"
    else:
        wanted = _WANTED.get(kind) or _lower_first(problem["msg"])
        yield f"{origins.place(path)}: {name} is {_shown(found)}; {wanted}"


def _path_in_recipe(loc: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    """pydantic's location without the names of union members, which nobody wrote."""
    path: list[Any] = []
    node = data
    for depth, part in enumerate(loc):
        in_mapping = isinstance(node, dict) and part in node
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_mapping or in_list:
            node = node[part]
            path.append(part)
        elif depth == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _leaves_of_unknown(path: tuple[Any, ...], value: Any) -> Iterator[tuple[Any, ...]]:
    """An unknown section is explained key by key: each of its keys may belong somewhere else."""
    if isinstance(value, dict) and value and len(path) == 1:
        yield from ((*path, key) for key in value)
    else:
        yield path


def _shown(value: Any) -> str:
    text = visible(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= 60 else text[:57] + "..."


def _lower_first(sentence: str) -> str:
    sentence = sentence.removeprefix("Input ")
    return f"{sentence[:1].lower()}{sentence[1:]}"
