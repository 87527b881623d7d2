"""What overlapping generation and learning gains: the demo's model and shapes, ``max_staleness`` 1 against 0.

    python -m benchmarks.overlap [--pairs 3] [--steps 6]

Fixed work: the learning rate is so small that every version samples like version 0, so both sides generate and learn
the same tokens, which is checked before anything is compared. Each side has its best thread counts: all cores for the
role whose turn it is, against one thread per role. Pairs alternate. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from nearpolicy.store.reader import RunReader

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"


def run(max_staleness: int, steps: int, folder: Path) -> tuple[float, list[bytes]]:
    """Seconds of training, and the sampled tokens of every rollout in order."""
    command = [
        sys.executable, "-m", "nearpolicy.launch.cli", "train", str(RECIPE), f"run.dir={folder}", f"run.steps={steps}",
        f"queue.max_staleness={max_staleness}", "learner.learning_rate=1e-15", "learner.lr_schedule=constant",
        "tasks.0.held_out=0", "evaluation.pass_k=[]",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with RunReader(folder) as reader:
        summary = reader.summary()
        assert summary is not None
        tokens = [s.token_ids.tobytes() for g in reader.groups() for r in g.rollouts for s in r.segments]
    return summary["wall_s"], tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    ratios, times = [], {0: [], 1: []}
    for pair in range(arguments.pairs):
        seen = {}
        for staleness in (0, 1) if pair % 2 == 0 else (1, 0):
            with tempfile.TemporaryDirectory() as scratch:
                seconds, seen[staleness] = run(staleness, arguments.steps, Path(scratch) / "run")
            times[staleness].append(seconds)
            print(f"pair {pair + 1}, max_staleness {staleness}: {seconds:.1f} s", flush=True)
        if seen[0] != seen[1]:
            raise SystemExit(f"pair {pair + 1}: the two sides sampled different tokens; nothing can be compared")
        ratios.append(times[0][-1] / times[1][-1])
    print(
        json.dumps(
            {
                "comparison": "training time of max_staleness 0 over max_staleness 1",
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "pairs": len(ratios),
                "steps": arguments.steps,
                "equal_results": True,
                "seconds_0": times[0],
                "seconds_1": times[1],
            }
        )
    )


if __name__ == "__main__":
    main()
