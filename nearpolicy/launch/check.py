"""``nearpolicy check``: resolve a recipe, say what it amounts to, refuse what cannot work. Loads no model.

recipe + overrides -> RunConfig -> sizes, memory, threads -> printed          (neither torch nor transformers)
--data: every row of every task, as the engine would see it                   (loads the tokenizer)
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, UserError
from nearpolicy.launch.words import count, expected_answer, quoted, section

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.launch.sizes import ModelShape
    from nearpolicy.models.tokenizer import Renderer
    from nearpolicy.tasks.mixture import Mixture, TaskData
    from nearpolicy.verifier.config import CodeReward, RewardConfig
    from nearpolicy.verifier.functions import UserFunction
    from nearpolicy.verifier.learned.config import JudgingConfig

Lines = Iterator[tuple[str, str]]


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, any number.")] = None,
    data: Annotated[bool, typer.Option("--data", help="Look at every row of every task as well.")] = False,
) -> None:
    """Explain a recipe and refuse contradictions, without loading a model."""
    from nearpolicy.config import load_recipe

    config = load_recipe(recipe, overrides or ())
    functions, problems = _load_functions(config)
    try:
        shape = refuse(config, makes_run=True)
    except UserError as error:
        problems.insert(0, str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    renderer = _renderer(config) if data else None
    mixture = load_data(config, renderer=renderer, every_row=True) if data else None
    sections = [
        ("run", _run(config)),
        ("rewards", _rewards(config, functions)),
        ("sizes", _sizes(config)),
        ("model", _model(config, shape)),
        *_processes(config, shape),
        ("machine", _machine(config)),
    ]
    if mixture is not None:
        limit = config.sampling.max_prompt_length
        sections += [(f"data of task {name}", _data(task, limit, renderer)) for name, task in mixture.tasks.items()]
    for title, lines in sections:
        section(title, lines)


def refuse(config: RunConfig, *, makes_run: bool) -> ModelShape | None:
    """Raise `ConfigError` with everything that needs a look beyond the recipe: files, folders, packages, the model.

    ``makes_run``: whether `run.dir` will be taken (the recipe of a finished run names its own folder). Returns the
    model's shape, or None if it lies on a hub and has not been fetched.
    """
    from nearpolicy.generator.config import NO_BFLOAT16
    from nearpolicy.launch.sizes import critic_shape, memory_refusal, model_shape, reference_shape
    from nearpolicy.machine import bfloat16_products
    from nearpolicy.store.folder import refuse_unusable
    from nearpolicy.tasks.sources import check_exists

    problems, shape = list(_package_problems(config)) if makes_run else [], None
    problems += _reward_problems(config)
    if config.generator.weights == "bfloat16" and not bfloat16_products():
        problems.append(NO_BFLOAT16)
    try:
        shape = model_shape(config.model)
    except UserError as error:
        problems.append(str(error))
    if shape is not None:
        problems += _model_problems(config, shape)
        try:
            others = {
                f"objective.reference {config.objective.reference}": reference_shape(config, shape),
                f"critic.path {config.critic and config.critic.path}": critic_shape(config, shape),
            }
            problems += [
                f"{who} has a vocabulary of {other.vocabulary:,} tokens and the policy one of {shape.vocabulary:,}; "
                "what they say can only be compared token by token: name a model with the same tokenizer"
                for who, other in others.items()
                if other is not None and other.vocabulary != shape.vocabulary
            ]
            if (too_large := memory_refusal(config, shape, trains=makes_run)) is not None:
                problems.append(too_large)
        except UserError as error:
            problems.append(str(error))
    looks = [partial(check_exists, task.source) for task in config.tasks]
    if makes_run and config.run.dir is not None:
        looks.append(partial(refuse_unusable, config.run.dir))
    for look in looks:
        try:
            look()
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return shape


def load_data(
    config: RunConfig,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    renderer: Renderer | None = None,
    *,
    every_row: bool = False,
) -> Mixture:
    """Every row of every task as the run would see it; `DataError` speaks for all tasks together.

    ``functions``: user rewards at hand, by the path a reward names them with. ``renderer``: the recipe's, if loaded.
    ``every_row``: also where looking at a row is slow and they are very many (`reading.unfit`).
    """
    from nearpolicy.tasks.check import Reads
    from nearpolicy.tasks.mixture import load_mixture
    from nearpolicy.verifier.functions import required_columns
    from nearpolicy.verifier.reading import unfit

    return load_mixture(
        config.tasks,
        seed=config.run.seed,
        renderer=renderer or _renderer(config),
        max_prompt_length=config.sampling.max_prompt_length,
        reads=Reads(partial(required_columns, at_hand=functions or {}), partial(unfit, every_row=every_row)),
    )


def _renderer(config: RunConfig) -> Renderer:
    from nearpolicy.models.random_models import known_options
    from nearpolicy.models.tokenizer import Renderer, load_tokenizer

    if config.model.tokenizer is not None:
        return Renderer(load_tokenizer(config.model.tokenizer))
    if config.model.family is not None:
        known_options(config.model.family, config.model.init)
        return Renderer(load_tokenizer("bytes"))
    from nearpolicy.models.loading import resolve

    return Renderer(load_tokenizer(str(resolve(config.model.path))))


def _load_functions(config: RunConfig) -> tuple[dict[str, UserFunction], list[str]]:
    """User reward functions by their paths, loaded and looked at, and what is wrong with the others."""
    from nearpolicy.verifier.config import FunctionReward
    from nearpolicy.verifier.functions import prepare

    functions, problems = {}, []
    for reward in [reward for task in config.tasks for reward in task.rewards if isinstance(reward, FunctionReward)]:
        try:
            functions[reward.path] = prepare(reward)
        except UserError as error:
            problems.append(str(error))
    return functions, list(dict.fromkeys(problems))


def _package_problems(config: RunConfig) -> Iterator[str]:
    from importlib.util import find_spec

    for sink in config.telemetry.sinks:
        if find_spec(sink) is None:
            yield f"telemetry.sinks has {sink}, but the package is not installed; pip install 'nearpolicy[{sink}]'"


def _reward_problems(config: RunConfig) -> Iterator[str]:
    """What learned rewards lack, as far as it can be told without asking an endpoint or loading a model."""
    from nearpolicy.verifier.config import LearnedReward
    from nearpolicy.verifier.learned.scorers import problem_of

    for task in config.tasks:
        for reward in task.rewards:
            if isinstance(reward, LearnedReward) and (problem := problem_of(reward)) is not None:
                yield f"task {task.name!r}, reward {reward.source!r}: {problem}"


def _model_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    from nearpolicy.launch.adapter_sizes import unknown_targets
    from nearpolicy.launch.sizes import kv_sequence_mb, longest_sequence

    lora = config.learner.lora
    if lora is not None and (unknown := unknown_targets(lora, shape)) is not None:
        yield unknown
    longest, needed, bound = longest_sequence(config), kv_sequence_mb(config, shape), config.generator.kv_memory_mb
    if shape.max_length is not None and longest > shape.max_length:
        yield (
            f"the longest prompt and completion have {longest} tokens together, but {config.model.path} was made for "
            f"{shape.max_length}; lower sampling.max_prompt_length or a max_completion_length"
        )
    if bound is not None and bound < needed:
        yield (
            f"generator.kv_memory_mb={bound:g} cannot hold one sequence of {longest} tokens, which takes "
            f"{needed:.1f} MB; raise it or shorten sequences"
        )


def _run(config: RunConfig) -> Lines:
    objective, total = config.objective, sum(task.weight for task in config.tasks)
    yield "name", config.run.name
    yield "folder", config.run.dir or f"runs/{config.run.name}-NUMBER"
    packed = "" if config.generator.weights == "same" else f", engine computes from {config.generator.weights} weights"
    yield "numerics", config.numerics + packed
    yield "order", "synchronous" if config.queue.max_staleness == 0 else f"asynchronous, order {config.queue.order}"
    yield "objective", f"{objective.advantage}, {objective.loss}, correction {objective.correction}"
    if objective.kl_coef:
        kl = f"{objective.kl_coef:g} x {objective.kl_estimator} in the {objective.kl_in}"
        same = ", in the memory of the policy" if config.reference_is_base else ""
        yield "reference", f"{objective.reference}, {kl}: one more forward pass per step{same}"
    elif objective.reference != "none":
        yield "teacher", f"{objective.reference}: one more forward pass per step"
    if config.critic is not None:
        yield "critic", _critic(config)
    for task in config.tasks:
        rewards = ", ".join(f"{reward.weight:g} x {reward.source}{_condition(reward)}" for reward in task.rewards)
        yield f"task {task.name}", f"{task.weight / total:.0%} of prompts, held out {task.held_out}, reward {rewards}"


def _condition(reward: RewardConfig) -> str:
    """When a source counts, where that depends on others."""
    required = " and ".join(f"{name} gives {threshold:g}" for name, threshold in reward.requires.items())
    return f" where {required}" if required else ""


def _critic(config: RunConfig) -> str:
    """What a critic is and costs."""
    critic = config.critic
    rate = critic.learning_rate or config.learner.learning_rate
    alone = f"; alone for the first {count(critic.pretraining_steps, 'step')}" if critic.pretraining_steps else ""
    return (
        f"{critic.path or 'begins as the policy'}, learning rate {rate:g}: one more forward pass per step and one more "
        f"update beside each{alone}"
    )


def _rewards(config: RunConfig, functions: Mapping[str, UserFunction]) -> Lines:
    for task in config.tasks:
        where = f"{task.name}: " if len(config.tasks) > 1 else ""
        for reward in task.rewards:
            if reward.kind == "function":
                function = functions[reward.path]
                reads = f", reads {', '.join(function.columns)}" if function.columns else ""
                shape = {"trl": "TRL"}.get(function.shape.value, function.shape.value)
                yield f"reward {reward.source}", f"{where}{reward.path}, {shape} shape{reads}"
            elif reward.kind == "code":
                yield f"reward {reward.source}", where + _programs(reward, config)
            elif (judging := getattr(reward, "judge", reward)) is not None and hasattr(judging, "endpoint"):
                yield f"reward {reward.source}", where + _panel(judging)
        if task.held_out:
            yield "held-out accuracy", where + _judge(task.rewards[0])


def _panel(judging: JudgingConfig) -> str:
    """Who judges, how often and for how much."""
    orders = 2 if getattr(judging, "against_column", None) is not None else 1
    endpoint, asked = judging.endpoint, len(judging.models) * judging.samples * orders
    if endpoint is None:
        return f"{', '.join(judging.models)}, in a process of their own, by the log-probabilities of their answers"
    money = "" if endpoint.budget is None else f", at most {endpoint.budget:g} spent"
    return f"{', '.join(judging.models)} at {endpoint.base_url}, {count(asked, 'request')} per completion{money}"


def _programs(reward: CodeReward, config: RunConfig) -> str:
    """How the programs of a reward are kept in, as far as it is known before they are."""
    verifier, limits = config.verifier, reward.limits
    trust = "; TOGETHER WITH ITS TESTS, which it can cheat" if reward.trust == "together" else ""
    tried = ", tried by an attack at the start" if verifier.isolation != "none" else ": NOT ISOLATED"
    wall_s = limits.wall_s or 2 * limits.cpu_s + 2
    return (
        f"programs, isolation {verifier.isolation}{tried}; {verifier.workers} at a time, each test at most "
        f"{limits.cpu_s:g} s of processor time, {wall_s:g} s, {limits.memory_mib} MiB{trust}"
    )


def _judge(reward: RewardConfig) -> str:
    """What decides whether a held-out answer is right."""
    from nearpolicy.evaluate.evaluator import CORRECT

    judged = f"judged by: {reward.source}, right from {CORRECT:.1f}{_condition(reward)}"
    if reward.kind == "number":
        return f"{judged} (by its part `correct`: what stands around the number does not count)"
    if reward.kind == "function":
        return f"{judged}; what a function gives at most cannot be known: it must give {CORRECT:.1f} to right answers"
    return judged


_ON_SYNC = {
    "finish": "completions end under the weights they began with; the publication waits for the longest",
    "resume": "completions go on under the new weights, their keys and values computed again",
    "continue": "completions go on under the new weights, on the keys and values of the old ones",
}


def _stragglers(config: RunConfig) -> str:
    """What the learner does about groups that take long."""
    queue, over = config.queue, config.generator.oversample
    if queue.at_bound == "wait":
        order = "each group in turn" if queue.order == "admission" else "groups about to pass the bound"
        return f"the learner waits for {order}"
    after = "" if queue.at_bound == "drop" else ", and their prompts are asked again"
    share = f"; of all groups at least {1 - 1 / over:.0%}, with generator.oversample={over:g}" if over > 1 else ""
    return f"groups beyond the bound expire, finished or not{after}{share}"


def _sizes(config: RunConfig) -> Lines:
    queue, sampling, updates = config.queue, config.sampling, config.learner.updates_per_step
    completions = config.completions_per_step
    longest = sampling.max_prompt_length + sampling.max_completion_length
    sampled = completions * sampling.max_completion_length
    ahead = config.num_slots * config.completions_per_group
    lag = (queue.max_staleness + 1) * updates - 1
    greedy = config.objective.greedy_baseline
    size = f"({sampling.num_generations} + 1 greedy)" if greedy else sampling.num_generations
    yield "one step", f"{queue.prompts_per_step} groups x {size} = {completions} completions"
    if greedy:
        yield "greedy baselines", "judged and recorded, never trained; a prompt is computed once more for its own"
    yield "tokens per step", f"at most {sampled:,} sampled, {completions * longest:,} with prompts"
    yield "updates", f"{updates} per step, {updates * config.run.steps:,} in {config.run.steps} steps"
    yield "slots", f"{config.num_slots} groups = {ahead} completions admitted but not yet in published weights, at most"
    yield "decoded at once", f"{min(config.generator.max_running * config.generator.replicas, ahead)} sequences"
    oldest = f"at most {count(queue.max_staleness, 'step')} when consumed"
    yield "staleness", f"{oldest}, {count(lag, 'update')} at the end of the step"
    if queue.max_staleness or queue.at_bound != "wait":
        yield "stragglers", _stragglers(config)
        yield "running at publication", _ON_SYNC[config.generator.on_sync]
    every = config.sync.weight_sync_steps
    yield "weights published", "after every step" if every == 1 else f"every {every} steps"


def _model(config: RunConfig, shape: ModelShape | None) -> Lines:
    from nearpolicy.launch.sizes import longest_sequence

    yield "path", config.model.path
    if shape is not None and shape.shipped:
        yield "shape", "from the table that is shipped with nearpolicy; the model has not been fetched"
    if shape is None:
        yield "size", "unknown until it is fetched from the hub"
        return
    about = "" if shape.exact or shape.shipped else "about "
    yield "parameters", f"{about}{shape.parameters:,} in {config.model.dtype}"
    yield "trained", _trained(config, shape)
    yield "longest sequence", f"{longest_sequence(config)} of {shape.max_length or 'any number of'} tokens"


def _trained(config: RunConfig, shape: ModelShape) -> str:
    from nearpolicy.launch.adapter_sizes import adapter_size

    lora = config.learner.lora
    if lora is None:
        return "all of them"
    size = adapter_size(lora, shape)
    if not size.layers:
        return "an adapter, whose size is unknown until the model is loaded"
    about = "" if shape.names_from_file else "about "
    share = f"{size.trained / shape.parameters:.2%} of the model's"
    how = f"rank {lora.rank}, alpha {lora.alpha:g}, {size.layers} layers"
    return f"an adapter of {about}{size.trained:,} parameters, {share} ({how})"


def _processes(config: RunConfig, shape: ModelShape | None) -> list[tuple[str, Lines]]:
    """Sections about what holds the roles: this process, or those that Ray places."""
    if config.runtime.kind == "inline":
        return [("memory", _memory(config, shape))]
    from nearpolicy.launch.explain_placement import sections

    return sections(config, shape)


def _memory(config: RunConfig, shape: ModelShape | None) -> Lines:
    from nearpolicy.launch.sizes import (
        LIBRARIES_MB,
        available_memory_mb,
        largest_microbatch,
        memory_by_owner,
        memory_warning,
        peak_memory_mb,
    )

    if shape is None:
        yield "together", "unknown until the model is fetched from the hub"
        return
    for owner, size in memory_by_owner(config, shape).items():
        yield owner, f"{size:,.0f} MB" if size >= 10 else f"{size:.1f} MB"
    yield "libraries", f"{LIBRARIES_MB} MB"
    yield "largest micro-batch", f"{largest_microbatch(config):,} tokens"
    together = f"about {peak_memory_mb(config, shape):,.0f} MB with prompts and completions of full length"
    yield "together", f"{together}, a tenth for the allocator included"
    if (free := available_memory_mb()) is not None:
        yield "free now", f"{free:,.0f} MB"
    if (warning := memory_warning(config, shape)) is not None:
        yield "NOT ENOUGH", warning


def _machine(config: RunConfig) -> Lines:
    from nearpolicy.launch.sizes import versions
    from nearpolicy.machine import num_cores

    cores = num_cores()
    yield "cores", str(cores)
    yield "threads", _threads(config, cores)
    yield "python", platform.python_version()
    yield "packages", ", ".join(f"{name} {version}" for name, version in versions().items())


def _threads(config: RunConfig, cores: int) -> str:
    from nearpolicy.launch.sizes import role_threads

    generator, learner, runtime = config.generator.threads, config.learner.threads, config.runtime
    if runtime.kind == "ray":
        own = generator or int(max(1, runtime.cpus_per_generator)), learner or int(max(1, runtime.cpus_per_learner))
        return "a generator {}, a rank of the learner {}".format(*own)
    parts = []
    for role, other, threads in zip(("engine", "learner"), ("learner", "engine"), role_threads(config), strict=True):
        fixed = generator if role == "engine" else learner
        more = f" ({cores} while the {other} rests)" if fixed is None and threads < cores else ""
        parts.append(f"{role} {threads}{more}")
    return ", ".join(parts)


def _data(task: TaskData, limit: int, renderer: Renderer) -> Lines:
    left_out = {**task.skipped, "same question as an earlier row": task.repeated}
    reasons = [f"{count} left out: {why}" for why, count in left_out.items() if count]
    yield "rows", ", ".join([str(task.rows), *reasons])
    yield "training, held out", f"{len(task.training)}, {len(task.held_out)}"
    yield "prompt length", f"{task.lengths} (limit {limit})"
    first = task.training[0]
    yield "first prompt", quoted(renderer.tokenizer.decode(renderer.prompt_ids(first)))
    answer = expected_answer(task.config.model_dump(), first.columns)
    yield "its answer", "no answer column" if answer is None else quoted(answer)
