"""The real engine, learner and publication on a tiny model: asynchronous at staleness 0 is synchronous, bit for bit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nearpolicy.environments.single_turn import Bounded, SingleTurn
from nearpolicy.errors import SyncError
from nearpolicy.generator.engine import Engine, EngineLimits
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.launch.inline import LearnerInThread, RoleThread
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.weights import digests, named_weights
from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective
from nearpolicy.pipeline import Next, Pipeline
from nearpolicy.records import BASELINE, Admission, Baseline, Batch, Group, Prompt, Rollout, Verdict
from nearpolicy.roles import Request, Sampling
from nearpolicy.rollout_queue.ledger import Ledger
from nearpolicy.rollout_queue.queue import StalenessBoundedQueue
from nearpolicy.sync.publisher import Publisher

EXACT = Numerics(min_rows=16, max_threads=2)
OBJECTIVE = ObjectiveConfig(loss="pg")  # whose value, unlike that of a ratio, is not 0 at the first update
REMAX = ObjectiveConfig(loss="pg", advantage="remax")
SAMPLING = Sampling(temperature=1.3, max_tokens=7, stop_token_ids=(257,))
GREEDY = Sampling(temperature=0.0, max_tokens=7, stop_token_ids=(257,))
PER_STEP, SIZE, STEPS = 3, 4, 4


def folder() -> Path:
    return resolve("random:llama", {"initializer_range": 0.15}, seed=1)


def an_engine() -> Engine:
    limits = EngineLimits(max_running=16, num_pages=64, prefill_chunk=32)
    return Engine(load_policy(folder(), known_to_fit=True), limits, EXACT)


def a_learner(**config) -> PolicyLearner:
    return PolicyLearner(
        load_policy(folder(), known_to_fit=True),
        Objective(OBJECTIVE, SAMPLING.max_tokens),
        LearnerConfig(**{"learning_rate": 3e-3} | config),
        EXACT,
        temperature=SAMPLING.temperature,
        total_steps=STEPS,
    )


def prompt(index: int) -> Prompt:
    return Prompt(id=str(index), task="t", text=f"{index} + {index} =")


def ids_of(prompt: Prompt) -> np.ndarray:
    return np.frombuffer(prompt.text.encode(), dtype=np.uint8).astype(np.int32)


def reward(tokens) -> float:
    return float(np.sum(tokens) % 5)


@dataclass
class Run:
    """What is compared."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    versions: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)

    def note(self, batch: Batch, metrics) -> None:
        for group in batch.groups:
            for rollout in group.everything:
                [segment] = rollout.segments
                self.tokens[group.index, rollout.sample] = segment.token_ids.tolist()
                self.logprobs[group.index, rollout.sample] = segment.behavior_logprobs.tolist()
                self.versions.append(segment.versions.tolist())
        self.losses.append(metrics["policy/loss"])
        self.mismatches.append(metrics["mismatch/logprob_diff_max"])


def synchronous(seed: int, objective: ObjectiveConfig = OBJECTIVE, **config) -> Run:
    """The whole method as a plain loop: one prompt after the other, then one step, then the new weights."""
    engine, learner, run = an_engine(), a_learner(**config), Run()
    for step in range(STEPS):
        groups = []
        for index in range(step * PER_STEP, (step + 1) * PER_STEP):
            context = ids_of(prompt(index))
            admission = Admission(index=index, prompt=prompt(index), seed=seed, version=step)
            request = Request(id=str(index), token_ids=context, sampling=SAMPLING, n=SIZE, seed=seed, admission=index)
            engine.submit(request)
            done = []
            while len(done) < SIZE:
                done += engine.step()
            done.sort(key=lambda completion: completion.sample)
            rollouts = [c.rollout(context, "", "exact") for c in done]
            rewards = tuple(reward(c.token_ids) for c in done)
            group = Group(admission=admission, rollouts=tuple(rollouts), verdicts=({},) * SIZE, rewards=rewards)
            if objective.greedy_baseline:
                group = replace(group, baseline=greedy_baseline(engine, request))
            groups.append(group)
        batch = Batch(step=step, places=PER_STEP, groups=tuple(groups), rows=assign_advantages(groups, objective))
        run.note(batch, learner.step(batch).metrics)
        engine.load(learner.weights(None))
    run.weights = digests(named_weights(learner.policy.model))
    return run


def greedy_baseline(engine: Engine, of: Request) -> Baseline:
    engine.submit(replace(of, id=f"{of.id}.greedy", sampling=GREEDY, n=1))
    done = []
    while not done:
        done += engine.step()
    rollout = replace(done[0].rollout(of.token_ids, "", "exact"), sample=BASELINE)
    return Baseline(rollout=rollout, reward=reward(done[0].token_ids))


@pytest.fixture(scope="module")
def plain() -> Run:
    return synchronous(seed=0)


class Shuffled:
    """An environment whose groups end in an order drawn from a seed: none leaves before all that run have ended."""

    def __init__(self, inner, seed: int) -> None:
        self.inner, self.random = inner, random.Random(seed)
        self.ended: list[int] = []
        self._inside = 0
        self._waiting: list[asyncio.Event] = []

    async def run(self, admission: Admission) -> Group:
        self._inside += 1
        group = await self.inner.run(admission)
        leave = asyncio.Event()
        self._waiting.append(leave)
        self._let_one_go()
        await leave.wait()
        self._inside -= 1
        self.ended.append(admission.index)
        self._let_one_go()
        return group

    async def stop(self) -> None:
        await self.inner.stop()

    def _let_one_go(self) -> None:
        if self._waiting and len(self._waiting) == self._inside:
            self._waiting.pop(self.random.randrange(len(self._waiting))).set()


class TokenVerifier:
    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None):
        return {"tokens": Verdict.scored(reward(rollout.segments[0].token_ids))}


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return prompt(index)


class Book:
    """Store and telemetry: keeps what is compared."""

    def __init__(self) -> None:
        self.run = Run()

    def consumed(self, batch, report, fates) -> None:
        self.run.note(batch, report.metrics)

    def discarded(self, group, fate, reason) -> None:
        raise AssertionError(f"group {group.index} failed: {reason}")

    def log_step(self, step, metrics) -> None:
        self.run.staleness.append(metrics["staleness/max"])

    def admitted(self, admission) -> None: ...
    def filled(self, group) -> None: ...
    def published(self, record, wall_s) -> None: ...
    def event(self, *_, **__) -> None: ...


async def never_stop(report) -> Next:
    return Next(report.version)


def asynchronous(
    seed: int,
    shuffle: int,
    *,
    bound=0,
    order="admission",
    on_sync="finish",
    publish_every=1,
    objective: ObjectiveConfig = OBJECTIVE,
    streaming: bool = False,
) -> tuple[Run, list[int]]:
    engine, learner, book = an_engine(), a_learner(**({"max_tokens_per_microbatch": 40} if streaming else {})), Book()
    generator = EngineRunner(engine, on_sync=on_sync)
    in_thread = LearnerInThread(lambda: learner, RoleThread("learner", 1))
    single = SingleTurn(
        generator,
        TokenVerifier(),
        render=ids_of,
        decode=lambda ids: "",
        reward_of=lambda verdicts, task: verdicts["tokens"].value,
        sampling=SAMPLING,
        n=SIZE,
        smallest_group=objective.parts["advantage"].smallest_group,
        with_baseline=objective.greedy_baseline,
    )
    environment = Shuffled(single, shuffle)

    async def scenario() -> None:
        ledger = Ledger(prompts_per_step=PER_STEP, max_staleness=bound, order=order)
        publisher = Publisher(in_thread, [generator], timeout_s=60.0)
        await publisher.publish()
        pipeline = Pipeline(
            queue=StalenessBoundedQueue(
                ledger, Prompts(), book, seed=seed, num_groups=STEPS * PER_STEP, stall_timeout_s=60.0
            ),
            environment=Bounded(environment, timeout_s=60.0, retries=0),
            learner=in_thread,
            weights=publisher,
            store=book,
            telemetry=book,
            assemble=lambda groups, step: assign_advantages(groups, config=objective),
            after_step=never_stop,
            num_steps=STEPS,
            prompts_per_step=PER_STEP,
            num_slots=ledger.num_slots,
            weight_sync_steps=publish_every,
            streaming=streaming,
        )
        await pipeline.run()

    try:
        asyncio.run(scenario())
    finally:
        generator.close()
        in_thread.close()
    book.run.weights = digests(named_weights(learner.policy.model))
    assert digests(named_weights(engine.policy.model)) == book.run.weights
    return book.run, environment.ended


def test_asynchronous_at_staleness_zero_is_the_synchronous_loop_bit_for_bit(plain):
    orders = []
    for shuffle in range(2):
        run, order = asynchronous(0, shuffle)
        orders.append(order)
        assert run.tokens == plain.tokens
        assert run.logprobs == plain.logprobs
        assert run.losses == plain.losses
        assert run.weights == plain.weights
        assert run.mismatches == [0.0] * STEPS
        assert run.staleness == [0.0] * STEPS
    assert any(order != sorted(order) for order in orders)  # it was shuffled indeed
    assert all(abs(loss) > 1e-3 for loss in plain.losses)
    assert len(plain.weights) > 10


def test_a_learner_that_takes_up_groups_as_they_come_makes_the_same_bits():
    right = synchronous(0, max_tokens_per_microbatch=40)
    for shuffle in range(2):
        run, _ = asynchronous(0, shuffle, streaming=True)
        assert (run.tokens, run.logprobs, run.losses) == (right.tokens, right.logprobs, right.losses)
        assert run.weights == right.weights
        assert run.mismatches == [0.0] * STEPS


def test_with_greedy_baselines_too_asynchronous_at_staleness_zero_is_the_synchronous_loop_bit_for_bit(plain):
    right = synchronous(0, REMAX)
    run, _ = asynchronous(0, 0, objective=REMAX)
    assert run.tokens == right.tokens
    assert run.logprobs == right.logprobs
    assert run.losses == right.losses
    assert run.weights == right.weights
    assert run.staleness == [0.0] * STEPS
    greedy = {key: values for key, values in run.logprobs.items() if key[1] == BASELINE}
    assert len(greedy) == STEPS * PER_STEP
    assert all(set(values) == {0.0} for values in greedy.values())
    of_first_step = [key for key in plain.tokens if key[0] < PER_STEP]
    assert all(run.tokens[key] == plain.tokens[key] for key in of_first_step)  # the samples do not notice
    assert run.weights != plain.weights


def test_ahead_of_training_the_bound_holds_for_greedy_completions_too():
    run, _ = asynchronous(0, 0, bound=2, order="ready", on_sync="resume", publish_every=2, objective=REMAX)
    assert len(run.losses) == STEPS
    assert max(run.staleness) <= 2
    assert len(run.versions) == STEPS * PER_STEP * (SIZE + 1)
    assert all(version in (0, 2, 4) for versions in run.versions for version in versions)


def test_a_seed_decides_the_tokens_and_another_seed_gives_others(plain):
    again, other = synchronous(seed=0), synchronous(seed=1)
    assert (plain.tokens, plain.losses, plain.weights) == (again.tokens, again.losses, again.weights)
    assert all(plain.tokens[key] != other.tokens[key] for key in plain.tokens)
    assert plain.weights != other.weights


def test_completions_of_all_groups_are_independent_draws(plain):
    drawn = [tuple(tokens[:3]) for tokens in plain.tokens.values() if len(tokens) >= 3]
    assert len(drawn) > 40
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("order", ["admission", "ready"])
@pytest.mark.parametrize("on_sync", ["finish", "resume", "continue"])
def test_ahead_of_training_the_bound_holds_and_engine_and_learner_still_agree_at_their_version(order, on_sync):
    run, _ = asynchronous(0, 0, bound=2, order=order, on_sync=on_sync, publish_every=2)
    assert len(run.losses) == STEPS
    assert max(run.staleness) <= 2
    assert all(version in (0, 2, 4) for versions in run.versions for version in versions)
    assert run.mismatches[0] == 0.0  # the first step trains the weights that sampled it
    stale = [m for m, s in zip(run.mismatches, run.staleness, strict=True) if s > 0]
    assert all(m > 0 for m in stale)  # the lag shows where it is


def test_a_large_step_moves_the_engine_as_far_as_the_learner():
    engine, learner = an_engine(), a_learner(learning_rate=0.03)
    run = Run()
    request = Request(
        id="probe", token_ids=ids_of(prompt(7)), sampling=SAMPLING, n=SIZE, seed=0, admission=0, purpose="probe"
    )

    def ask() -> list[Rollout]:
        engine.submit(request)
        done = []
        while len(done) < SIZE:
            done += engine.step()
        done.sort(key=lambda c: c.sample)
        return [c.rollout(request.token_ids, "", "exact") for c in done]

    def group(rollouts: list[Rollout], step: int) -> Group:
        admission = Admission(index=step, prompt=prompt(7), seed=0, version=step)
        rewards = tuple(reward(rollout.segments[0].token_ids) for rollout in rollouts)
        return Group(admission=admission, rollouts=tuple(rollouts), verdicts=({},) * SIZE, rewards=rewards)

    for step in range(3):
        rollouts = ask()
        assert {v for r in rollouts for v in r.segments[0].versions.tolist()} == {step}
        groups = (group(rollouts, step),)
        rows = assign_advantages(groups, OBJECTIVE)
        batch = Batch(step=step, places=1, groups=groups, rows=rows)
        run.note(batch, learner.step(batch).metrics)
        moved = [
            np.abs(now - row.segment.behavior_logprobs).mean()
            for now, row in zip(learner.annotate(rows), rows, strict=True)
        ]
        assert max(moved) > 0.01  # what stale weights would show
        assert engine.load(learner.weights(None)) == learner.weights(None).digests
        if step == 1:
            engine.interrupt()
    assert run.mismatches == [0.0] * 3


def test_an_engine_that_holds_one_other_number_stops_the_run_with_the_tensors_name():
    learner = a_learner()

    class Tampered(EngineRunner):
        async def load(self, weights):
            await super().load(weights)
            tensors = named_weights(self._engine.policy.model)
            with torch.no_grad():
                tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-7
            return digests(tensors)

    generator = Tampered(an_engine())
    in_thread = LearnerInThread(lambda: learner, RoleThread("learner", 1))
    try:
        with pytest.raises(
            SyncError, match=r"generator 0 does not hold version 0.*'model.layers.1.mlp.up_proj.weight'"
        ):
            asyncio.run(Publisher(in_thread, [generator], timeout_s=60.0).publish())
    finally:
        generator.close()
        in_thread.close()
