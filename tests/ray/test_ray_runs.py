"""Whole runs with every role in an actor: the weights of a run in one process, whoever dies on the way."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

import pytest

from nearpolicy.config import config_from_dict
from nearpolicy.errors import RecordLost
from nearpolicy.launch.ray.learner import LearnerRanks
from nearpolicy.launch.ray.parcels import RayParcel
from nearpolicy.launch.resume import resumed_config
from nearpolicy.launch.session import Session, run_session
from nearpolicy.records import Fate
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.reader import RunReader

REWARD = "def judge(completions, **_):\n    return [float(sum(map(ord, c)) % 7) for c in completions]\n"
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
RECIPE = {
    "run": {"steps": 3},
    "model": {"path": "random:llama", "init": SIZES},
    "tasks": [
        {
            "name": "copy",
            "source": {
                "kind": "reasoning_gym",
                "dataset": "chain_sum",
                "params": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
                "size": 100,
            },
            "template": "copy {answer}:",
            "chat": False,
            "rewards": [{"kind": "function", "path": "rewards.py:judge"}],
        }
    ],
    "sampling": {"num_generations": 4, "max_completion_length": 8, "max_prompt_length": 16},
    "queue": {"prompts_per_step": 4, "max_staleness": 0},
    "learner": {"learning_rate": 1e-3, "max_tokens_per_microbatch": 64},
    "verifier": {"workers": 1},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARD)


def train(folder: str, *settings: str, on_step=None, said: list[str] | None = None) -> Session:
    config = config_from_dict(RECIPE, where="test", overrides=[f"run.dir={folder}", *settings])
    session = Session(config=config, say=(said if said is not None else []).append)
    session.on_step = (lambda step, metrics: on_step(session, step)) if on_step else None
    run_session(session)
    return session


_alone: dict[tuple[str, ...], Path] = {}


def alone(folder: str, *settings: str) -> None:
    """A run in one process; of equal ones the first is copied."""
    if settings in _alone:
        shutil.copytree(_alone[settings], folder)
    else:
        _alone[settings] = train(folder, *settings).folder.path.resolve()


def fingerprints(folder: str) -> list[str]:
    with RunReader(Path(folder)) as run:
        return [record.fingerprint for record in run.versions()]


def losses(folder: str) -> list[float]:
    with RunReader(Path(folder)) as run:
        return [line["policy/loss"] for line in run.metrics() if "policy/loss" in line]


def sampled(folder: str) -> list[list[int]]:
    with RunReader(Path(folder)) as run:
        return [
            segment.token_ids.tolist()
            for index in range(run.num_taken(3))
            for rollout in run.group(index).rollouts
            for segment in rollout.segments
        ]


def require_whole(folder: str, *, bound: int, steps: int, most_lost: int = 0) -> None:
    """Nothing lost, nothing twice, nothing beyond the bound."""
    with RunReader(Path(folder)) as run:
        ledger = dict(run.ledger().items())
        assert run.num_lost() <= most_lost and ledger.get(Fate.IN_FLIGHT, 0) == 0
        used = [each.admission for each in run.consumption()]
        assert len(used) == len(set(used)) and len(run.steps()) == steps
        assert max(line["staleness/max"] for line in run.metrics() if "staleness/max" in line) <= bound


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("generator.replicas=2", "generator.threads=2"),
        ("generator.replicas=3", "learner.threads=2", "runtime.verifiers=2"),
    ],
    ids=["one generator", "two, of two threads", "three"],
)
def test_generators_in_actors_give_the_tokens_and_weights_of_one_process(actors, settings):
    alone("inline")
    train("ray", "runtime=ray", *settings)
    assert sampled("ray") == sampled("inline")
    assert fingerprints("ray") == fingerprints("inline")
    require_whole("ray", bound=0, steps=3)


def test_ranks_give_the_loss_curve_of_one(actors):
    """The same bits in every copy; rounding apart, what one process computes."""
    settings = ("learner.learning_rate=1e-4", "run.steps=4")
    train("inline", *settings)
    train("ray", "runtime=ray", "learner.ranks=2", *settings)
    ours, theirs = (losses(folder) for folder in ("ray", "inline"))
    assert ours == pytest.approx(theirs, abs=1e-4)
    require_whole("ray", bound=0, steps=4)


@pytest.mark.parametrize("transport", ["object_store", "broadcast", "files"])
def test_weights_arrive_as_they_were_sent_whatever_the_way(actors, transport, tmp_path):
    path = (f"sync.path={tmp_path}/weights", "sync.anchor_every=2") if transport == "files" else ()
    alone("inline")
    said: list[str] = []
    done = train("ray", "runtime=ray", "generator.replicas=2", f"sync.transport={transport}", *path, said=said)
    assert fingerprints("ray") == fingerprints("inline")
    assert said[0] == "Ray starts on this machine"
    assert f"1 rank of the learner and 2 generators on 1 node; weights go by {transport}" in said
    peaks = json.loads(done.folder.summary.read_text())["roles_peak_memory_mb"]
    assert set(peaks) == {"learner 0", "generator 0", "generator 1", "verifier 0"}
    assert all(20 < peak < 4000 for peak in peaks.values()), peaks


def test_pieces_of_several_ranks_go_through_the_object_store(actors):
    said: list[str] = []
    train("ray", "runtime=ray", "learner.ranks=2", "sync.transport=object_store", said=said)
    require_whole("ray", bound=0, steps=3)
    assert not any("is behind" in text or "was lost" in text for text in said), said


@pytest.mark.parametrize("bound", [0, 2])
def test_roles_that_take_turns_give_what_they_give_side_by_side(actors, bound):
    """Colocated: each step begins with generators asleep, and sequences that were running go on from their tokens."""
    settings = (f"queue.max_staleness={bound}", "generator.replicas=2", "learner.ranks=2", "runtime=ray")
    if bound == 0:
        train("apart", *settings)
    said: list[str] = []
    train("together", *settings, "runtime.placement=colocated", said=said)
    assert not any("was lost" in text for text in said), said
    require_whole("together", bound=bound, steps=3)
    assert bound or fingerprints("together") == fingerprints("apart")


HANDLES = ("runtime=ray", "runtime.placement=colocated", "sync.transport=device_handles")


def test_weights_come_from_the_rank_of_the_same_place_by_handles(actors):
    said: list[str] = []
    settings = ("generator.replicas=2", "learner.ranks=2", "queue.max_staleness=2")
    session = train("handles", *HANDLES, *settings, said=said)
    assert session.runtime._transport == "device_handles"
    assert not any("is behind" in text or "was lost" in text for text in said), said
    require_whole("handles", bound=2, steps=3)


def test_whoever_dies_where_weights_go_by_handles_the_run_ends_with_the_weights_of_an_undisturbed_one(
    actors, monkeypatch
):
    """A generator after the first step, and the rank as it is to hand version 3 over to its successor."""
    import ray

    plain, said, killed = LearnerRanks.deliver, [], []

    async def deliver(ranks, weights, members, awaited):
        if weights.record.version == 3 and not killed:
            killed.append(ray.kill(ranks._ranks[0], no_restart=True))
        return await plain(ranks, weights, members, awaited)

    def kill(session: Session, step: int) -> None:
        if step == 0:
            ray.kill(session.runtime._generators[0], no_restart=True)

    monkeypatch.setattr(LearnerRanks, "deliver", deliver)
    alone("whole", "run.steps=4")
    train("killed", *HANDLES, "run.steps=4", "checkpoint.every=0", on_step=kill, said=said)
    assert fingerprints("killed") == fingerprints("whole") and killed
    require_whole("killed", bound=0, steps=4)
    assert any("a rank of the learner died during" in text for text in said), said


def test_a_generator_that_joins_late_samples_what_the_first_one_would_have(actors):
    until: list[int] = []

    def stop(session: Session, step: int) -> None:
        if len(session.runtime.generator.links) == 2:
            until.append(step)
        if len(until) == 3:
            session.stop()

    train("joined", "runtime=ray", "generator.most_replicas=2", "run.steps=400", "checkpoint.every=0", on_step=stop)
    train("alone", f"run.steps={until[-1] + 1}", "checkpoint.every=0")
    with RunReader(Path("joined")) as run:
        swaps = {event.instance for event in run.events() if event.kind == "swap"}
    assert swaps == {0, 1}
    assert fingerprints("joined") == fingerprints("alone")


def test_a_run_that_began_in_one_process_goes_on_in_actors(actors):
    alone("whole", "run.steps=4")
    begun = train("run", "run.steps=4", on_step=lambda session, step: step == 1 and session.stop())
    assert begun.folder.summary.exists()
    config = resumed_config(begun.folder, ["runtime.kind=ray", "generator.replicas=2"])
    run_session(Session(config=config, folder=begun.folder, resumes=True, say=lambda text: None))
    assert fingerprints("run") == fingerprints("whole")
    require_whole("run", bound=0, steps=4)


def test_an_asynchronous_run_keeps_its_bound_and_whoever_directs_it_reads_no_tokens(actors, monkeypatch):
    def read(parcel):
        raise AssertionError("tokens came to the controller")

    monkeypatch.setattr(RayParcel, "read", read)
    ahead = ("queue.max_staleness=2", "generator.replicas=2", "generator.on_sync=continue", "telemetry.probe=0")
    train("ray", "runtime=ray", *ahead)
    require_whole("ray", bound=2, steps=3)


VICTIMS = {
    "a generator": lambda runtime: runtime._generators[1],
    "the only rank": lambda runtime: runtime._ranks[0],
    "a verifier": lambda runtime: runtime._pools._pools[0].actor,
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_whoever_dies_the_weights_are_those_of_an_undisturbed_run(actors, victim):
    import ray

    said: list[str] = []

    def kill(session: Session, step: int) -> None:
        if step == 1:
            ray.kill(VICTIMS[victim](session.runtime), no_restart=True)

    settings = ("runtime=ray", "generator.replicas=2", "run.steps=4", "checkpoint.every=0")
    alone("whole", "run.steps=4")
    train("killed", *settings, on_step=kill, said=said)
    assert fingerprints("killed") == fingerprints("whole")
    require_whole("killed", bound=0, steps=4)
    assert any("died" in text or "was lost" in text for text in said), said


def test_a_run_whose_record_dies_ends_with_its_name_and_goes_on_from_what_was_recorded(actors, monkeypatch):
    """The learner is the first to hear of it, which does not find the tokens of its batch."""
    import ray

    from nearpolicy.launch.ray.learner import LearnerRanks

    plain = LearnerRanks.step

    async def step(self, batch):
        if batch.step == 1:
            ray.kill(session.runtime._record, no_restart=True)
            until = time.monotonic() + 20  # what is on this node is there until the node, too, has heard of it, or on
            with contextlib.suppress(RecordLost):
                while time.monotonic() < until:
                    batch.rows[0].segment.token_ids[0]
        return await plain(self, batch)

    alone("whole")
    settings = ("runtime=ray", "run.dir=run", "learner.streaming=false")
    session = Session(config=config_from_dict(RECIPE, where="test", overrides=settings), say=lambda text: None)
    with monkeypatch.context() as patched, pytest.raises(RecordLost, match=r"nearpolicy train --resume"):
        patched.setattr(LearnerRanks, "step", step)
        run_session(session)
    begun = RunFolder(Path("run").resolve())
    run_session(Session(config=resumed_config(begun, ["runtime.kind=inline"]), folder=begun, resumes=True, say=print))
    assert fingerprints("run") == fingerprints("whole")
    require_whole("run", bound=0, steps=3, most_lost=4)  # what nobody had committed


def dies_before(monkeypatch, call: str) -> list[str]:
    """The only rank, before it is asked for this for the third time; for a checkpoint the first time."""
    import ray

    from nearpolicy.launch.ray.learner import LearnerRanks

    asked, killed, plain = [], [], LearnerRanks.call

    async def dying(self, function, *arguments):
        name = getattr(getattr(function, "func", function), "__name__", "")
        asked.append(name)
        if name == call and not killed and (asked.count(call) == 3 or call == "load_checkpoint"):
            killed.append(name)
            ray.kill(self._ranks[0], no_restart=True)
        return await plain(self, function, *arguments)

    monkeypatch.setattr(LearnerRanks, "call", dying)
    return killed


def test_a_rank_lost_in_the_warm_start_makes_it_once(actors, monkeypatch):
    settings = ("warm_start.steps=4", "warm_start.batch_size=2", "run.steps=1")
    train("whole", *settings)
    killed = dies_before(monkeypatch, "supervised_step")
    train("killed", "runtime=ray", *settings)
    assert killed and fingerprints("killed") == fingerprints("whole")


def test_a_rank_lost_while_a_checkpoint_is_loaded_leaves_it_where_it_is(actors, monkeypatch):
    alone("whole")
    begun = train("run", "run.steps=3", on_step=lambda session, step: step == 1 and session.stop())
    killed = dies_before(monkeypatch, "load_checkpoint")
    said: list[str] = []
    run_session(
        Session(config=resumed_config(begun.folder, ["runtime.kind=ray"]), folder=begun.folder, resumes=True,
                say=said.append)
    )  # fmt: skip
    assert killed and fingerprints("run") == fingerprints("whole")
    assert not any("set aside" in text for text in said), said
    assert not list(begun.folder.checkpoints.glob("undone-*"))


def test_the_only_generator_dies_while_its_batch_is_learned(actors, monkeypatch):
    """The version is published all the same; the one that comes in its place takes it."""
    import ray

    from nearpolicy.launch.ray.learner import LearnerRanks

    settings, killed, plain = ("run.steps=3", "checkpoint.every=0"), [], LearnerRanks.step
    train("whole", *settings)

    async def step(self, batch):
        report = await plain(self, batch)
        if batch.step == 1:
            (actor,) = session.runtime._generators.values()
            ray.kill(actor, no_restart=True)
            killed.append(actor)
        return report

    monkeypatch.setattr(LearnerRanks, "step", step)
    config = config_from_dict(RECIPE, where="test", overrides=["run.dir=killed", "runtime=ray", *settings])
    session = Session(config=config, say=lambda text: None)
    run_session(session)
    assert killed and fingerprints("killed") == fingerprints("whole")
    require_whole("killed", bound=0, steps=3)


def test_what_actors_have_to_say_is_said_once(actors):
    said: list[str] = []
    settings = ("generator.replicas=2", "generator.threads=64", "learner.threads=64", "run.steps=1")
    train("ray", "runtime=ray", *settings, said=said)
    for section in ("generator", "learner"):
        assert sum(f"{section}.threads=64 is lowered" in text for text in said) == 1, said


def test_a_rank_lost_while_steps_are_undone_comes_back_to_those_that_count(actors, monkeypatch):
    def spike(session: Session, step: int) -> None:
        if step == 2 and not session.recovery.rollbacks():
            session.alarms.observe(step, {"policy/grad_norm": 1e9})

    monitor = "monitors=[{metric: policy/grad_norm, above: 1e6, action: rollback}]"
    settings = (monitor, "run.steps=4", "checkpoint.every=1")
    train("whole", *settings, on_step=spike)
    killed = dies_before(monkeypatch, "load_checkpoint")
    said: list[str] = []
    train("killed", "runtime=ray", *settings, on_step=spike, said=said)
    assert killed and any("rolled back to step 2" in text for text in said), said
    assert fingerprints("killed") == fingerprints("whole")
    require_whole("killed", bound=0, steps=4)
