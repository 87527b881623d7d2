"""A run from recipe to summary: build the roles, evaluate, train, evaluate, save. The one place that knows them all.

    recipe -> folder, verifier workers, tokenizer and data, models, probe -> version 0 -> Pipeline -> summary.json

Everything a person can get wrong is refused before weights are loaded. Verifier workers start before torch is imported.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from nearpolicy.config import RunConfig, dump_resolved
from nearpolicy.launch.sizes import role_threads, versions
from nearpolicy.machine import num_cores, peak_memory_mb
from nearpolicy.records import Fate, StepReport
from nearpolicy.roles import Sampling
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.writer import SqliteStore
from nearpolicy.tasks.mixture import Mixture, load_mixture
from nearpolicy.telemetry.events import Recorder
from nearpolicy.telemetry.metrics import MetricsWriter
from nearpolicy.telemetry.sinks import open_sinks
from nearpolicy.verifier.config import reward_weights
from nearpolicy.verifier.functions import required_columns
from nearpolicy.verifier.service import VerifierService, weighted_reward

if TYPE_CHECKING:
    from nearpolicy.evaluate.evaluator import Evaluator
    from nearpolicy.generator.engine import Engine
    from nearpolicy.generator.runner import EngineRunner
    from nearpolicy.launch.inline import LearnerInThread
    from nearpolicy.models.tokenizer import Renderer
    from nearpolicy.sync.publisher import Publisher

Say = Callable[[str], None]


@dataclass(eq=False)
class Session:
    """One training run. Use `train`; the parts are public for programs that drive the loop themselves."""

    config: RunConfig
    folder: RunFolder
    say: Say = print
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """User reward functions that need no loading, by the path a reward names them with."""
    stop_requested: bool = False
    """Set from outside (Ctrl-C): the run ends after the step it is in."""
    on_step: Callable[[int, Mapping[str, float]], None] | None = None

    async def train(self) -> dict[str, Any]:
        """Run to the end; returns the summary that was written."""
        started = time.monotonic()
        self.verifier = VerifierService(
            {task.name: task.rewards for task in self.config.tasks},
            self.config.verifier,
            at_hand=self.functions,
            on_event=self._verifier_event,
        )
        await self.verifier.start()
        try:
            self._open_store()
            try:
                self._build()
                return await self._run(started)
            finally:
                self._close()
        finally:
            await self.verifier.close()

    # Building.

    def _open_store(self) -> None:
        config = self.config
        self.folder.config.write_text(dump_resolved(config), encoding="utf-8")
        packages = versions()
        self.store = SqliteStore.create(
            self.folder, config=config.model_dump(mode="json"), packages=packages, sync=config.store.sync
        )
        sinks = open_sinks(config.telemetry.sinks, self.folder.path, config.model_dump(mode="json"))
        self.telemetry = Recorder(
            self.store,
            wall_anchor=self.store.wall_anchor,
            metrics=MetricsWriter(self.folder.metrics),
            sinks=sinks,
        )
        self.packages = packages

    def _build(self) -> None:
        """Tokenizer and data, then models, then the roles around them."""
        from nearpolicy.models.loading import resolve
        from nearpolicy.models.tokenizer import Renderer, generation_stop_ids, load_tokenizer

        model = self.config.model
        self.model_folder = resolve(model.path, model.init, model.seed)
        tokenizer = load_tokenizer(model.tokenizer or str(self.model_folder))
        self.renderer = Renderer(tokenizer, stop_token_ids=generation_stop_ids(self.model_folder))
        self.mixture = load_tasks(self.config, self.renderer)
        sampling = self.config.sampling
        self.sampling = Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_completion_length,
            stop_token_ids=self.renderer.stop_token_ids,
            stop=tuple(sampling.stop),
        )
        self.generator, self.learner, self.publisher = self._roles()
        self.evaluator = self._evaluator()

    def _roles(self) -> tuple[EngineRunner, LearnerInThread, Publisher]:
        import torch

        from nearpolicy.generator.engine import Engine, EngineLimits
        from nearpolicy.generator.runner import EngineRunner
        from nearpolicy.launch.inline import LearnerInThread, RoleThread
        from nearpolicy.learner.step import PolicyLearner
        from nearpolicy.models.loading import load_policy
        from nearpolicy.objectives.objective import Objective
        from nearpolicy.sync.publisher import Publisher

        config = self.config
        dtype = getattr(torch, config.model.dtype)
        torch.set_num_threads(num_cores())
        policy = load_policy(self.model_folder, dtype)
        engine_threads, learner_threads = role_threads(config, num_cores())
        self.numerics, numerics = choose_numerics(config, policy, max(engine_threads, learner_threads), self.say)
        engine_threads = min(engine_threads, numerics.max_threads)
        learner_threads = min(learner_threads, numerics.max_threads)
        limits = EngineLimits.sized(
            policy,
            max_running=min(config.generator.max_running, config.queue.num_slots * config.sampling.num_generations),
            prefill_chunk=config.generator.prefill_chunk,
            max_length=config.sampling.max_prompt_length + self._longest_completion,
            kv_memory_mb=config.generator.kv_memory_mb,
        )
        engine = Engine(
            policy,
            limits,
            numerics,
            threads=engine_threads,
            decode=self._decode_raw,
            on_event=partial(self.telemetry.event, "generator"),
        )
        generator = EngineRunner(
            engine,
            on_sync=config.generator.on_sync,
            sync_timeout_s=config.sync.timeout_s,
            threads=engine_threads,
            numerics=self.numerics,
            on_event=partial(self.telemetry.event, "generator"),
        )
        learner = PolicyLearner(
            load_policy(self.model_folder, dtype, known_to_fit=True),
            Objective(config.objective, config.sampling.max_completion_length),
            config.learner,
            numerics,
            temperature=config.sampling.temperature,
            total_steps=config.run.steps,
            threads=learner_threads,
            on_event=partial(self.telemetry.event, "learner"),
        )
        in_thread = LearnerInThread(learner, RoleThread("learner", learner_threads))
        publisher = Publisher(
            in_thread, [generator], timeout_s=config.sync.timeout_s, on_event=partial(self.telemetry.event, "sync")
        )
        self.memory = memory_by_owner(engine, learner)
        return generator, in_thread, publisher

    @property
    def _longest_completion(self) -> int:
        return max(self.config.sampling.max_completion_length, self.config.evaluation.max_completion_length or 0)

    def _evaluator(self) -> Evaluator | None:
        from nearpolicy.evaluate.evaluator import Evaluator, HeldOut

        tasks = [
            HeldOut(
                task=task.name,
                prompts=self.mixture.held_out(task.name)[: self.config.evaluation.prompts],
                judge=task.rewards[0].source,
            )
            for task in self.config.tasks
            if task.held_out
        ]
        if not tasks:
            return None
        return Evaluator(
            self.generator,
            self.verifier,
            tasks,
            self.config.evaluation,
            sampling=self.sampling,
            seed=self.config.run.seed,
            render=self.renderer.prompt_ids,
            decode=self._decode,
        )

    # Running.

    async def _run(self, started: float) -> dict[str, Any]:
        from nearpolicy.environments.single_turn import Bounded, SingleTurn
        from nearpolicy.objectives.objective import assign_advantages
        from nearpolicy.pipeline import Pipeline
        from nearpolicy.rollout_queue.ledger import Ledger
        from nearpolicy.rollout_queue.queue import StalenessBoundedQueue

        config = self.config
        await self._warm_start()
        await self._publish_first()
        setup_s = time.monotonic() - started
        before = await self._evaluate(0, with_pass=True)
        weights = {task.name: reward_weights(task.rewards) for task in config.tasks}
        environment = SingleTurn(
            self.generator,
            self.verifier,
            render=self.renderer.prompt_ids,
            decode=self._decode,
            reward_of=lambda verdicts, task: weighted_reward(verdicts, weights[task]),
            sampling=self.sampling,
            n=config.sampling.num_generations,
        )
        ledger = Ledger(
            prompts_per_step=config.queue.prompts_per_step,
            max_staleness=config.queue.max_staleness,
            order=config.queue.order,
        )
        queue = StalenessBoundedQueue(
            ledger,
            self.mixture,
            self.store,
            seed=config.run.seed,
            num_groups=config.run.steps * config.queue.prompts_per_step,
            stall_timeout_s=config.queue.stall_timeout_s,
            on_event=partial(self.telemetry.event, "queue"),
        )
        self.pipeline = Pipeline(
            queue=queue,
            environment=Bounded(
                environment, timeout_s=config.queue.rollout_timeout_s, retries=config.queue.rollout_retries
            ),
            learner=self.learner,
            weights=self.publisher,
            store=self.store,
            telemetry=self,
            assemble=partial(assign_advantages, config=config.objective),
            after_step=self._after_step,
            num_steps=config.run.steps,
            prompts_per_step=config.queue.prompts_per_step,
            num_slots=config.queue.num_slots,
            weight_sync_steps=config.sync.weight_sync_steps,
        )
        self._evaluation_s = 0.0
        training_started = time.monotonic()
        await self.pipeline.run()
        wall_s = time.monotonic() - training_started - self._evaluation_s
        steps = self.learner.inner.version
        after = await self._evaluate(steps, with_pass=True)
        await self._save()
        return self._summarise(before, after, steps=steps, wall_s=wall_s, setup_s=setup_s)

    async def _warm_start(self) -> None:
        from nearpolicy.launch.warm_start import supervised_batches
        from nearpolicy.objectives.objective import Supervised

        config = self.config.warm_start
        if not config.steps:
            return
        learner = self.learner.inner
        for rows in supervised_batches(self.mixture, self.config.tasks, config, self.renderer):
            await self.learner.call(learner.supervised_step, rows, Supervised(), config.learning_rate)
        learner.forget_optimizer()
        self.say(f"warm start: {config.steps} supervised steps")

    async def _publish_first(self) -> None:
        """Version 0: the generator shows that it starts from the learner's weights."""
        begin = time.monotonic()
        record = await self.publisher.publish()
        self.store.published(record, time.monotonic() - begin)
        self.store.note("initial_weights", {"fingerprint": record.fingerprint, "path": str(self.model_folder)})
        await self._keep(record.version)

    async def _after_step(self, report: StepReport) -> bool:
        config, step = self.config, report.version
        if report.version % config.sync.weight_sync_steps == 0:
            await self._keep(report.version)
            if config.evaluation.every and step % config.evaluation.every == 0 and step < config.run.steps:
                begin = time.monotonic()
                await self._evaluate(step, with_pass=False)
                self._evaluation_s += time.monotonic() - begin
        if config.checkpoint.every and step % config.checkpoint.every == 0 and step < config.run.steps:
            await self._save()
        return self.stop_requested

    async def _evaluate(self, version: int, *, with_pass: bool) -> Mapping[str, object]:
        if self.evaluator is None:
            return {}
        from nearpolicy.evaluate.evaluator import score_metrics, summary_of
        from nearpolicy.evaluate.metrics import held_out_scores

        begin = time.monotonic()
        samples = await self.evaluator.run(version, with_pass=with_pass)
        self.store.evaluated(samples)
        pass_k = self.config.evaluation.pass_k
        metrics = score_metrics(held_out_scores(samples), pass_k)
        self.telemetry.log_step(version, metrics)
        self.telemetry.event("evaluate", "evaluate", version=version, seconds=time.monotonic() - begin)
        self.say(
            f"held out, version {version}: "
            + ", ".join(f"{name.removeprefix('evaluation/')} {value:.3f}" for name, value in metrics.items())
            + f" ({time.monotonic() - begin:.0f} s)"
        )
        return summary_of(samples, pass_k)

    async def _keep(self, version: int) -> None:
        if not self.config.run.keep_versions:
            return
        from safetensors.torch import save_file

        from nearpolicy.models.weights import named_weights

        def write() -> None:
            self.folder.weights.mkdir(exist_ok=True)
            tensors = {n: t.contiguous() for n, t in named_weights(self.learner.inner.policy.model).items()}
            save_file(tensors, self.folder.weights / f"version-{version}.safetensors")

        await self.learner.call(write)

    async def _save(self) -> None:
        from nearpolicy.learner.checkpoint import save_checkpoint

        begin = time.monotonic()
        save = partial(
            save_checkpoint,
            self.learner.inner,
            self.folder.checkpoints,
            beside=[self.renderer.tokenizer],
            keep_last=self.config.checkpoint.keep_last,
        )
        path = await self.learner.call(save)
        self.telemetry.event("learner", "checkpoint", seconds=time.monotonic() - begin, step=self.learner.inner.version)
        self.say(f"checkpoint: {path}")

    # Telemetry: the pipeline's metrics pass through here on their way to the recorder.

    def event(self, role: str, kind: str, **fields: Any) -> None:
        self.telemetry.event(role, kind, **fields)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.telemetry.log_step(step, metrics)
        if self.on_step is not None:
            self.on_step(step, metrics)

    def _verifier_event(self, role: str, kind: str, **numbers: Any) -> None:
        self.telemetry.event(role, kind, **numbers)

    def _decode(self, ids: Any) -> str:
        return self.renderer.decode(ids, stop=self.sampling.stop)

    def _decode_raw(self, ids: Any) -> str:
        return self.renderer.decode(ids)

    # Ending.

    def _summarise(self, before: Any, after: Any, *, steps: int, wall_s: float, setup_s: float) -> dict[str, Any]:
        self.telemetry.flush()
        self.store.flush()
        with RunReader(self.folder.path) as run:
            lines = [line for line in run.metrics() if "reward/mean" in line]
            ledger = {fate.value: tokens for fate, tokens in run.ledger().items()}
        summary = {
            "steps": steps,
            "wall_s": round(wall_s, 2),
            "setup_s": round(setup_s, 2),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "memory_mb": {owner: round(size, 1) for owner, size in self.memory.items()},
            "numerics": self.numerics,
            "held_out": {"before": before, "after": after},
            "ledger": {fate.value: ledger.get(fate.value, 0) for fate in Fate},
            "staleness": {
                "mean": _mean(lines, "staleness/mean"),
                "max": max((line["staleness/max"] for line in lines), default=None),
            },
            "mismatch": {
                "mean": _mean(lines, "mismatch/logprob_diff_mean"),
                "p99": _largest(lines, "mismatch/logprob_diff_p99"),
                "max": _largest(lines, "mismatch/logprob_diff_max"),
            },
            "packages": self.packages,
        }
        self.folder.write_summary(summary)
        return summary

    def _close(self) -> None:
        for role in ("generator", "learner"):
            if hasattr(self, role):
                getattr(self, role).close()
        failed = sys.exc_info()[0] is not None
        try:
            self.telemetry.close()
            self.store.close()
        except Exception:
            if not failed:  # the first error is the one to report
                raise


def load_tasks(config: RunConfig, renderer: Renderer) -> Mixture:
    """Read, check and divide all data of a recipe."""
    return load_mixture(
        config.tasks,
        seed=config.run.seed,
        renderer=renderer,
        max_prompt_length=config.sampling.max_prompt_length,
        reward_columns=required_columns,
    )


def choose_numerics(config: RunConfig, policy: Any, threads: int, say: Say) -> tuple[str, Any]:
    """The mode this machine can keep, and its rule; says so if it is not the one asked for."""
    from nearpolicy.errors import ConfigError
    from nearpolicy.models.numerics import FAST, probe_model

    if config.numerics == "fast":
        return "fast", FAST
    found = probe_model(policy, threads)
    if found is not None:
        return "exact", found
    if config.run.numerics == "exact":
        raise ConfigError(
            "run.numerics=exact is not to be had on this machine: matrix products of one row depend on their "
            "neighbours. Set run.numerics=fast; the mismatch is then measured and corrected"
        )
    say("exact numerics are not to be had on this machine: going on with run.numerics=fast")
    return "fast", FAST


def memory_by_owner(engine: Engine, learner: Any) -> dict[str, float]:
    """MiB of what the two roles hold for the whole run."""
    mib = 2**20
    size = sum(p.nbytes for p in learner.policy.parameters()) / mib
    return {
        "engine_weights": sum(p.nbytes for p in engine.policy.parameters()) / mib,
        "engine_kv": engine.kv_bytes / mib,
        "learner_weights": size,
        "learner_gradients": size,
        "learner_optimizer": 2 * sum(4 * p.numel() for p in learner.policy.parameters()) / mib,
    }


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _largest(lines: list[dict[str, Any]], name: str) -> float | None:
    return max((line[name] for line in lines if line.get(name) is not None), default=None)


def run_session(session: Session) -> dict[str, Any]:
    """Run to the end in this process; the first error comes out alone, not in a group."""
    try:
        return asyncio.run(session.train())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
