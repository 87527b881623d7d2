"""A run over several nodes, of which one dies: raylets of one machine, each a node of its own to Ray.

    python tests/ray/nodes.py generator|learner|verifier|controller|join [--steps 5]

Four nodes: the driver's, where only the record has a place, and three with two CPUs each. In the middle of the run the
node goes on which the named role lives, with all that lives there; `join` instead begins with one such node, and
another one comes. The run must end with the weights of one in a single process, bit for bit, and
with every group used once. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import test_ray_runs as runs

from nearpolicy.config import config_from_dict
from nearpolicy.launch.session import Session
from nearpolicy.launch.supervised import Supervised, session_of
from nearpolicy.store.reader import RunReader

NODE = {"num_cpus": 2, "object_store_memory": 160 << 20}
SETTINGS = {
    "generator": ("generator.replicas=2",),
    "learner": (),
    "verifier": (),
    "controller": ("runtime.controller=actor",),
    "join": ("generator.most_replicas=2", "runtime.verifiers=0"),
}
MOST_STEPS = 2000
""""join" ends its run when another generator is there."""


class Said(list[str]):
    """To a person, who sees it as it goes."""

    def append(self, text: str) -> None:
        print(text, file=sys.stderr)
        super().append(text)


class Nodes:
    """The cluster."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
        self._nodes = [self.cluster.add_node(**NODE) for _ in range(number)]
        self.cluster.wait_for_nodes()

    def add(self) -> None:
        self._nodes.append(self.cluster.add_node(**NODE))

    def remove_that_of(self, role: str) -> str | None:
        """The node on which an actor of this role lives, killed; what else lived there. None if there is no such."""
        for node in self._nodes:
            if any(f": {role} " in name for name in self.roles_on(node.node_id)):
                gone = self.roles_on(node.node_id)
                self._nodes.remove(node)
                self.cluster.remove_node(node, allow_graceful=False)
                return ", ".join(sorted(name.partition(": ")[2] for name in gone))
        return None

    def roles_on(self, node_id: str) -> list[str]:
        import ray

        alive = [each for each in ray._private.state.actors().values() if each["State"] == "ALIVE"]
        return [each["Name"] for each in alive if each["Address"]["NodeID"] == node_id]


OnStep = Callable[[Session, int], None]


def trained(folder: str, settings: list[str], said: list[str], on_step: OnStep) -> int:
    """Steps."""
    config = config_from_dict(runs.RECIPE, where="nodes", overrides=[f"run.dir={folder}", *settings])
    session = session_of(config=config, say=said.append, on_step=lambda step, metrics: on_step(run.session, step))
    run = Supervised(session)
    return run.run()["steps"]


def joined() -> set[int]:
    with RunReader(Path("run")) as run:
        return {event.instance for event in run.events("join")}


def play(role: str, steps: int) -> dict[str, Any]:
    nodes = Nodes(1 if role == "join" else 3)
    gone: list[str | None] = []
    said = Said()

    def on_step(session: Session, step: int) -> None:
        if step == 1 and not gone:
            gone.append(nodes.add() if role == "join" else nodes.remove_that_of(role))
        if role == "join" and len(joined()) > 1:
            session.stop()

    length = MOST_STEPS if role == "join" else steps
    cluster = ["runtime.kind=ray", f"runtime.address={nodes.cluster.address}", "runtime.start_timeout_s=180"]
    try:
        made = trained("run", [f"run.steps={length}", *cluster, *SETTINGS[role]], said, on_step)
    finally:
        nodes.cluster.shutdown()
    trained("alone", [f"run.steps={made}"], [], lambda session, step: None)
    with RunReader(Path("run")) as run:
        used = [each.admission for each in run.consumption()]
    return {
        "steps": made,
        "gone": gone,
        "said": [text for text in said if "lost" in text or "died" in text],
        "generators": len(joined()),
        "equal": runs.fingerprints("run") == runs.fingerprints("alone"),
        "used_once": used == list(range(made * runs.RECIPE["queue"]["prompts_per_step"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("rewards.py").write_text(runs.REWARD)
        found = play(arguments.role, arguments.steps)
        os.chdir("/")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
