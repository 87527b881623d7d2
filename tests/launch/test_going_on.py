"""Runs with fast numerics that are stopped in the middle of completions, and go on from what is stored of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_resume import _folder, exit_of, recipe  # noqa: F401  the same folder, recipe and reward

from nearpolicy.generator.engine import Engine
from nearpolicy.launch.resume import resumed_config
from nearpolicy.launch.session import Session, run_session
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.records import Batch, Fate, Finish, Group, StepReport
from nearpolicy.roles import Completion
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.position import position_of
from nearpolicy.store.reader import RunReader

LENGTH, LATER, REACHED = 40, 6, 12
"""Tokens of a completion; the first admission that takes a freed slot; tokens it has when the run is stopped."""
SETTINGS = (
    "run.numerics=fast", "queue.max_staleness=2", "generator.on_sync=resume",
    f"sampling.max_completion_length={LENGTH}", "sampling.num_generations=3", "telemetry.probe=0",
)  # fmt: skip
BOUND = 2


class Held:
    """Stops a run after its second step, with completions of its later groups under way: the engine stands still once
    one has come so far, and the second step is not made before."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._engine_step, self._learner_step = Engine.step, PolicyLearner.step

    def engine_step(self, engine: Engine) -> list[Completion]:
        scheduler = engine.scheduler
        begun = [*scheduler.running, *(s for prefix in scheduler._interrupted for s in prefix.waiting)]
        if any(s.request.admission >= LATER and len(s.tokens) >= REACHED for s in begun):
            self.reached.set()
        return [] if self.reached.is_set() else self._engine_step(engine)

    def learner_step(self, learner: PolicyLearner, batch: Batch) -> StepReport:
        assert batch.step == 0 or self.reached.wait(60)
        return self._learner_step(learner, batch)


@pytest.fixture
def stop_in_the_middle(monkeypatch):
    """``stop_in_the_middle(*settings)``: a run that ends so."""

    def begin(*settings: str) -> None:
        held = Held()
        session = Session(config=recipe("run.dir=run", *SETTINGS, *settings), say=lambda text: None)
        session.on_step = lambda step, metrics: session.stop() if step == 1 else None
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "step", lambda self: held.engine_step(self))
            patched.setattr(PolicyLearner, "step", lambda self, batch: held.learner_step(self, batch))
            run_session(session)

    return begin


def go_on(*overrides: str) -> tuple[Session, list[str]]:
    there, said = RunFolder(Path("run").resolve()), []
    session = Session(config=resumed_config(there, overrides), folder=there, resumes=True, say=said.append)
    run_session(session)
    return session, said


def stopped() -> dict[int, Group]:
    with RunReader(Path("run")) as run:
        return {group.index: group for group in position_of(run).stopped}


def finishes(groups: dict[int, Group]) -> dict[Finish, list]:
    found = {finish: [] for finish in Finish}
    for group in groups.values():
        for rollout in group.rollouts:
            if rollout.num_sampled:
                found[rollout.finish].append((group.index, rollout))
    return found


def last_groups() -> Iterator[Group]:
    """As consumed."""
    with RunReader(Path("run")) as run:
        for used in run.consumption():
            yield run.group(used.admission, used.attempt)


def require_whole() -> None:
    with RunReader(Path("run")) as run:
        assert [record.step for record in run.steps()] == list(range(6))
        consumed = run.consumption()
        assert len({used.admission for used in consumed}) == len(consumed) == 12
        for used in consumed:
            assert 0 <= used.step - run.group(used.admission, used.attempt).oldest_version <= BOUND
        ledger = run.ledger()
        assert sum(ledger.values()) == run.query("SELECT sum(sampled) FROM rollouts")[0][0]
        assert Fate.IN_FLIGHT not in ledger
        last = [line for line in run.metrics() if "policy/loss" in line][-1]
        assert last["ledger/trained_tokens"] == ledger[Fate.TRAINED]
        assert run.unfinished() == []


def test_what_was_under_way_goes_on_from_its_prefix_and_what_had_ended_is_taken_as_it_is(stop_in_the_middle):
    stop_in_the_middle()
    before = stopped()
    found = finishes(before)
    assert found[Finish.ABORTED] and (found[Finish.LENGTH] or found[Finish.STOP])
    session, said = go_on()
    assert any(" go on from what was sampled, " in line and "0 groups go on" not in line for line in said), said
    now = {group.index: group for group in last_groups()}
    compared = partial = 0
    for finish in (Finish.ABORTED, Finish.LENGTH, Finish.STOP):
        for index, rollout in found[finish]:
            if index not in now:
                continue
            again, [old] = now[index].rollouts[rollout.sample], rollout.segments
            [new] = again.segments
            kept = slice(0, len(old.token_ids))
            for name in ("token_ids", "versions", "behavior_logprobs"):
                assert getattr(new, name)[kept].tobytes() == getattr(old, name).tobytes()
            assert np.array_equal(new.context_ids, old.context_ids)
            compared += 1
            if finish is Finish.ABORTED:
                later = new.versions[kept.stop :]
                assert len(later) and later.min() >= 2 > old.versions.max()  # 2 was published before the stop
                partial += 1
                assert again.finish in (Finish.STOP, Finish.LENGTH)
            else:
                assert again.finish is finish and len(new.token_ids) == kept.stop
                assert now[index].rewards[rollout.sample] == before[index].rewards[rollout.sample]
            assert again.text == session.language.decode(new.token_ids.tolist())
    assert compared >= 6 and partial >= 3
    require_whole()
    assert exit_of("replay", "run") == 0


@pytest.mark.parametrize("settings", [("run.numerics=exact",), ("objective.advantage=remax",)])
def test_exact_runs_and_groups_with_a_greedy_completion_begin_anew(stop_in_the_middle, settings):
    stop_in_the_middle(*settings)
    assert finishes(stopped())[Finish.ABORTED]
    _, said = go_on()
    assert any("0 groups go on from what was sampled" in line for line in said), said
    require_whole()


def test_a_process_that_dies_before_they_have_ended_leaves_their_tokens_for_the_next_one(
    stop_in_the_middle, monkeypatch
):
    stop_in_the_middle()
    before = stopped()

    def dies(self, batch):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", lambda self: [])
        patched.setattr(PolicyLearner, "step", dies)
        with pytest.raises(RuntimeError, match="killed"):
            go_on()
    with RunReader(Path("run")) as run:
        ledger = run.ledger()
        assert sum(ledger.values()) == run.query("SELECT sum(sampled) FROM rollouts")[0][0]
        assert ledger[Fate.IN_FLIGHT] >= sum(r.num_sampled for _, r in finishes(before)[Finish.ABORTED])
    again = stopped()
    aborted = [(index, rollout.sample) for index, rollout in finishes(before)[Finish.ABORTED]]
    assert aborted == [(index, rollout.sample) for index, rollout in finishes(again)[Finish.ABORTED]]
    go_on()
    require_whole()


def test_nothing_goes_on_from_tokens_of_weights_that_come_out_otherwise(stop_in_the_middle, monkeypatch):
    stop_in_the_middle("checkpoint.every=0", "checkpoint.keep_last=1")
    for path in Path("run/checkpoints").iterdir():
        path.rename(path.with_name(f"away-{path.name}"))
    step = MasterAdamW.step
    with monkeypatch.context() as patched:
        patched.setattr(MasterAdamW, "step", lambda self, rate, norm: step(self, rate * (1 + 1e-6), norm))
        before = stopped()
        _, said = go_on()
    assert any("going on as lineage 1" in line for line in said), said
    stale = {index for index, group in before.items() if group.newest_version >= 1}
    assert stale
    require_whole()
    for group in last_groups():
        if group.index in stale:
            for rollout in group.rollouts:
                assert 1 not in rollout.segments[0].versions  # of the lineage that does not count
