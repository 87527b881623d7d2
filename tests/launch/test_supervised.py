"""Sessions that are lost, and the next ones: when there is one, where it begins, and that it changes nothing."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from nearpolicy.config import RunConfig, load_recipe
from nearpolicy.errors import ControllerLost, EngineError, NearpolicyError, RecordLost, RunFolderError
from nearpolicy.launch.ray.learner import LearnerLost
from nearpolicy.launch.session import Session
from nearpolicy.launch.supervised import MOST, Supervised, recorded_steps, session_of
from nearpolicy.records import Fate
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 5, dir: run}
model:
  path: random:llama
  init: {initializer_range: 0.15, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1}
sampling: {max_prompt_length: 16, max_completion_length: 5, num_generations: 3}
queue: {prompts_per_step: 2, max_staleness: 0}
checkpoint: {every: 2}
learner: {learning_rate: 1e-3}
verifier: {in_process: true}
tasks:
  - name: sums
    source: {kind: reasoning_gym, dataset: chain_sum, size: 40}
    template: "{answer} ="
    chat: false
    rewards: [{kind: function, path: reward.py:judge}]
"""
REWARD = "def judge(completions, **_):\n    return [float(sum(map(ord, c)) % 7) for c in completions]\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text(RECIPE)
    Path("reward.py").write_text(REWARD)


def recipe(*overrides: str) -> RunConfig:
    return load_recipe(Path("demo.yaml"), overrides)


class Fated(Session):
    """Ends as it is told to, each time."""

    endings = ()

    async def train(self):
        ending = self.endings.pop(0)
        if isinstance(ending, BaseException):
            raise ending
        return ending


def fated(*endings, **fields) -> tuple[Supervised, list[str]]:
    said: list[str] = []
    Fated.endings = list(endings)
    return Supervised(Fated(config=recipe(), say=said.append, **fields)), said


@pytest.mark.parametrize("kind", [ControllerLost, RecordLost, LearnerLost])
def test_what_is_lost_goes_on_as_often_as_promised(kind):
    run, said = fated(*[kind("gone")] * MOST, {"steps": 1})
    assert run.run() == {"steps": 1}
    assert [text.partition("(")[2].partition(";")[0] for text in said] == [f"loss {n + 1}" for n in range(MOST)]
    assert all(text.startswith("gone. Beginning anew") for text in said)


def test_one_loss_more_without_a_step_ends_the_run():
    run, said = fated(*[RecordLost("gone")] * (MOST + 1), {"steps": 1})
    with pytest.raises(RecordLost, match=f"gone. That was loss {MOST + 1} without a new step"):
        run.run()
    assert len(said) == MOST and Fated.endings == [{"steps": 1}]


def test_any_other_error_ends_the_run_at_once():
    run, said = fated(EngineError("broken"), {"steps": 1})
    with pytest.raises(EngineError, match="broken"):
        run.run()
    assert not said


def test_a_run_that_is_to_stop_is_not_begun_again():
    run, said = fated(ControllerLost("gone"), {"steps": 1}, stop_requested=True)
    with pytest.raises(ControllerLost):
        run.run()
    assert not said


def fingerprints(folder: str) -> list[str]:
    with RunReader(Path(folder)) as run:
        return [record.fingerprint for record in run.versions()]


def require_whole(folder: str, steps: int) -> None:
    with RunReader(Path(folder)) as run:
        used = [each.admission for each in run.consumption()]
        assert len(used) == len(set(used)) and len(run.steps()) == steps
        assert not run.unfinished() and Fate.IN_FLIGHT not in run.ledger()


def test_a_run_that_loses_its_record_after_every_step_is_that_of_an_undisturbed_one():
    """More losses than are allowed in a row, and a step between each and the next."""

    def lose(step: int, metrics) -> None:
        if step < 4:
            raise RecordLost(f"gone after step {step}")

    Supervised(session_of(config=recipe("run.dir=whole"), say=lambda text: None)).run()
    said: list[str] = []
    run = Supervised(session_of(config=recipe(), say=said.append, on_step=lose))
    assert run.run()["steps"] == 5
    assert run.sessions == 5 > MOST
    assert sum("Going on from the record of" in text and "loss 1;" in text for text in said) == 4, said
    assert fingerprints("run") == fingerprints("whole") and len(set(fingerprints("run"))) == 6
    require_whole("run", steps=5)


class NeverPublished(Session):
    """Lost before version 0, the first time."""

    lost = 0

    async def _publish_first(self) -> None:
        if not NeverPublished.lost:
            NeverPublished.lost += 1
            raise ControllerLost("gone")
        await super()._publish_first()


def test_what_is_lost_before_version_0_begins_anew_in_the_same_folder():
    said: list[str] = []
    Path("run").mkdir()
    Path("run", "notes.txt").write_text("a person's")
    run = Supervised(NeverPublished(config=recipe("run.steps=1"), say=said.append))
    assert run.run()["resumed_after"] is None
    assert any("gone. Beginning anew" in text for text in said), said
    require_whole("run", steps=1)
    assert Path("run", "notes.txt").exists()


def lost(folder: Path, **fields) -> SimpleNamespace:
    config = SimpleNamespace(runtime=SimpleNamespace(start_timeout_s=0.2))
    return SimpleNamespace(folder=RunFolder(folder.resolve()), config=config, **{"resumes": False, **fields})


def test_a_record_that_cannot_be_seen_from_here_is_said_to_be_where_it_is():
    with pytest.raises(RunFolderError, match=r"elsewhere is not to be seen from this machine.*--resume"):
        recorded_steps(lost(Path("elsewhere"), begun=True))


def test_a_record_that_was_torn_when_it_began_is_begun_anew_and_one_that_had_begun_is_kept():
    Path("run").mkdir()
    Path("run", "store.sqlite").touch()
    with pytest.raises(NearpolicyError):
        recorded_steps(lost(Path("run"), begun=True))
    assert Path("run", "store.sqlite").exists()
    assert recorded_steps(lost(Path("run"), begun=False)) is None
    assert not Path("run", "store.sqlite").exists()


def test_a_folder_that_the_lost_process_does_not_let_go_is_refused_after_a_bound():
    Path("run").mkdir()
    with Path("run", "store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match=r"still being written, 0.2 s .*start_timeout_s"):
            recorded_steps(lost(Path("run"), begun=True))
