"""A run from Python: a model, a reward function, rows. A minute or two on two cores.

.venv/bin/python examples/trainer.py
"""

from __future__ import annotations

import json

from nearpolicy import Trainer


def starts_alike(prompts, completions, completion_ids, **columns):
    """1 if the completion begins with the last letter of the prompt; the shape TRL expects of a reward."""
    return [float(c[:1] == p[-1]) for p, c in zip(prompts, completions, strict=True)]


if __name__ == "__main__":
    trainer = Trainer(
        model="random:llama",
        reward_funcs=starts_alike,
        train_dataset=[{"prompt": f"letter {letter}"} for letter in "abcdefgh"],
        config={
            "run": {"steps": 60, "name": "letters"},
            "sampling": {"num_generations": 64, "max_completion_length": 1, "max_prompt_length": 16},
            "generator": {"max_running": 512},
            "learner": {"learning_rate": 1e-3},
        },
        task={"chat": False},
    )
    summary = trainer.train()
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    print(
        f"reward {first['reward/mean']:.3f} in step {first['step']}, {last['reward/mean']:.3f} in step {last['step']}, "
        f"after {summary['wall_s']:.0f} s of training; look at it with: nearpolicy report {trainer.run_dir}"
    )
