"""Runs whose actors are killed at random: what is left must be what an undisturbed run leaves.

    python tests/chaos/chaos_ray.py [--kills 50] [--seed 0] [--keep FOLDER]

Generators, ranks of the learner, verifiers, the record and, where a setting says so, the controller are actors; any of
them may die at any moment after the first weights are published, also while another one is coming back. A run that
cannot go on by itself is taken up. The last line is one JSON object with the counts; exit status 1 if a promise was
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ray")]

import chaos  # noqa: E402

from nearpolicy.errors import ConfigError, SyncError, VerifierError  # noqa: E402
from nearpolicy.launch.supervised import LOST  # noqa: E402

STEPS = 8
ON_RAY = (
    f"run.steps={STEPS}", "runtime.kind=ray", "generator.replicas=2", "verifier.workers=1", "checkpoint.every=3",
    "queue.rollout_timeout_s=120", "queue.stall_timeout_s=300",
)  # fmt: skip
SETTINGS: dict[str, tuple[str, ...]] = {
    "synchronous": ("queue.max_staleness=0",),
    "controller": ("queue.max_staleness=0", "runtime.controller=actor"),
    "two ranks": ("queue.max_staleness=0", "learner.ranks=2", "runtime.rank_timeout_s=60"),
    "ahead": ("queue.max_staleness=2", "generator.on_sync=continue"),
    "ready": ("queue.max_staleness=2", "queue.order=ready", "runtime.verifiers=2", "runtime.controller=actor"),
    "colocated": (
        "queue.max_staleness=1", "runtime.placement=colocated", "learner.ranks=2", "sync.weight_sync_steps=2",
        "sync.transport=device_handles",
    ),
    "goes on": (
        "queue.max_staleness=2", "run.numerics=fast", "sampling.max_completion_length=40", "runtime.controller=actor",
    ),
    "goes back": (
        "queue.max_staleness=0", "monitors=[{metric: policy/grad_norm, above: 3.6, action: rollback, most: 99}]",
    ),
}  # fmt: skip
EXACT = {
    "synchronous": "synchronous", "controller": "synchronous", "two ranks": "two ranks", "goes back": "goes back",
}  # fmt: skip
"""Settings that repeat to the bit, and which undisturbed run has the same bits."""


@dataclass
class Tally:
    kills: Counter = field(default_factory=Counter)
    runs: int = 0
    lives: int = 0
    sessions: int = 0
    """In all lives together: more, where the run went on by itself from its record."""
    bit_equal: int = 0
    ended: Counter = field(default_factory=Counter)
    """Kinds of errors with which lives ended that were taken up."""


class Killer(threading.Thread):
    """Kills actors of one run, whichever of its sessions is at work."""

    def __init__(self, run: Any, luck: random.Random, count: int, tally: Tally) -> None:
        super().__init__(name="killer", daemon=True)
        self._run, self._luck, self._count, self._tally = run, luck, count, tally
        self.done = 0
        self.over = threading.Event()

    def run(self) -> None:
        while self.done < self._count and not self.over.wait(self._luck.uniform(0.05, 0.8)):
            if not self._run.session.begun:
                continue
            if victims := self._victims():
                role = self._luck.choice(sorted(victims))
                if self._is_killed(self._luck.choice(victims[role])):
                    self._tally.kills[role] += 1
                    self.done += 1

    def _victims(self) -> dict[str, list[str]]:
        """Role -> names of the actors that are there."""
        import ray

        found: dict[str, list[str]] = {}
        for name in sorted(ray.util.list_named_actors()):
            found.setdefault(name.split()[1], []).append(name)
        return found

    def _is_killed(self, name: str) -> bool:
        import ray

        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except (ValueError, ray.exceptions.RayError):
            return False
        return not self.over.is_set()


def live(settings: tuple[str, ...], luck: random.Random, kills: int, tally: Tally) -> int:
    """One life of the run in this folder, with so many kills; how many there were."""
    from nearpolicy.launch.supervised import Supervised, session_of

    began = chaos._session((*ON_RAY, *settings))
    given = {name: getattr(began, name) for name in ("config", "folder", "say", "resumes")}
    run = Supervised(session_of(**given))
    killer = Killer(run, luck, kills, tally)
    killer.start()
    tally.lives += 1
    try:
        run.run()
    except (*LOST, VerifierError, ConfigError, SyncError) as error:  # killed again and again while it came back
        tally.ended[type(error).__name__] += 1
        print(f"   this life ended: {error}", flush=True)
    finally:
        killer.over.set()
        killer.join()
        tally.sessions += run.sessions
    return killer.done


def run(base: Path, name: str, luck: random.Random, kills: int, tally: Tally) -> Path:
    folder = base / f"run-{tally.lives}"
    folder.mkdir()
    os.chdir(folder)
    chaos.prepare(folder)
    left = kills
    for _ in range(20):
        print(f"-- {name}, {left} kills", flush=True)
        left -= live(SETTINGS[name], luck, left, tally)
        if (folder / "run" / "summary.json").exists():
            break
    else:
        raise chaos.Broken(f"{folder} ({name}): the run does not come to its end")
    bound = next(int(s.partition("=")[2]) for s in SETTINGS[name] if s.startswith("queue.max_staleness"))
    try:
        chaos.require_whole(folder, bound=bound, steps=STEPS)
    except chaos.Broken as error:
        raise chaos.Broken(f"{folder} ({name}): {error}") from None
    if name == "goes back" and not _went_back(folder):
        raise chaos.Broken(f"{folder} ({name}): it did not, so that nothing was tried")
    return folder


def _went_back(folder: Path) -> bool:
    from nearpolicy.records import ROLLBACK
    from nearpolicy.store.reader import RunReader

    with RunReader(folder / "run") as run:
        return any(branch.kind == ROLLBACK for branch in run.branches())


def disturbed(base: Path, kills: int, seed: int) -> Tally:
    luck, tally = random.Random(seed), Tally()
    undisturbed: dict[str, dict[int, str]] = {}
    names = list(SETTINGS)
    while (left := kills - sum(tally.kills.values())) > 0:
        name = names[tally.runs % len(names)]
        alike = EXACT.get(name)
        if alike and alike not in undisturbed:
            undisturbed[alike] = chaos.fingerprints(run(base, alike, luck, 0, tally))
        folder = run(base, name, luck, min(left, luck.randint(3, 5)), tally)
        if alike:
            if chaos.fingerprints(folder) != undisturbed[alike]:
                raise chaos.Broken(f"{folder} ({name}): other weights than those of the undisturbed run")
            tally.bit_equal += 1
        tally.runs += 1
        os.chdir(base)
        shutil.rmtree(folder)
    return tally


def as_json(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "kills": sum(tally.kills.values()),
        "of": dict(tally.kills),
        "runs": tally.runs,
        "lives": tally.lives,
        "sessions": tally.sessions,
        "lives_ended_by": dict(tally.ended),
        "final_weights_compared_and_equal": tally.bit_equal,
        "lost_groups": 0,
        "doubled_groups": 0,
        "staleness_violations": 0,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the runs lie; the one that broke a promise stays there")
    arguments = parser.parse_args()
    base = (arguments.keep or Path(tempfile.mkdtemp(prefix="nearpolicy-chaos-ray-"))).resolve()
    base.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NEARPOLICY_CACHE", str(base / "cache"))
    from forked_workers import begun_ray

    begin = time.monotonic()
    try:
        with begun_ray():
            tally = disturbed(base, arguments.kills, arguments.seed)
    except chaos.Broken as error:
        print(f"broken with --seed {arguments.seed}: {error}", flush=True)
        sys.exit(1)
    os.chdir("/")
    shutil.rmtree(base, ignore_errors=True)
    print(json.dumps(as_json(tally, time.monotonic() - begin)))


if __name__ == "__main__":
    main()
