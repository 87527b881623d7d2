"""Kill a run in the middle, take it up again, and see that nothing of it shows: `python examples/kill_and_resume.py`.

A tiny random model learns for eight steps, once undisturbed and once with its process killed (SIGKILL) as soon as the
third step is logged. The weights of every version are compared by fingerprint.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 8}
model: {path: random:llama, init: {initializer_range: 0.15}}
queue: {prompts_per_step: 4, max_staleness: 0}
sampling: {num_generations: 4, max_completion_length: 8, max_prompt_length: 16}
checkpoint: {every: 2}
learner: {learning_rate: 1e-3}
tasks:
  - name: sums
    source: {kind: jsonl, path: rows.jsonl}
    prompt_column: question
    chat: false
    rewards: [{kind: function, path: reward.py:vowels}]
"""
REWARD = """\
def vowels(completions, **_):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]
"""
TRAIN = [sys.executable, "-m", "nearpolicy.launch.cli", "train"]


def fingerprints(run: Path) -> list[str]:
    with RunReader(run) as reader:
        return [record.fingerprint for record in reader.versions()]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [{"question": f"{a} + {b} ="} for a in range(10) for b in range(10)]
        (folder / "reward.py").write_text(REWARD)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "recipe.yaml").write_text(RECIPE)
        subprocess.run([*TRAIN, "recipe.yaml", "run.dir=whole"], cwd=folder, check=True)

        process = subprocess.Popen([*TRAIN, "recipe.yaml", "run.dir=killed"], cwd=folder)
        metrics = folder / "killed" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print("killed\n")

        subprocess.run([*TRAIN, "--resume", "killed"], cwd=folder, check=True)
        equal = fingerprints(folder / "whole") == fingerprints(folder / "killed")
        print(f"\nall {len(fingerprints(folder / 'whole'))} versions equal, bit for bit: {equal}")
        sys.exit(not equal)


if __name__ == "__main__":
    main()
