"""Answers `benchmarks.step` from an environment that has TRL: one JSON question on stdin."""

import itertools
import json
import os
import re
import sys
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def right(completions, **_):
    """As the demo's reward does its work: find the last number."""
    return [float(bool(re.findall(r"\d+", completion[0]["content"]))) for completion in completions]


def main() -> None:
    question = json.load(sys.stdin)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends, lengths = [], []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **_):
            if logs and "completions/mean_length" in logs:
                lengths.append(logs["completions/mean_length"])

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, max_steps=question["steps"], learning_rate=1e-5, lr_scheduler_type="constant",
            per_device_train_batch_size=32, gradient_accumulation_steps=2, num_generations=8, max_completion_length=12,
            temperature=0.7, use_cpu=True, bf16=False, report_to=[], logging_steps=1, save_strategy="no",
            gradient_checkpointing=False, disable_tqdm=True,
        )  # fmt: skip
        prompts = [{"prompt": chat} for chat in question["prompts"]]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(question["model"], dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(question["model"]),
            reward_funcs=right,
            args=config,
            train_dataset=Dataset.from_list(prompts),
            callbacks=[Watch()],
        )
        trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    print("ANSWER " + json.dumps({"seconds": seconds, "length_mean": lengths[0]}), flush=True)


if __name__ == "__main__":
    main()
