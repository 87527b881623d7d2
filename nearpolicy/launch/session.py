"""The life of one training run: start the roles, evaluate, train, evaluate, save, sum up.

    verifier workers -> language (data) -> model -> folder, store -> engine, learner -> version 0 -> Pipeline -> summary

What a person can get wrong in rewards, data and model is refused before a run folder is made or taken, data before
weights are loaded. A run that is stopped or refused before version 0 is published leaves nothing in its folder, nor the
folder if it made it. Verifier workers start before torch is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearpolicy.config import RunConfig, dump_resolved
from nearpolicy.errors import NearpolicyError, RunFolderError, UserError, first_error
from nearpolicy.launch.alarms import Alarms
from nearpolicy.launch.pause import PAUSED, pause
from nearpolicy.launch.progress import progress
from nearpolicy.launch.recovery import Recovery
from nearpolicy.launch.resume import require_same_data
from nearpolicy.launch.rows import assembled, left_out
from nearpolicy.launch.runtime import Runtime, runtime_of
from nearpolicy.launch.sizes import versions
from nearpolicy.launch.successes import Successes
from nearpolicy.launch.watch import Watch
from nearpolicy.launch.words import count, place
from nearpolicy.machine import helpers_peak_memory_mb, peak_memory_mb
from nearpolicy.pipeline import Next
from nearpolicy.records import Fate, Group, Position, Row, StepReport
from nearpolicy.store.folder import RunFolder, create_run_folder, remove_run
from nearpolicy.store.metric_lines import is_of_evaluation
from nearpolicy.store.position import position_of
from nearpolicy.store.reader import RunReader
from nearpolicy.store.recycled import can_go_on
from nearpolicy.telemetry.config import MonitorConfig
from nearpolicy.telemetry.events import Recorder
from nearpolicy.telemetry.integrity import Alarm
from nearpolicy.telemetry.ledger import ledger_metrics
from nearpolicy.telemetry.metrics import MetricsWriter
from nearpolicy.telemetry.sinks import open_sinks, require_sinks
from nearpolicy.telemetry.trace import Trace
from nearpolicy.verifier.combining import weighted_reward
from nearpolicy.verifier.sandbox.ladder import UNISOLATED, Opened

if TYPE_CHECKING:
    from nearpolicy.environments.single_turn import Bounded
    from nearpolicy.pipeline import Again, Pipeline
    from nearpolicy.rollout_queue.queue import StalenessBoundedQueue
    from nearpolicy.store.schema import EvaluatedSample


_STOPS = (UserError, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""How a run ends that a person ends, or could not begin."""


NOTHING_KEPT = "stopped before the first step; nothing is kept"
NOTHING_CHANGED = "stopped before the run went on; it stands where it stood"


@dataclass(eq=False)
class Session:
    """One training run in this process."""

    config: RunConfig
    folder: RunFolder | None = None
    """Made as `run.name` and `run.dir` say, once the data is known to be good, unless there is one already."""
    say: Callable[[str], None] = print
    resumes: bool = False
    """``folder`` holds a run that goes on."""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """User reward functions that need no loading, by the path a reward names them with."""
    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    _asking: asyncio.Task[Any] | None = field(default=None, init=False)
    """The evaluation that is going on."""
    stop_requested: bool = False
    """Set by `stop`: the run ends after the step it is in."""
    begun: bool = False
    """Version 0 is published."""
    position: Position | None = field(default=None, init=False)
    """Where the run stood that goes on."""
    _warm_losses: list[float] | None = field(default=None, init=False)
    """Of the steps that a warm start has made which goes on."""
    opening: bool = False
    """The folder is being taken, and is not yet sure to be given back: not a moment to be interrupted in."""
    _life: asyncio.Task[Any] | None = field(default=None, init=False)
    """That `train` runs in."""

    def stop(self) -> None:
        """End after the step in progress, and leave an evaluation at once. From any thread, or a signal's handler."""
        self.stop_requested = True
        if self._asking is not None:
            self._asking.get_loop().call_soon_threadsafe(self._asking.cancel)

    def leave(self) -> None:
        """End at once, with nothing kept, if the run has not begun; else as `stop` does. From any thread."""
        self.stop()
        if not self.begun and not self.opening and self._life is not None:
            self._life.get_loop().call_soon_threadsafe(self._life.cancel)

    async def train(self) -> dict[str, Any]:
        """Run to the end; returns the summary that was written."""
        self._started = time.monotonic()
        self._evaluation_s = 0.0
        self._life = asyncio.current_task()
        async with AsyncExitStack() as closing:  # what was opened last is closed first, after an error too
            self.runtime: Runtime = runtime_of(self.config, self.functions, self.say)
            closing.push_async_callback(self.runtime.close)
            await self._start_verifier(closing)
            await self._read_data_and_model()
            self.opening = True
            self._open_records(closing)
            self.opening = False
            if self.stop_requested:
                raise KeyboardInterrupt(NOTHING_CHANGED if self.resumes else NOTHING_KEPT)
            await self._start_roles(closing)
            return await self._run()

    async def _start_verifier(self, closing: AsyncExitStack) -> None:
        self.verifier = self.runtime.verifier(lambda *names, **numbers: self.telemetry.event(*names, **numbers))
        closing.push_async_callback(self.verifier.close)
        await self.verifier.start()
        if (kept_in := self.verifier.isolation) is not None:
            self._tell_isolation(kept_in)

    def _tell_isolation(self, kept_in: Opened) -> None:
        if kept_in.isolation == UNISOLATED:
            self.say("warning: programs of the policy run with the rights of this process (verifier.isolation: none)")
        for reason in kept_in.passed_over:
            self.say(f"programs are kept in by {kept_in.isolation} only; {reason}")

    async def _read_data_and_model(self) -> None:
        from nearpolicy.launch import build

        require_sinks(self.config.telemetry.sinks)
        self.language = build.Language.of(self.config, self.functions)
        await self.runtime.load(self.language)

    def _open_records(self, closing: AsyncExitStack) -> None:
        config, made = self.config, False
        if self.folder is None:
            made = config.run.dir is None or not Path(config.run.dir).exists()
            self.folder = create_run_folder(config.run.name, directory=config.run.dir)
        plain, self.packages = config.model_dump(mode="json"), versions()
        if self.resumes:
            self._reopen_records(closing, plain)
            return
        # The store before all else: its lock decides which of two runs has the folder, and the other writes nothing.
        try:
            self.store = self.runtime.create_store(self.folder, plain, self.packages)
        except RunFolderError:
            if made:
                with contextlib.suppress(OSError):  # unless somebody else has put something in
                    self.folder.path.rmdir()
            raise
        closing.push(partial(self._leave_nothing, made))
        closing.push(_unless_failed(self.store.close))
        self.say(f"run folder: {place(self.folder.path)}")
        self._open_telemetry(closing, plain)

    def _reopen_records(self, closing: AsyncExitStack, plain: dict[str, Any]) -> None:
        """Those of the run that goes on. What was under way when it ended is lost, and begins anew, or goes on from
        what is stored of it."""
        self.store = self.runtime.open_store(self.folder)
        closing.push(_unless_failed(self.store.close))
        with RunReader(self.folder.path) as run:
            self.position = position_of(run)
            before = [MonitorConfig(**monitor) for monitor in run.config.get("monitors", [])]
        require_same_data(self.position, self.language.mixture, self.folder)
        self.store.lost(
            self.position.unfinished,
            "under way when the run ended",
            stopped=self.position.stopped,
            recycled=self._gone_on_from(self.position),
        )
        self.store.note("config", plain)
        self.say(f"run folder: {place(self.folder.path)}, taken up after {count(self.position.steps, 'step')}")
        self._open_telemetry(closing, plain)
        new = [monitor for monitor in self.config.monitors if monitor not in before]
        self.alarms.begin(new, self.position.steps)
        self.watch.step = self.position.steps

    def _gone_on_from(self, found: Position) -> list[Group]:
        """What is stored of unfinished groups, as far as it is not sampled anew. That is what exact numerics do, which
        give an undisturbed run's tokens, and what becomes of a group that is beyond the bound, or has a greedy
        completion."""
        greedy = self.config.objective.parts["advantage"].greedy_baseline
        if self.runtime.numerics == "exact" or greedy:
            return []
        groups = [group for group in map(can_go_on, found.stopped) if group is not None]
        return [g for g in groups if found.steps - g.oldest_version <= self.config.queue.max_staleness]

    def _open_telemetry(self, closing: AsyncExitStack, plain: dict[str, Any]) -> None:
        config = self.config
        self.folder.config.write_text(dump_resolved(config), encoding="utf-8")
        sinks = open_sinks(config.telemetry.sinks, self.folder.path, plain)
        closing.callback(sinks.close)
        self.alarms = Alarms(config, tell=lambda **seen: self.telemetry.event("monitor", "alarm", **seen), say=self.say)
        self.telemetry = Recorder(
            self.store,
            wall_anchor=self.store.wall_anchor,
            metrics=MetricsWriter(self.folder.metrics),
            sinks=sinks,
            trace=Trace(self._trace_file(), config.telemetry.profile) if config.telemetry.profile else None,
        )
        closing.push(_unless_failed(self.telemetry.close))
        self.watch = Watch(
            self.folder.path,
            last_events=self.telemetry.last_events,
            say=self.say,
            quiet_s=config.telemetry.quiet_s,
        )
        self.watch.start()
        closing.callback(self.watch.close)

    def _trace_file(self) -> Path:
        """Of a run that goes on beside the trace of its first steps."""
        first = self.folder.trace
        return first if self.position is None else first.with_name(f"trace-{self.position.steps}.json")

    def _leave_nothing(self, made: bool, kind: object, error: BaseException | None, trace: object) -> None:
        """A run that was stopped or refused before it began had nothing to record; a crash may have."""
        if not self.begun and isinstance(error, _STOPS):
            remove_run(self.folder, made=made)

    async def _start_roles(self, closing: AsyncExitStack) -> None:
        from nearpolicy.launch import build

        config, tell = self.config, self.telemetry.event
        closing.push_async_callback(self.runtime.stop)  # before the records, which the roles tell
        await self.runtime.start(tell)
        self.generator, self.learner = self.runtime.generator, self.runtime.learner
        self.publisher = self.runtime.publisher
        self.evaluator = build.make_evaluator(config, self.language, self.generator, self.verifier)
        self.successes: Again = lambda step: ((), ())
        if config.queue.replay is not None:
            self.successes = Successes(config, self.folder, self.store)
            closing.callback(self.successes.close)
        self.recovery = Recovery(
            config,
            self.folder,
            self.learner,
            self.publisher,
            self.store,
            self.telemetry,
            self.say,
            warm_start=partial(self._warm_start, may_stop=False),
            warm_again=self._warm_again,
        )
        self.runtime.remember(self.recovery.bring_back)
        self.meter = self.runtime.meter(self.language, partial(tell, "monitor"))

    async def _run(self) -> dict[str, Any]:
        """Three times go into the summary: ``setup_s`` until version 0 is published; ``wall_s`` of training, from the
        first admission to the last step, evaluations during it included; ``evaluation_s`` of all evaluations, those
        before and after training too.
        """
        due: list[Alarm] = []
        if self.position is None:
            await self._warm_start()
            if self.stop_requested:
                raise KeyboardInterrupt(NOTHING_KEPT)
            await self._publish_first()
        else:
            self.position, self._taken_up_at = await self.recovery.take_up(self.position)
            last = self._remember(self.position.steps)
            (self.folder.path / PAUSED).unlink(missing_ok=True)  # who takes the run up wants it to go on
            due = [alarm for alarm in last if alarm.action == "rollback"]  # a kill came before it
            if self.position.steps >= self.config.run.steps:  # the last evaluation asks for nothing, the last step does
                due = [alarm for alarm in due if not is_of_evaluation(alarm.metric)]
        self.memory = await self.runtime.memory()
        self.begun = True
        setup_s = time.monotonic() - self._started
        before = await self._evaluate_alone(0)
        if self._evaluation_was_due():
            await self._evaluate(self.learner.version, with_pass=False)
        begin = time.monotonic()
        if not self.stop_requested:
            try:
                pipeline = self._pipeline()
                first_step, ends = await self._act(pipeline.first_step, [*due, *self.alarms.due()])
                if not ends:
                    await replace(pipeline, first_step=first_step).run()
            except BaseExceptionGroup as errors:
                error = first_error(errors)
                saves = isinstance(error, UserError) and not isinstance(error, RunFolderError)
                if saves and self.learner.is_there:
                    await self._save()  # what was learnt so far; another setting may go on from there
                raise
        wall_s = time.monotonic() - begin
        steps = self.learner.version
        await self._save()  # first of all: the evaluation may take long, and a person may not wait for it
        after = await self._evaluate_alone(steps)
        times = {"wall_s": wall_s, "setup_s": setup_s, "evaluation_s": self._evaluation_s}
        return self._sum_up(before, after, steps, times, await self.runtime.peaks())

    def _environment(self) -> Bounded:
        from nearpolicy.environments.single_turn import Bounded, SingleTurn

        config, limits, estimator = self.config, self.config.queue, self.config.objective.parts["advantage"]
        rewards = {task.name: task.rewards for task in config.tasks}
        environment = SingleTurn(
            self.generator,
            self.verifier,
            render=self.language.renderer.prompt_ids,
            decode=self.language.decode,
            reward_of=lambda verdicts, task: weighted_reward(verdicts, rewards[task]),
            sampling=self.language.sampling,
            n=config.sampling.num_generations,
            smallest_group=estimator.smallest_group,
            with_baseline=estimator.greedy_baseline,
            timeout_s=limits.rollout_timeout_s,
            earlier=self.store.recycled.take,
        )
        return Bounded(
            environment,
            timeout_s=limits.rollout_timeout_s,
            retries=limits.rollout_retries,
            on_retry=self.store.retried,
        )

    def _queue(self, give_up: Callable[[int, str], None]) -> StalenessBoundedQueue:
        """Where the run stood, if it goes on."""
        from nearpolicy.rollout_queue.ledger import Ledger
        from nearpolicy.rollout_queue.queue import StalenessBoundedQueue

        config, limits = self.config, self.config.queue
        queue = StalenessBoundedQueue(
            Ledger(
                prompts_per_step=limits.prompts_per_step,
                max_staleness=limits.max_staleness,
                order=limits.order,
                at_bound=limits.at_bound,
                num_slots=config.num_slots,
            ),
            self.language.mixture,
            self.store,
            seed=config.run.seed,
            num_groups=config.run.steps * limits.prompts_per_step,
            stall_timeout_s=limits.stall_timeout_s,
            left_out=partial(left_out, config) if limits.dynamic_sampling else None,
            max_rounds=limits.max_rounds or 0,
            requeue=limits.at_bound == "requeue",
            give_up=give_up,
            adaptive=limits.adaptive_slots,
            fewest_slots=config.sync.weight_sync_steps * limits.prompts_per_step,
            may_roll_back=any(monitor.action == "rollback" for monitor in config.monitors),
            on_event=partial(self.telemetry.event, "queue"),
        )
        if self.position is not None:
            begun = self.store.recycled.oldest_versions()
            queue.restore(self.position, published=self._taken_up_at, begun=begun)
        return queue

    def _pipeline(self) -> Pipeline:
        from nearpolicy.pipeline import Pipeline

        config, limits, environment = self.config, self.config.queue, self._environment()
        self.queue = self._queue(environment.give_up)
        return Pipeline(
            queue=self.queue,
            environment=environment,
            learner=self.learner,
            weights=self.publisher,
            store=self.store,
            telemetry=self,
            assemble=partial(assembled, config),
            after_step=self._after_step,
            first_step=0 if self.position is None else self.position.steps,
            num_steps=config.run.steps,
            prompts_per_step=limits.prompts_per_step,
            num_slots=config.num_slots,
            weight_sync_steps=config.sync.weight_sync_steps,
            again=self.successes,
            streaming=config.learner.streaming and self.learner.can_learn_ahead and limits.order == "admission",
        )

    async def _warm_start(self, *, may_stop: bool = True) -> None:
        from nearpolicy.learner.step import PolicyLearner

        if not self.config.warm_start.steps:
            return
        self._warm_losses = losses = []
        for rows in self._supervised_batches():
            if may_stop and self.stop_requested:
                break
            losses.append(await self._supervised_step(len(losses), rows))
        await self.learner.call(PolicyLearner.begin)
        self._warm_losses = None
        if losses:
            self.say(f"warm start: {len(losses)} supervised steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    async def _warm_again(self) -> bool:
        """Of a learner that was lost: its warm start, or as much as it had done of one that goes on; whether that is
        all of it."""
        from nearpolicy.learner.step import PolicyLearner

        goes_on = self._warm_losses is not None
        done = len(self._warm_losses) if goes_on else self.config.warm_start.steps
        for step, rows in enumerate(islice(self._supervised_batches(), done)):
            await self._supervised_step(step, rows)
        if done and not goes_on:
            await self.learner.call(PolicyLearner.begin)
        return not goes_on

    def _supervised_batches(self) -> Iterator[list[Row]]:
        from nearpolicy.launch.warm_start import supervised_batches

        config = self.config.warm_start
        return supervised_batches(self.language.mixture, self.config.tasks, config, self.language.renderer)

    async def _supervised_step(self, step: int, rows: list[Row]) -> float:
        from nearpolicy.learner.step import PolicyLearner
        from nearpolicy.objectives.objective import Supervised

        rate = self.config.warm_start.learning_rate
        try:
            return await self.learner.call(PolicyLearner.supervised_step, rows, Supervised(), rate)
        except NearpolicyError as error:  # a gradient that is not finite: a setting of the recipe is the cause
            raise UserError(f"warm start, step {step}: {error}") from error

    async def _publish_first(self) -> None:
        """Version 0: the generator shows that it starts from the learner's weights."""
        begin = time.monotonic()
        record = await self.publisher.publish()
        self.store.published(record, time.monotonic() - begin)
        self.store.note("initial_weights", {"fingerprint": record.fingerprint, "path": str(self.language.folder)})
        await self._keep(record.version)

    async def _after_step(self, report: StepReport) -> Next:
        """Runs while the learner is idle and no version changes; generation goes on."""
        config, step = self.config, report.version
        follows = await self._act(step, self.alarms.due())
        if follows.step != step:
            return follows
        ended = self.stop_requested or step == config.run.steps
        if step % config.sync.weight_sync_steps == 0 or step == config.run.steps:
            await self.meter.published(report, ended=ended)
        if step % config.sync.weight_sync_steps == 0 or ended:
            await self._keep(step)
            if config.evaluation.every and step % config.evaluation.every == 0 and not ended:
                await self._evaluate(step, with_pass=False)
        if config.checkpoint.every and step % config.checkpoint.every == 0 and not ended:
            await self._save()
        return await self._act(step, self.alarms.due())  # what an evaluation has raised

    def _remember(self, steps: int) -> list[Alarm]:
        with RunReader(self.folder.path) as run:
            return self.alarms.recall(run, steps)

    async def _act(self, step: int, due: Sequence[Alarm]) -> Next:
        """What alarms ask for."""
        if any(alarm.action == "stop" for alarm in due):
            self.stop()
        backwards = [alarm for alarm in due if alarm.action == "rollback" and self.learner.version]
        for alarm in sorted(backwards, key=lambda alarm: alarm.good - alarm.monitor.back)[:1]:
            if not self.stop_requested:  # the earliest; what else there was is undone with it
                step = await self._roll_back(alarm)
        for alarm in due:
            if alarm.action == "pause" and not backwards and not self.stop_requested:
                await self._pause(alarm)
        return Next(step, ends=self.stop_requested)

    async def _roll_back(self, alarm: Alarm) -> int:
        """The step that comes next."""
        most, done = alarm.monitor.most, self.learner.version
        if self.recovery.rollbacks() >= most:
            self.say(
                f"{alarm.metric}: rolled back {count(most, 'time')} already; the run ends (monitors: raise `most`)"
            )
            self.stop()
            return done
        back_to = max(0, min(alarm.good - alarm.monitor.back, done - 1))
        self.meter.forget()
        if not await self.recovery.roll_back(self.queue, back_to, alarm.text):
            self.stop()
            return done
        self.watch.step = back_to
        self._remember(back_to)
        return back_to

    async def _pause(self, alarm: Alarm) -> None:
        self.queue.hold(True)
        with self.telemetry.span("monitor", "pause", reason=alarm.text):
            goes_on = await pause(
                self.folder.path, alarm.text, most_s=alarm.monitor.pause_s, say=self.say,
                is_stopped=lambda: self.stop_requested,
            )  # fmt: skip
        self.queue.hold(False)
        if not goes_on:
            self.stop()

    async def _evaluate_alone(self, version: int) -> Mapping[str, object]:
        """Before the first step and after the last one, with samples for pass@k."""
        passed = version < self.learner.version and not self._evaluated_before(version)  # the run goes on
        return {} if self.stop_requested or passed else await self._evaluate(version, with_pass=True)

    async def _evaluate(self, version: int, *, with_pass: bool) -> Mapping[str, object]:
        if self.evaluator is None:
            return {}
        if known := self._evaluated_before(version):
            return known
        from nearpolicy.evaluate.evaluator import score_metrics, summary_of
        from nearpolicy.evaluate.metrics import held_out_scores

        begin = time.monotonic()
        self.say(f"evaluating version {version} on {self.evaluator.plan(with_pass=with_pass)}")
        with progress(self.evaluator.size(with_pass=with_pass), self.say) as advance:
            samples = await self._unless_stopped(self.evaluator.run(version, with_pass=with_pass, on_answer=advance))
        if samples is None:
            self.say("the evaluation was left, its answers are not kept")
            return {}
        seconds = time.monotonic() - begin
        self._evaluation_s += seconds
        with RunReader(self.folder.path) as run:
            lineage = run.lineages.of(version)
        self.store.evaluated([replace(sample, lineage=lineage) for sample in samples])
        metrics = score_metrics(held_out_scores(samples), self.config.evaluation.pass_k)
        line = {**metrics, **self.alarms.further(metrics)}
        self.telemetry.log_step(version, line)
        self.alarms.observe(version, line, acts=not with_pass)
        self.telemetry.event("evaluate", "evaluate", version=version, seconds=seconds, questions=len(samples))
        found = [f"{name.removeprefix('evaluation/')} {value:.3f}" for name, value in metrics.items()]
        if version == 0:
            self.evaluator.require_judged(samples)  # nothing that is learned could be measured
        found += [self.evaluator.not_judged(len(samples))] if self.evaluator.reasons else []
        self.say(f"held out, version {version}: {', '.join(found) or 'no answer'} ({seconds:.0f} s)")
        return summary_of(samples, self.config.evaluation.pass_k)

    def _evaluation_was_due(self) -> bool:
        """Whether the run ended before the evaluation of the version that it goes on from."""
        every, version = self.config.evaluation.every, self.learner.version
        if self.position is None or not every or version != self._taken_up_at or self.stop_requested:
            return False
        return 0 < version < self.config.run.steps and version % every == 0 and not self._evaluated_before(version)

    def _evaluated_before(self, version: int) -> Mapping[str, object]:
        """What a run that goes on has found out already."""
        from nearpolicy.evaluate.evaluator import summary_of

        if self.position is None or version > self.position.steps:
            return {}
        with RunReader(self.folder.path) as run:
            samples = run.evaluations(version=version)
        return summary_of(samples, self.config.evaluation.pass_k) if samples else {}

    async def _unless_stopped(self, evaluation: Coroutine[Any, Any, list[EvaluatedSample]]) -> Any:
        """What it gives, or None if `stop` ended it."""
        self._asking = asyncio.create_task(evaluation)
        if self.stop_requested:
            self._asking.cancel()
        try:
            return await self._asking
        except asyncio.CancelledError:
            if not self.stop_requested or asyncio.current_task().cancelling():
                raise
            return None
        finally:
            self._asking = None

    async def _keep(self, version: int) -> None:
        if self.config.run.keep_versions:
            from nearpolicy.learner.checkpoint import save_weights

            path = self.folder.weights / f"version-{version}.safetensors"
            await self.learner.call(save_weights, path)

    async def _save(self) -> None:
        from nearpolicy.learner.checkpoint import checkpoints, save_checkpoint

        if self.learner.version == 0 and not self.config.warm_start.steps:
            return  # the model that the run was given
        self.store.flush(durable=True)  # a checkpoint is never ahead of the store, after a power cut neither
        save = partial(
            save_checkpoint,
            folder=self.folder.checkpoints,
            beside=[self.language.renderer.tokenizer],
            keep_last=self.config.checkpoint.keep_last,
            keep_best=self.config.checkpoint.keep_best,
            scores=self._accuracies() if self.config.checkpoint.keep_best else None,
        )
        with self.telemetry.span("learner", "checkpoint", step=self.learner.version):
            path = await self.learner.call(save)
        self.store.checkpointed(checkpoints(self.folder.checkpoints)[0][0])
        self.say(f"checkpoint: {place(path)}")

    def _accuracies(self) -> dict[int, float]:
        """Version -> mean held-out accuracy over the tasks, of all evaluations of the run."""
        from nearpolicy.evaluate.metrics import held_out_scores

        with RunReader(self.folder.path) as run:
            scores = held_out_scores(run.evaluations())
        found: dict[int, list[float]] = {}
        for score in scores:
            if score.mode == "accuracy" and score.accuracy is not None:
                found.setdefault(score.version, []).append(score.accuracy)
        return {version: sum(values) / len(values) for version, values in found.items()}

    # The pipeline's `Telemetry`: everything goes to the recorder, and step metrics to whoever watches.

    def event(self, role: str, kind: str, **fields: Any) -> None:
        self.telemetry.event(role, kind, **fields)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        times = self.telemetry.busy_times()
        busy = {"generator": times["time/generate_s"], "learner": metrics["time/learn_s"]}
        metrics = {**metrics, **times, **self.telemetry.judging_times(), "memory/peak_mb": peak_memory_mb()}
        busy["verifier"] = times["time/verify_s"] / self.config.verifier.workers
        if (kept_in := self.verifier.isolation) is not None:
            metrics["verifier/unisolated"] = float(kept_in.isolation == UNISOLATED)
        metrics |= self.verifier.flip_rates() | self.alarms.further(metrics)
        if self.queue.may_admit_fewer:
            metrics["queue/slots"] = float(self.queue.slots)
        metrics |= ledger_metrics(self.store.ledger()) | self.runtime.usage()
        metrics |= self.meter.probed()
        self.meter.observe(metrics)
        metrics |= {f"utilisation/{role}": seconds / metrics["time/step_s"] for role, seconds in busy.items()}
        self.telemetry.log_step(step, metrics)
        self.watch.step = step + 1
        self.alarms.observe(step, metrics)
        if any(monitor.action == "lower_staleness" for monitor in self.config.monitors):
            (self.queue.admit_fewer if self.alarms.lowers_staleness else self.queue.admit_more)()
        if self.on_step is not None:
            self.on_step(step, metrics)

    def _sum_up(
        self, before: Any, after: Any, steps: int, times: Mapping[str, float], peaks: Mapping[str, float]
    ) -> dict[str, Any]:
        self.telemetry.flush()
        self.store.flush()
        with RunReader(self.folder.path) as run:
            lines = run.metrics()
            ledger = dict(run.ledger().items())
            diagnoses = [{"step": event.version - 1, **event.numbers} for event in run.events("diagnosis")]
            lost, undone = run.num_lost(), run.num_undone_tokens()
            alarms = [event.numbers.get("text", event.numbers["metric"]) for event in run.events("alarm")]
        config = self.config
        summary = {
            "run": self.folder.name,
            "model": config.model.path,
            "seed": config.run.seed,
            "max_staleness": config.queue.max_staleness,
            "steps": steps,
            "steps_asked": config.run.steps,
            "resumed_after": None if self.position is None else self.position.steps,
            "ended": "finished" if steps == config.run.steps else "stopped",
            **{name: round(seconds, 2) for name, seconds in times.items()},
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "roles_peak_memory_mb": {role: round(size, 1) for role, size in peaks.items()},
            "memory_mb": {owner: round(size, 1) for owner, size in self.memory.items()},
            "helper_processes_mb": [round(size, 1) for size in helpers_peak_memory_mb()],
            "numerics": self.runtime.numerics,
            "isolation": kept_in.isolation if (kept_in := self.verifier.isolation) is not None else None,
            "held_out": {"before": before, "after": after},
            "ledger": {fate.value: ledger.get(fate, 0) for fate in Fate},
            "lost_groups": lost,
            "undone_tokens": undone,
            "steps_s": round(sum(line.get("time/step_s") or 0.0 for line in lines), 2),
            "staleness": {"mean": _mean(lines, "staleness/mean"), "max": _largest(lines, "staleness/max")},
            "mismatch": {
                "mean": _mean(lines, "mismatch/logprob_diff_mean"),
                "p99": _largest(lines, "mismatch/logprob_diff_p99"),
                "max": _largest(lines, "mismatch/logprob_diff_max"),
            },
            "alarms": alarms,
            "diagnoses": diagnoses,
            "packages": self.packages,
        }
        self.folder.write_summary(summary)
        return summary


def _unless_failed(close: Callable[[], None]) -> Callable[..., None]:
    """``close`` at the exit of a stack; what it raises counts only if nothing went wrong before."""

    def exit(kind: object, error: BaseException | None, trace: object) -> None:
        try:
            close()
        except Exception:
            if error is None:
                raise

    return exit


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _largest(lines: list[dict[str, Any]], name: str) -> float | None:
    return max((line[name] for line in lines if line.get(name) is not None), default=None)


def run_session(session: Session) -> dict[str, Any]:
    """Run to the end in this process; the first error comes out alone, not in a group.

    Where an event loop is running already (a notebook), the run gets a thread of its own, and Ctrl-C ends it after the
    step it is in.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(session)
    with ThreadPoolExecutor(1, thread_name_prefix="session") as thread:
        done = thread.submit(_run_here, session)
        try:
            return done.result()
        except KeyboardInterrupt:
            session.stop()
            return done.result()


def _run_here(session: Session) -> dict[str, Any]:
    try:
        return asyncio.run(session.train())
    except Exception as raised:
        error = first_error(raised)
        if isinstance(error, OSError) and (full := _cannot_write(session, error)):
            raise RunFolderError(full) from error
        if error is raised:
            raise
        raise error from None


def _cannot_write(session: Session, error: OSError) -> str | None:
    """What to say of an error in the run folder; None for one elsewhere."""
    inside = session.folder is not None and Path(error.filename or "").is_relative_to(session.folder.path)
    if inside or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        folder = "the run folder" if session.folder is None else session.folder.path
        return f"{folder} cannot be written: {error}. Make room, or choose another run.dir"
    return None
