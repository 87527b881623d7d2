"""A run from Python: a model, a reward function, rows. About half a minute on two cores.

python examples/trainer.py
"""

from __future__ import annotations

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
    print(f"{summary['steps']} steps in {summary['wall_s']} s; look at {trainer.run_dir}")
