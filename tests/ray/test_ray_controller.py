"""The session in an actor: it is killed, left, and goes wrong, and the driver sees what it would see of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import test_ray_runs as runs

from nearpolicy.config import RunConfig, config_from_dict
from nearpolicy.errors import ConfigError, ControllerLost, RolloutsError, RunFolderError, VerifierError
from nearpolicy.launch.ray.controller import ControllerHost
from nearpolicy.launch.session import NOTHING_KEPT
from nearpolicy.launch.supervised import Supervised, session_of
from nearpolicy.store.reader import RunReader

IN_ACTOR = "runtime={kind: ray, controller: actor, verifiers: 0}"


@pytest.fixture(autouse=True)
def _folder(actors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(runs.REWARD)


def recipe(folder: str, *settings: str) -> RunConfig:
    return config_from_dict(runs.RECIPE, where="test", overrides=[f"run.dir={folder}", IN_ACTOR, *settings])


def supervised(config: RunConfig, say: Callable[[str], None], on_step: Callable[..., None] | None = None) -> Supervised:
    return Supervised(session_of(config=config, say=say, on_step=on_step))


def actors_of(role: str) -> list[str]:
    import ray

    return [name for name in ray.util.list_named_actors() if f": {role} " in name]


def rooms() -> list[str]:
    from ray.util.placement_group import placement_group_table

    return [room["name"] for room in placement_group_table().values() if room["state"] != "REMOVED"]


def test_a_controller_that_is_killed_is_followed_by_another_and_changes_no_bit():
    import ray

    said: list[str] = []
    steps: list[int] = []
    before: list[str] = []
    left: list[list[str]] = []

    def kill(step: int, metrics) -> None:
        steps.append(step)
        if step == 1 and not before:
            (name,) = actors_of("controller")
            before.extend(actors_of("learner") + actors_of("generator"))
            ray.kill(ray.get_actor(name), no_restart=True)

    def say(text: str) -> None:
        said.append(text)
        if "Going on from the record" in text:
            left.append([*actors_of("learner"), *actors_of("generator"), *actors_of("controller"), *rooms()])

    run = supervised(recipe("killed", "run.steps=4", "checkpoint.every=0"), say, kill)
    assert run.run()["steps"] == 4
    assert run.sessions == 2 and any("the controller is lost" in text for text in said), said
    assert len(before) == 2 and left == [[]], (before, left)
    assert sorted(set(steps)) == [0, 1, 2, 3]
    assert not actors_of("") and not rooms()
    runs.alone("whole", "run.steps=4")
    assert runs.fingerprints("killed") == runs.fingerprints("whole")
    assert runs.sampled("killed") == runs.sampled("whole")
    with RunReader(Path("killed")) as reader:
        used = [each.admission for each in reader.consumption()]
        assert len(used) == len(set(used)) and len(reader.steps()) == 4 and not reader.unfinished()


def test_a_stop_ends_the_run_after_its_step_and_saves_it():
    def stop(step: int, metrics) -> None:
        run.session.stop()

    run = supervised(recipe("run", "run.steps=400"), lambda text: None, stop)
    summary = run.run()
    assert summary["ended"] == "stopped" and 1 <= summary["steps"] < 400
    assert run.session.stop_requested and list(Path("run/checkpoints").iterdir())


def test_a_driver_that_leaves_before_the_first_step_leaves_nothing():
    """As Ctrl-C does it: the driver's task is cancelled, wherever it is."""

    async def leave() -> None:
        task = asyncio.create_task(session.train())
        session.say = lambda text: task.cancel() if "run folder" in text else None
        with contextlib.suppress(asyncio.CancelledError):
            await task

    session = session_of(config=recipe("run", "warm_start.steps=2000"))
    asyncio.run(leave())
    assert session.folder is not None and not session.begun
    assert not Path("run").exists() and not actors_of("") and not rooms()


def test_errors_keep_their_kind_and_their_words():
    Path("rewards.py").write_text("def judge(completions, **_):\n    raise ValueError('not today')\n")
    with pytest.raises((VerifierError, RolloutsError), match="not today"):
        supervised(recipe("run", "queue.rollout_retries=0"), lambda text: None).run()
    assert not actors_of("") and not rooms()


@pytest.mark.large
def test_a_session_that_is_stopped_as_it_opens_is_interrupted_in_the_driver():
    session = session_of(config=recipe("run"))
    session.say = lambda text: session.stop() if "run folder" in text else None
    with pytest.raises(KeyboardInterrupt, match=NOTHING_KEPT):
        asyncio.run(session.train())
    assert not Path("run").exists()


def host_in(folder: Path | None, *, resumes: bool) -> ControllerHost:
    return ControllerHost(recipe("run"), folder, resumes, {})


def test_a_node_without_the_folders_of_the_run_is_refused_by_name(tmp_path):
    async def ask(folder: Path | None, started_in: str, *, resumes: bool) -> None:
        host_in(folder, resumes=resumes).find_folders(started_in).result()

    here, elsewhere = str(tmp_path), str(tmp_path / "elsewhere")
    asyncio.run(ask(None, here, resumes=False))
    with pytest.raises(ConfigError, match=r"elsewhere, where the run was started, is not there on .*every node"):
        asyncio.run(ask(None, elsewhere, resumes=False))
    with pytest.raises(RunFolderError, match=r"run folder .*gone is not there on .*--resume .*gone"):
        asyncio.run(ask(tmp_path / "gone", here, resumes=True))


def test_an_actor_that_does_not_begin_is_refused_after_a_bound():
    """Another run has all processors."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    room = placement_group([{"CPU": 16}])
    ray.get(room.ready())
    try:
        config = recipe("run", "runtime={kind: ray, controller: actor, verifiers: 0, start_timeout_s: 0.5}")
        with pytest.raises(ConfigError, match=r"the controller to begin: not within 0.5 s .*one free CPU"):
            supervised(config, lambda text: None).run()
    finally:
        remove_placement_group(room)
    assert not actors_of("")


@pytest.mark.large
def test_a_lost_controller_ends_the_run_only_after_three_in_a_row():
    """Each is killed as it begins, before there is a step."""
    import ray

    def kill(text: str) -> None:
        said.append(text)
        if "run folder" in text:
            for name in actors_of("controller"):
                ray.kill(ray.get_actor(name), no_restart=True)

    said: list[str] = []
    run = supervised(recipe("run", "warm_start.steps=2000"), kill)
    with pytest.raises(ControllerLost, match="loss 4 without a new step"):
        run.run()
    assert run.sessions == 4 and not actors_of("") and not rooms()
