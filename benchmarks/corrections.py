"""Corrections side by side on recorded rollouts: data of age 0, 1, 4 and 8 steps, and of an engine that rounds.

    python -m benchmarks.corrections [--steps 19] [--out DIR]

Two runs of recipes/tiny.yaml with 16 prompts a step are recorded, synchronous, with the weights of every version. In
the second one the engine rounds its logits to bfloat16 before it samples, as an engine with other kernels would be;
the learner does not. Then ``nearpolicy compare`` looks at one batch of the first run under weights that are 0, 1, 4 and
8 steps newer, and at one batch of the second run under its own. Prints Markdown; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearpolicy.machine import prepare_environment

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
STEP = 10
"""The step whose batch is looked at."""
AGES = (0, 1, 4, 8)
OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "no correction": {"loss": "pg", "correction": "none"},
    "token_truncate 2": {"loss": "pg"},
    "token_mask 0.5-2 (IcePop)": {"loss": "pg", "correction": "token_mask"},
    "sequence_truncate 5": {"loss": "pg", "correction": "sequence_truncate"},
    "sequence_mask 3": {"loss": "pg", "correction": "sequence_mask"},
    "geometric_mask 0.99-1.01": {"loss": "pg", "correction": "geometric_mask"},
    "vtrace 1, 1": {"loss": "pg", "advantage": "vtrace"},
    "full weights": {"loss": "pg", "correction": "sequence_truncate", "correction_cap": 1e20},
}
"""All with one update per step, where the clipped losses have the gradient of `pg` under their correction."""


def main() -> None:
    prepare_environment()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEP + AGES[-1] + 1)
    parser.add_argument("--out", type=Path, help="keep the recorded runs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch)
        record(folder / "exact", arguments.steps, rounds=False)
        record(folder / "rounding", STEP + 1, rounds=True)
        found = {f"{age} step{'s' * (age != 1)} old": study(folder / "exact", STEP, STEP + age) for age in AGES}
        found["an engine that rounds"] = study(folder / "rounding", STEP, STEP)
        trained = study(folder / "exact", 0, STEP, train=STEP - 1)["trained"]
    for title, result in found.items():
        print(table(title, result))
    print(training_table(trained))
    print(json.dumps({name: result["objectives"] for name, result in found.items()}))


def record(folder: Path, steps: int, *, rounds: bool) -> None:
    """A run with the weights of every version; ``rounds``: the engine samples from logits in bfloat16."""
    from nearpolicy.config import load_recipe
    from nearpolicy.launch.session import Session, run_session

    class Rounding(Session):
        def _start_roles(self, closing) -> None:
            super()._start_roles(closing)
            policy = self.engine.engine.policy
            exact = policy.head
            policy.head = lambda hidden: exact(hidden).bfloat16().float()

    overrides = [
        f"run.dir={folder}",
        f"run.steps={steps}",
        "run.keep_versions=true",
        "queue.prompts_per_step=16",
        "queue.max_staleness=0",
        "evaluation.every=0",
    ]
    kind = Rounding if rounds else Session
    run_session(kind(config=load_recipe(RECIPE, overrides), say=lambda text: None))


def study(folder: Path, step: int, version: int, train: int = 0) -> dict[str, Any]:
    """What ``nearpolicy compare`` says, without the run's own objective."""
    from nearpolicy.config import config_from_dict
    from nearpolicy.launch.compare import Workshop, compare
    from nearpolicy.store.reader import RunReader

    with RunReader(folder) as run:
        config = config_from_dict(run.config, where=str(folder))
        chosen = {
            name: config_from_dict({**run.config, "objective": settings}, where=name).objective
            for name, settings in OBJECTIVES.items()
        }
        workshop = Workshop(run, config, version, say=lambda text: None)
        result = compare(workshop, chosen, step=step)
        if train:
            result["trained"] = asyncio.run(workshop.train_each(chosen, range(step, step + train)))
        return result


def table(title: str, result: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"### {title[0].upper()}{title[1:]}\n",
        f"{result['groups']} groups, {result['tokens']} trained tokens.\n",
        "| | ESS of tokens | rejected | cosine to full weights | bias (95 %) | variance |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["objectives"].items():
        gap = row["importance_sampling"]
        bias = f"{gap['bias']:.3f} ({gap['bias_low']:.3f} to {gap['bias_high']:.3f})"
        lines.append(
            f"| {name} | {row['ess']:.3f} | {row['rejected_share']:.1%} | {row['cosine_to_importance_sampling']:.3f} "
            f"| {bias} | {gap['variance']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def training_table(trained: Mapping[str, Any]) -> str:
    """Markdown: every objective trained on data that is as many steps old as the version it begins at."""
    lines = [
        f"### Trained from version {STEP} on the batches of steps 0 to {STEP - 2}\n",
        "| | held out before | after | entropy at the end |",
        "|---|---|---|---|",
    ]
    for name, found in trained.items():
        before, after = (found["held_out"][when] for when in ("before", "after"))
        lines.append(
            f"| {name} | {before['accuracy']:.0%} | {after['accuracy']:.0%} ({after['correct']} of {after['count']}) "
            f"| {found['steps'][-1]['policy/entropy']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
