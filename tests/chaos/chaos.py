"""Short runs that are disturbed at random until they end: what is left must be what an undisturbed run leaves.

    python tests/chaos/chaos.py [--kills 350] [--faults 150] [--seed 0] [--keep FOLDER]

A nursery process that has loaded everything forks one child for each attempt at a run. A child is disturbed once, by
one of `KILLS` (its process dies without a word) or of `FAULTS` (it may survive); then the run is taken up, disturbed
again, and so on, the last time in peace. The last line is one JSON object with the counts; exit status 1 if a promise
was broken, with the seed that shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearpolicy.machine import prepare_environment

prepare_environment()

RECIPE = """\
run: {steps: 5, dir: run}
model:
  path: random:llama
  init: {initializer_range: 0.15, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1}
sampling: {max_prompt_length: 16, max_completion_length: 6, num_generations: 2}
queue: {prompts_per_step: 2, rollout_timeout_s: 20, rollout_retries: 1, stall_timeout_s: 60}
checkpoint: {every: 2}
evaluation: {pass_k: []}
learner: {learning_rate: 0.01, lr_schedule: linear}
generator: {threads: 1}
tasks:
  - name: sums
    source: {kind: jsonl, path: rows.jsonl}
    prompt_column: question
    chat: false
    rewards: [{kind: function, path: reward.py:judge}]
"""
REWARD = "def judge(completions, **_):\n    return [float(sum(map(ord, c)) % 7) for c in completions]\n"
SETTINGS: dict[str, tuple[str, ...]] = {
    "synchronous": ("queue.max_staleness=0", "verifier.in_process=true"),
    "workers": ("queue.max_staleness=0", "verifier.workers=1"),
    "ahead": ("queue.max_staleness=2", "verifier.in_process=true"),
    "ready": ("queue.max_staleness=2", "queue.order=ready", "verifier.in_process=true"),
    "rare publication": ("queue.max_staleness=1", "sync.weight_sync_steps=2", "verifier.in_process=true"),
    "dropped": (
        "queue.max_staleness=1", "queue.order=ready", "queue.at_bound=requeue", "generator.oversample=1.5",
        "generator.on_sync=continue", "verifier.in_process=true",
    ),
    "adapter": ("queue.max_staleness=0", "learner.lora.rank=2", "verifier.in_process=true"),
    "goes back": (
        "queue.max_staleness=0", "verifier.in_process=true",
        "monitors=[{metric: policy/grad_norm, above: 3.6, action: rollback, most: 99}]",
    ),
    "goes back, ahead": (
        "queue.max_staleness=2", "verifier.in_process=true", "checkpoint.every=0",
        "monitors=[{metric: policy/grad_norm, above: 3.6, steps: 2, action: rollback, back: 1, most: 99}]",
    ),
    "goes back, filtered": (
        "queue.max_staleness=1", "queue.dynamic_sampling=true", "verifier.in_process=true", "sync.weight_sync_steps=2",
        "monitors=[{metric: policy/grad_norm, above: 4.7, action: rollback, most: 99}]",
    ),
    "successes": (
        "queue.max_staleness=0", "verifier.in_process=true", "queue.replay.share=0.5", "queue.replay.min_reward=3",
    ),
    "goes on": (
        "queue.max_staleness=2", "run.numerics=fast", "generator.on_sync=resume", "verifier.in_process=true",
        "sampling.max_completion_length=40",
    ),
    "filtered": ("queue.max_staleness=1", "queue.dynamic_sampling=true", "verifier.in_process=true"),
}  # fmt: skip
EXACT = ("synchronous", "workers", "adapter", "goes back", "successes")
"""Of these the final weights are those of an undisturbed run, bit for bit."""


@dataclass
class Disturbance:
    """One fault, and when it strikes: at the n-th call of something, or after some seconds."""

    kind: str
    count: int = 1
    seconds: float = 0.0


KILLS = ("at a commit", "before a commit", "in a checkpoint", "at a time")
FAULTS = ("learner raises", "engine raises", "learner stalls", "engine stalls", "stopped for a while", "worker killed",
          "store locked", "disk full for the store", "disk full for a checkpoint", "Ctrl-C")  # fmt: skip


class Broken(AssertionError):
    """A promise was not kept."""


# In the child


def attempt(folder: Path, settings: tuple[str, ...], disturbance: Disturbance | None) -> None:
    """One life of a run; never returns."""
    status = 1
    try:
        os.chdir(folder)
        log = os.open("log.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        print(f"-- {disturbance}", flush=True)
        session = _session(settings)
        if disturbance is not None:
            DISTURB[disturbance.kind](disturbance, session)
        from nearpolicy.launch.session import run_session

        run_session(session)
        if os.environ.get(_MODULES_TO):
            Path(os.environ[_MODULES_TO]).write_text("\n".join(sys.modules))
        status = 0
    except BaseException as error:
        import traceback

        traceback.print_exc()
        status = 4 if isinstance(error, KeyboardInterrupt) else 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _session(settings: tuple[str, ...]) -> Any:
    from nearpolicy.config import load_recipe
    from nearpolicy.launch.resume import resumed_config
    from nearpolicy.launch.session import Session
    from nearpolicy.store.folder import RunFolder

    said = lambda text: print(text, flush=True)  # noqa: E731
    if Path("run/store.sqlite").exists():
        there = RunFolder(Path("run").resolve())
        return Session(config=resumed_config(there), folder=there, resumes=True, say=said)
    return Session(config=load_recipe("demo.yaml", settings), say=said)


def _strike(owner: type, name: str, count: int, act: Callable[[], None], *, after: bool = False) -> None:
    """``act`` at the ``count``-th call of a method."""
    original, calls = getattr(owner, name), [0]

    def called(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and not after:
            act()
        result = original(*arguments, **named)
        if calls[0] == count and after:
            act()
        return result

    setattr(owner, name, called)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError("a fault that was put here")


def _at_commit(d: Disturbance, session: Any, *, after: bool) -> None:
    from nearpolicy.store.database import Database

    _strike(Database, "commit", d.count, _die, after=after)


def _in_checkpoint(d: Disturbance, session: Any, act: Callable[[], None] = _die) -> None:
    from nearpolicy.learner import checkpoint

    original, calls = checkpoint._sync, [0]

    def sync(path: Path) -> None:
        calls[0] += 1
        if calls[0] == d.count:
            act()
        original(path)

    checkpoint._sync = sync


def _learner(d: Disturbance, session: Any, act: Callable[[], None]) -> None:
    from nearpolicy.learner.step import PolicyLearner

    _strike(PolicyLearner, "step", 1 + d.count % 3, act)


def _engine(d: Disturbance, session: Any, act: Callable[[], None]) -> None:
    from nearpolicy.generator.engine import Engine

    _strike(Engine, "step", d.count, act)


def _no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _store_full(d: Disturbance, session: Any) -> None:
    from nearpolicy.store.database import Database

    original, commit, calls = Database.commit, Database.commit, [0]

    def full(self: Any, calls_: Any, *, patient: bool) -> bool:
        calls[0] += 1
        if calls[0] == d.count:
            pages = self.connection.execute("PRAGMA page_count").fetchone()[0]
            # The database itself says that the disk is full.
            self.connection.execute(f"PRAGMA max_page_count = {pages}")
        return original(self, calls_, patient=patient)

    assert commit is original
    Database.commit = full


def _store_locked(d: Disturbance, session: Any) -> None:
    """Another program holds the database for a while."""

    def hold() -> None:
        time.sleep(d.seconds)
        if not Path("run/store.sqlite").exists():
            return
        other = sqlite3.connect("run/store.sqlite", isolation_level=None)
        with contextlib.suppress(sqlite3.OperationalError):
            other.execute("BEGIN IMMEDIATE")
            time.sleep(0.5)
            other.execute("ROLLBACK")
        other.close()

    threading.Thread(target=hold, daemon=True).start()


def _stop_session(d: Disturbance, session: Any) -> None:
    threading.Timer(d.seconds, session.stop).start()


DISTURB: dict[str, Callable[[Disturbance, Any], None]] = {
    "at a commit": lambda d, s: _at_commit(d, s, after=True),
    "before a commit": lambda d, s: _at_commit(d, s, after=False),
    "in a checkpoint": _in_checkpoint,
    "at a time": lambda d, s: None,
    "learner raises": lambda d, s: _learner(d, s, _raise),
    "engine raises": lambda d, s: _engine(d, s, _raise),
    "learner stalls": lambda d, s: _learner(d, s, lambda: time.sleep(0.3)),
    "engine stalls": lambda d, s: _engine(d, s, lambda: time.sleep(0.3)),
    "stopped for a while": lambda d, s: None,
    "worker killed": lambda d, s: None,
    "store locked": _store_locked,
    "disk full for the store": _store_full,
    "disk full for a checkpoint": lambda d, s: _in_checkpoint(d, s, _no_room),
    "Ctrl-C": _stop_session,
}


# In the nursery


def live(folder: Path, settings: tuple[str, ...], disturbance: Disturbance | None) -> int:
    """Fork a child for one attempt and disturb it from outside, where that is how; its exit status as `wait` has it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        attempt(folder, settings, disturbance)
    deadline = time.monotonic() + 120
    strikes = time.monotonic() + disturbance.seconds if disturbance is not None else None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        now = time.monotonic()
        if strikes is not None and now >= strikes:
            strikes = None
            _from_outside(pid, disturbance)
        if now > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Broken(f"stood still for 120 s; see {folder}/log.txt")
        time.sleep(0.002)


def _from_outside(pid: int, disturbance: Disturbance) -> None:
    if disturbance.kind == "at a time":
        os.kill(pid, signal.SIGKILL)
    elif disturbance.kind == "stopped for a while":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
    elif disturbance.kind == "worker killed":
        children = Path(f"/proc/{pid}/task/{pid}/children")
        with contextlib.suppress(OSError):
            for worker in children.read_text().split():
                os.kill(int(worker), signal.SIGKILL)


def prepare(folder: Path) -> None:
    (folder / "demo.yaml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"question": f"{a} + {b} ="} for a in range(8) for b in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fingerprints(folder: Path) -> dict[int, str]:
    """By version, of the weights that count."""
    from nearpolicy.store.reader import RunReader

    with RunReader(folder / "run") as run:
        return {record.version: record.fingerprint for record in run.versions()}


def require_whole(folder: Path, *, bound: int, steps: int) -> None:
    """I1, I2, one ending for each admission, every step once, every step's metrics."""
    from nearpolicy.records import Fate
    from nearpolicy.store.reader import RunReader

    with RunReader(folder / "run") as run:
        if [record.step for record in run.steps()] != list(range(steps)):
            raise Broken(f"steps {[record.step for record in run.steps()]}")
        consumed = run.consumption()
        admissions = [each.admission for each in consumed]
        if len(set(admissions)) != len(admissions):
            raise Broken("a group was consumed twice")
        for each in consumed:
            staleness = each.step - run.group(each.admission, each.attempt).oldest_version
            if not 0 <= staleness <= bound:
                raise Broken(f"group {each.admission} was consumed with staleness {staleness} beyond {bound}")
        if left := run.unfinished():
            raise Broken(f"admissions {[a.index for a in left]} have not ended")
        indices = [admission.index for admission in run.admissions()]
        if indices != list(range(len(indices))):
            raise Broken(f"admissions {indices} have gaps")
        ledger = run.ledger()
        ledger.pop(Fate.REPLAYED, None)  # counted apart
        sampled = run.query("SELECT coalesce(sum(sampled), 0) FROM rollouts")[0][0]
        told = [line for line in run.metrics() if "policy/loss" in line][-1].get("ledger/trained_tokens")
        if told not in (None, ledger.get(Fate.TRAINED)):  # None: learned again from the recording
            raise Broken(f"{told} trained tokens were counted, and {ledger} is stored")
        if Fate.IN_FLIGHT in ledger or sum(ledger.values()) != sampled:
            raise Broken(f"ledger {ledger} over {sampled} sampled tokens")
        if run.query("PRAGMA integrity_check")[0][0] != "ok":
            raise Broken("the database is damaged")
        told = [line["step"] for line in run.metrics() if "policy/loss" in line]
        if told != list(range(steps)):
            raise Broken(f"metrics of the steps {told}")


@dataclass
class Tally:
    kills: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    runs: int = 0
    lives: int = 0
    bit_equal: int = 0

    def as_json(self, seconds: float) -> dict[str, Any]:
        kinds = {"kills": dict(self.kills), "faults": dict(self.faults)}
        counts = {"runs": self.runs, "lives": self.lives, "final_weights_compared_and_equal": self.bit_equal}
        return {
            "disturbances": sum(self.kills.values()) + sum(self.faults.values()), **kinds, **counts,
            "lost_groups": 0, "doubled_groups": 0, "staleness_violations": 0, "seconds": round(seconds, 1),
        }  # fmt: skip


def chosen(luck: random.Random, kind: str) -> Disturbance:
    count = {"in a checkpoint": 6, "disk full for a checkpoint": 6}.get(kind, 30)
    return Disturbance(kind, count=luck.randint(1, count), seconds=round(luck.uniform(0.05, 1.5), 3))


_MODULES_TO = "NEARPOLICY_CHAOS_MODULES"


def load_what_a_run_loads(base: Path) -> None:
    """In this process, so that no child has to. A child tells what it is: to run here would start threads, which do not
    survive a fork."""
    folder = base / "first"
    folder.mkdir()
    prepare(folder)
    os.environ[_MODULES_TO] = str(base / "modules.txt")
    if live(folder, SETTINGS["synchronous"], None) != 0:
        raise Broken(f"{folder}: a first run did not end; see its log.txt")
    del os.environ[_MODULES_TO]
    for name in (base / "modules.txt").read_text().split():
        with contextlib.suppress(Exception):  # made, not imported
            importlib.import_module(name)
    shutil.rmtree(folder)


def disturbed(base: Path, kills: int, faults: int, seed: int) -> Tally:
    """So many disturbances over as many runs as they take; `Broken` names the folder of the run that shows it."""
    import nearpolicy.launch.build
    import nearpolicy.launch.session
    import nearpolicy.learner.checkpoint  # noqa: F401

    load_what_a_run_loads(base)
    luck, tally = random.Random(seed), Tally()
    waiting = [luck.choice(KILLS) for _ in range(kills)] + [luck.choice(FAULTS) for _ in range(faults)]
    luck.shuffle(waiting)
    undisturbed: dict[str, dict[int, str]] = {}
    names = list(SETTINGS)
    while waiting:
        name = names[tally.runs % len(names)]
        if name in EXACT and name not in undisturbed:
            folder = _run(base, f"undisturbed-{name}", name, [], tally)
            undisturbed[name] = fingerprints(folder)
            shutil.rmtree(folder)
        mine = [chosen(luck, waiting.pop()) for _ in range(min(len(waiting), luck.randint(1, 4)))]
        folder = _run(base, f"run-{tally.runs}", name, mine, tally)
        if name in EXACT:
            if fingerprints(folder) != undisturbed[name]:
                raise Broken(f"{folder}: other weights than those of the undisturbed run")
            tally.bit_equal += 1
        tally.runs += 1
        shutil.rmtree(folder)
    return tally


def _run(base: Path, where: str, name: str, disturbances: list[Disturbance], tally: Tally) -> Path:
    folder = base / where
    folder.mkdir()
    prepare(folder)
    settings = SETTINGS[name]
    for disturbance in disturbances:
        status = live(folder, settings, disturbance)
        tally.lives += 1
        of = tally.kills if disturbance.kind in KILLS else tally.faults
        of[disturbance.kind] += 1
        if os.WIFSIGNALED(status) and disturbance.kind not in KILLS:
            raise Broken(f"{folder} ({name}): {disturbance} ended the process by signal {os.WTERMSIG(status)}")
    for _ in range(2):  # one that came to its end before has nothing left to do
        status = live(folder, settings, None)
        tally.lives += 1
        if status == 0:
            break
    else:
        raise Broken(f"{folder} ({name}): a run in peace ended with status {status}; see its log.txt")
    bound = next(int(s.partition("=")[2]) for s in settings if s.startswith("queue.max_staleness"))
    try:
        require_whole(folder, bound=bound, steps=5)
    except Broken as error:
        raise Broken(f"{folder} ({name}, {disturbances}): {error}") from None
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=350)
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the runs lie; the one that broke a promise stays there")
    arguments = parser.parse_args()
    base = arguments.keep or Path(tempfile.mkdtemp(prefix="nearpolicy-chaos-"))
    base.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NEARPOLICY_CACHE", str(base / "cache"))
    begin = time.monotonic()
    try:
        tally = disturbed(base, arguments.kills, arguments.faults, arguments.seed)
    except Broken as error:
        print(json.dumps({"broken": str(error), "seed": arguments.seed}))
        sys.exit(1)
    if arguments.keep is None:
        shutil.rmtree(base, ignore_errors=True)
    print(json.dumps(tally.as_json(time.monotonic() - begin)))


if __name__ == "__main__":
    main()
