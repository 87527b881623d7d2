"""From a recipe to roles: each function builds one thing and knows nothing of the life of a run.

Language      model folder, renderer, data, sampling          (tokenizer, no weights)
load_model    the engine's policy, its fitness and the machine's numerics probed
start_engine  pages, engine thread
start_learner policy, objective, optimizer, learner thread
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError, ModelError
from nearpolicy.evaluate.evaluator import Evaluator, HeldOut
from nearpolicy.generator.engine import Engine, EngineLimits
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.launch.check import load_data
from nearpolicy.launch.diagnosis import Bound, Examines
from nearpolicy.launch.inline import LearnerInThread, RoleThread
from nearpolicy.launch.meter import Meter
from nearpolicy.launch.places import LearnerPlace
from nearpolicy.launch.probe import Probe, Scoring
from nearpolicy.launch.sizes import longest_sequence, role_threads
from nearpolicy.learner.ranks import Together
from nearpolicy.learner.sharding import require_offload_has_effect
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.machine import num_cores
from nearpolicy.models.device import pick_device
from nearpolicy.models.fitness import check_fitness, tolerance_of
from nearpolicy.models.loading import load_policy, outline_policy, resolve
from nearpolicy.models.lora import LoraPolicy, target_layers
from nearpolicy.models.numerics import FAST, Numerics, probe_model
from nearpolicy.models.pieces import local
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.tokenizer import Renderer, generation_stop_ids, load_tokenizer, vocabulary_size
from nearpolicy.models.value import ValueModel
from nearpolicy.objectives.objective import Objective
from nearpolicy.roles import Generator, Sampling, Verifier
from nearpolicy.tasks.mixture import Mixture
from nearpolicy.verifier.combining import counts

OnEvent = Callable[..., None]
Functions = dict[str, Callable[..., object]]
Load = Callable[..., PolicyModel]
"""`load_policy` or `outline_policy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a role that holds the model knows of its language."""

    folder: Path
    """The model's Hugging Face folder."""
    renderer: Renderer

    @classmethod
    def of(cls, config: RunConfig, folder: Path | None = None) -> Words:
        """``folder`` replaces the recipe's model."""
        folder = folder or resolve(config.model.path, config.model.init, config.model.seed)
        tokenizer = load_tokenizer(config.model.tokenizer or str(folder))
        stops, vocabulary = generation_stop_ids(folder), vocabulary_size(folder)
        return Words(folder=folder, renderer=Renderer(tokenizer, stop_token_ids=stops, vocabulary=vocabulary))


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(Words):
    """What is known of a run before any weights are loaded."""

    mixture: Mixture
    sampling: Sampling

    @classmethod
    def of(cls, config: RunConfig, functions: Functions | None = None, folder: Path | None = None) -> Language:
        """Tokenizer and data of a recipe; every bad row is an error here. ``folder`` replaces the recipe's model."""
        words = Words.of(config, folder)
        renderer = words.renderer
        mixture = load_data(config, functions, renderer)
        wanted = config.sampling
        sampling = Sampling(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            max_tokens=wanted.max_completion_length,
            stop_token_ids=renderer.stop_token_ids,
            stop=tuple(wanted.stop),
            record_support=config.same_support,
        )
        return cls(folder=words.folder, renderer=renderer, mixture=mixture, sampling=sampling)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, up to its stop."""
        return self.renderer.decode(ids, stop=self.sampling.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitModel:
    """The engine's policy, and how exactly the learner can agree with it on this machine."""

    policy: PolicyModel
    mode: str
    """exact or fast."""
    numerics: Numerics


def load_model(config: RunConfig, language: Words, say: Callable[[str], None], *, in_pieces: bool = False) -> FitModel:
    """Load the engine's policy, probe it and the machine; a model that cannot be trained here is refused.

    ``in_pieces``: for a rank of several, without the weights. That the model computes right is then measured by the
    generators alone, each of which has it whole, out of the same folder, before any rank begins.
    """
    torch.set_num_threads(num_cores())
    dtype, device = getattr(torch, config.model.dtype), pick_device()
    if in_pieces:
        policy = outline_policy(language.folder, dtype, device, known_to_fit=True, say=say)
    else:
        policy = load_policy(language.folder, dtype, device)
    if (lora := config.learner.lora) is not None:
        target_layers(policy.model, lora.target_modules, lora.rank)  # the learner puts them in, when a folder is made
    mode, numerics = choose_numerics(config, policy, say)
    return FitModel(policy=policy, mode=mode, numerics=numerics)


def with_numerics(model: FitModel, mode: str, rule: Numerics) -> FitModel:
    """Under a rule that several machines can keep together."""
    return replace(model, mode=mode, numerics=rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The engine on its thread."""

    engine: Engine
    runner: EngineRunner
    all_threads: int
    """What one operation may use while nothing else runs."""


def start_engine(
    config: RunConfig,
    language: Words,
    model: FitModel,
    on_event: OnEvent,
    say: Callable[[str], None],
    *,
    own_threads: int | None = None,
) -> EngineParts:
    """Size the pages, start the thread. ``own_threads``: what the engine has for itself, in a process of its own; else
    it shares the machine with the learner."""
    policy, numerics = model.policy, model.numerics
    usual = config.generator.threads or own_threads or role_threads(config)[0]
    threads = _threads("generator", usual, config.generator.threads, numerics, say)
    all_threads = threads if own_threads else min(num_cores(), numerics.max_threads)
    limits = EngineLimits.sized(
        policy,
        max_running=config.generator.max_running,
        prefill_chunk=config.generator.prefill_chunk,
        max_length=longest_sequence(config),
        kv_memory_mb=config.generator.kv_memory_mb,
    )
    engine = Engine(
        policy,
        limits,
        numerics,
        weights=config.generator.weights,
        threads=threads,
        decode=language.renderer.decode,
        on_event=on_event,
    )
    runner = EngineRunner(
        engine,
        on_sync=config.generator.on_sync,
        sync_timeout_s=config.sync.timeout_s,
        threads=threads,
        threads_alone=all_threads if config.generator.threads is None else threads,
        numerics=model.mode,
        on_event=on_event,
    )
    return EngineParts(engine=engine, runner=runner, all_threads=all_threads)


def choose_numerics(config: RunConfig, policy: PolicyModel, say: Callable[[str], None]) -> tuple[str, Numerics]:
    """The mode this machine can keep, and its rule; says so if it is not the one asked for."""
    if config.numerics == "fast":
        return "fast", FAST
    found = probe_model(policy, num_cores()) if policy.device.type == "cpu" else None
    if found is not None:
        return "exact", found
    if config.run.numerics == "exact":
        raise ConfigError(
            f"run.numerics=exact is not to be had here ({policy.device.type}): rows of a matrix product depend on "
            "their neighbours. Set run.numerics=fast; the mismatch is then measured and corrected"
        )
    say(f"exact numerics are not to be had here ({policy.device.type}): going on with run.numerics=fast")
    return "fast", FAST


def start_learner(
    config: RunConfig,
    language: Language,
    model: FitModel,
    engine: EngineParts,
    on_event: OnEvent,
    say: Callable[[str], None],
) -> LearnerInThread:
    """Load the learner's own copy of the model, and start its thread.

    Engine and learner have one core each while both work; unless `generator.threads` or `learner.threads` say
    otherwise, each takes all of them while the other has nothing to do.
    """
    numerics, runner = model.numerics, engine.runner
    threads = usual = _threads("learner", role_threads(config)[1], config.learner.threads, numerics, say)
    threads_now = None
    if config.learner.threads is None and usual < engine.all_threads:
        threads = engine.all_threads
        threads_now = lambda: threads if runner.is_idle else usual  # noqa: E731
    make = partial(
        make_learner, config, language, numerics, threads=threads, threads_now=threads_now, on_event=on_event
    )
    thread = RoleThread("learner", threads)
    learner = LearnerInThread(make, thread)
    _say_what_is_trained(config, learner.inner, say)
    runner.others_work = lambda: thread.is_busy
    return learner


def _say_what_is_trained(config: RunConfig, learner: PolicyLearner, say: Callable[[str], None]) -> None:
    if config.learner.lora is not None:
        trained = sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)
        say(f"trained: an adapter of {trained:,} parameters")


def make_ranked_learner(
    config: RunConfig,
    words: Words,
    numerics: Numerics,
    *,
    ranks: Together | None,
    own_threads: int,
    on_event: OnEvent,
    say: Callable[[str], None],
) -> PolicyLearner:
    """A learner, or one of its ranks, in a process of its own."""
    usual = config.learner.threads or own_threads
    threads = _threads("learner", usual, config.learner.threads, numerics, say)
    torch.set_num_threads(threads)
    learner = make_learner(config, words, numerics, threads=threads, on_event=on_event, ranks=ranks, say=say)
    _say_what_is_trained(config, learner, say)
    return learner


def make_learner(
    config: RunConfig,
    language: Words,
    numerics: Numerics,
    *,
    threads: int,
    threads_now: Callable[[], int] | None = None,
    on_event: OnEvent | None = None,
    ranks: Together | None = None,
    say: Callable[[str], None] = print,
) -> PolicyLearner:
    """Load the policy, and the reference and the critic if the objective has them: whole, or, where there are several
    ``ranks``, of each the pieces that this one will hold."""
    device = pick_device()
    require_offload_has_effect(config.learner.offload, device)
    load: Load = load_policy if ranks is None or ranks.size == 1 else partial(outline_policy, say=say)
    own = load(language.folder, getattr(torch, config.model.dtype), device, known_to_fit=True)
    if config.learner.lora is not None:
        own = LoraPolicy(own.model, **config.learner.lora.model_dump(), seed=config.run.seed, files=own.files)
    value_model = None
    if config.critic is not None:
        value_model, numerics = load_value_model(config, language, own, numerics, threads, load)
    reference = load_reference(config, language, own, load)
    foreign = [(config.objective.reference, reference)] if _names_a_model(config.objective.reference) else []
    foreign += [(config.critic.path, value_model)] if config.critic is not None and config.critic.path else []
    unmeasured = [(name, model) for name, model in foreign if model.files is not None]
    learner = PolicyLearner(
        own,
        make_objective(config),
        config.learner,
        numerics,
        temperature=config.sampling.temperature,
        total_steps=config.run.steps,
        reference=reference,
        value_model=value_model,
        critic=config.critic,
        seed=config.run.seed,
        threads=threads,
        threads_now=threads_now,
        on_event=on_event,
        ranks=ranks,
    )
    for name, model in unmeasured:
        with ranks.agreement("whether a model fits"):
            check_fitness(model, name, tolerance=tolerance_of(getattr(torch, config.model.dtype)))
    return learner


def make_objective(config: RunConfig) -> Objective:
    settled = config.objective.model_copy(update={"same_support": config.same_support})
    return Objective(settled, config.sampling.max_completion_length)


def _names_a_model(reference: str) -> bool:
    """Whether `objective.reference` names one of its own, and not the policy as it was or is without its adapter."""
    return reference not in ("none", "initial", "adapter_off")


def load_reference(
    config: RunConfig, language: Words, policy: PolicyModel, load: Load = load_policy
) -> PolicyModel | None:
    """The policy that the objective compares with; `ModelError` if it speaks of other tokens."""
    name, dtype, device = config.objective.reference, getattr(torch, config.model.dtype), pick_device()
    if name == "none":
        return None
    if config.reference_is_base:
        return policy.without_adapter()
    if name == "initial":
        return load(language.folder, dtype, device, known_to_fit=True).requires_grad_(False)
    reference = load(reference_folder(name), dtype, device).requires_grad_(False)
    _require_same_tokens(f"objective.reference {name}", reference, policy)
    return reference


def load_value_model(
    config: RunConfig,
    language: Words,
    policy: PolicyModel,
    numerics: Numerics,
    threads: int,
    load: Load = load_policy,
) -> tuple[ValueModel, Numerics]:
    """The critic's model, and a rule under which it is as exact as the policy; `ModelError` if it speaks of other
    tokens."""
    name, dtype, device = config.critic.path, getattr(torch, config.model.dtype), pick_device()
    if name is None:
        return ValueModel(load(language.folder, dtype, device, known_to_fit=True)), numerics
    other = load(resolve(name), dtype, device)
    _require_same_tokens(f"critic.path {name}", other, policy)
    if numerics is not FAST:
        found = probe_model(other, threads)
        if found is None or found.max_threads < threads:
            raise ConfigError(
                f"critic.path {name}: with {threads} threads its values would depend on their neighbours in the batch, "
                "so numerics are not exact; set run.numerics=fast, fewer learner.threads, or leave critic.path out"
            )
        numerics = replace(numerics, min_rows=max(numerics.min_rows, found.min_rows))
    return ValueModel(other), numerics


def _require_same_tokens(who: str, model: PolicyModel, policy: PolicyModel) -> None:
    theirs, ours = (m.config.get_text_config().vocab_size for m in (model, policy))
    if theirs != ours:
        raise ModelError(
            f"{who} has a vocabulary of {theirs} tokens and the policy one of {ours}; what they say can only be "
            "compared token by token: name a model with the same tokenizer"
        )


def reference_folder(name: str) -> Path:
    """Where the model lies that `objective.reference` names; fetched, if it has to be."""
    try:
        return resolve(name)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "objective.reference", 1)) from error


def _threads(section: str, usual: int, wanted: int | None, numerics: Numerics, say: Callable[[str], None]) -> int:
    """Threads of a role: no more than keep the bits; says so if more were asked for."""
    if wanted is not None and wanted > numerics.max_threads:
        say(f"{section}.threads={wanted} is lowered to {numerics.max_threads}: numerics are exact up to there here")
    return min(usual, numerics.max_threads)


def make_evaluator(config: RunConfig, language: Language, generator: Generator, verifier: Verifier) -> Evaluator | None:
    """Asks the held-out questions of every task that has some; None if none has."""
    tasks = [
        HeldOut(
            task=task.name,
            prompts=language.mixture.held_out(task.name)[: config.evaluation.prompts],
            judge=task.rewards[0].source,
            counts=partial(counts, rewards=task.rewards, source=task.rewards[0].source),
        )
        for task in config.tasks
        if task.held_out
    ]
    if not tasks:
        return None
    return Evaluator(
        generator,
        verifier,
        tasks,
        config.evaluation,
        sampling=language.sampling,
        seed=config.run.seed,
        render=language.renderer.prompt_ids,
        decode=language.decode,
    )


def make_meter(
    config: RunConfig,
    language: Language,
    generator: Generator,
    engine: Examines,
    learner: LearnerPlace,
    bound: Bound,
    tell: OnEvent,
    say: Callable[[str], None],
) -> Meter:
    """Compares engine and learner after publications. ``engine``: the one that ``generator`` asks, or one of them."""
    return Meter(
        probe=Probe(
            generator=generator,
            scoring=Scoring(learner),
            sampling=language.sampling,
            seed=config.run.seed,
        ),
        engine=engine,
        bound=bound,
        ends=language.renderer.stop_token_ids,
        tokens=config.telemetry.probe,
        diagnoses=config.telemetry.health
        and (config.same_support or not config.sampling.leaves_out)
        and config.learner.ranks == 1,  # it looks at a whole model
        tell=tell,
        say=say,
    )


MIB = 2**20


def engine_memory(engine: Engine) -> dict[str, float]:
    """MiB of what an engine holds for the whole run, by the owners that `sizes.memory_by_owner` estimates for."""
    owners = {
        "engine: weights": sum(p.nbytes for p in engine.policy.parameters()) / MIB,
        "engine: keys and values": engine.kv_bytes / MIB,
    }
    if engine.base_bytes:
        owners["engine: base weights"] = engine.base_bytes / MIB
    if engine.packed is not None:
        owners["engine: packed weights"] = engine.packed.num_bytes / MIB
    return owners


def learner_memory(learner: PolicyLearner) -> dict[str, float]:
    """The same of a learner; of one of several ranks, what it holds itself."""
    trained = [p for p in learner.policy.parameters() if p.requires_grad]
    weights = _held_mb(learner.policy.parameters())
    owners = {
        "learner: weights": weights,
        "learner: gradients": _held_mb(trained),
        "learner: AdamW": 2 * sum(4 * local(p).numel() for p in trained) / MIB,
    }
    if learner.reference is not None and learner.reference.model is not learner.policy.model:
        owners["learner: reference"] = _held_mb(learner.reference.parameters())
    if learner.critic is not None:
        critic = list(learner.critic.model.parameters())
        owners["critic: weights"] = own = _held_mb(critic)
        owners["critic: AdamW"] = 2 * sum(4 * local(p).numel() for p in critic) / MIB
        owners["learner: gradients"] = max(weights, own)
    return owners


def _held_mb(parameters: Iterable[torch.Tensor]) -> float:
    return sum(local(p).nbytes for p in parameters) / MIB
