"""Answers `benchmarks.generate` from an environment that has vLLM's CPU build: one JSON question a line on stdin.

Settings that it was found to run with: eager, 2 GB for keys and values, no log statistics.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=64, enable_prefix_caching=True
    )
    print("ANSWER null", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        llm.reset_prefix_cache()
        prompts, settings = [], []
        for prompt, lengths in zip(question["prompts"], question["lengths"], strict=True):
            for length in lengths:
                prompts.append({"prompt_token_ids": prompt})
                settings.append(
                    SamplingParams(
                        temperature=question["temperature"], max_tokens=length, ignore_eos=True, detokenize=False
                    )
                )
        answers = llm.generate(prompts, settings, use_tqdm=False)
        print("ANSWER " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
