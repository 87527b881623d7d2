"""The whole synchronous method in one file: a tiny random model learns to count by RL alone.

    .venv/bin/python examples/one_file_loop.py            (about a minute on two cores)

Every step: sample G completions per prompt, score them, compare each with its group, take one gradient step, put the
new weights into the engine. The asynchronous system does the same with the two halves overlapping; with
`queue.max_staleness: 0` and exact numerics it gives the same bits as a plain loop like this (tests/sync shows it).
"""

from __future__ import annotations

import sys

from nearpolicy.machine import prepare_environment

prepare_environment()  # before torch loads

import numpy as np  # noqa: E402
import torch  # noqa: E402

from nearpolicy.generator.engine import Engine, EngineLimits  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.numerics import FAST, probe_model  # noqa: E402
from nearpolicy.models.rows import Node, RowContext  # noqa: E402
from nearpolicy.models.tokenizer import byte_tokenizer  # noqa: E402
from nearpolicy.models.weights import load_weights, named_weights  # noqa: E402
from nearpolicy.objectives.advantages import grpo  # noqa: E402
from nearpolicy.roles import Request, Sampling  # noqa: E402

STEPS, PROMPTS, GROUP, LEARNING_RATE = 120, 10, 32, 8e-4

tokenizer = byte_tokenizer()
folder = resolve("random:llama", {"hidden_size": 64, "initializer_range": 0.1})
learner = load_policy(folder)  # the weights that change
engine_model = load_policy(folder)  # the weights that sample
numerics = probe_model(learner, max_threads=1) or FAST
torch.set_num_threads(1)
engine = Engine(
    engine_model,
    EngineLimits(max_running=PROMPTS * GROUP, num_pages=PROMPTS * (GROUP + 1), prefill_chunk=512),
    numerics,
)
optimizer = torch.optim.AdamW(learner.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
sampling = Sampling(temperature=1.0, max_tokens=1, stop_token_ids=(tokenizer.eos_token_id,))


def reward(prompt: str, completion: list[int]) -> float:
    """1 for the digit that follows the prompt's, 0 for anything else."""
    return float(tokenizer.decode(completion) == str((int(prompt[-1]) + 1) % 10))


def sample(prompts: list[str], step: int) -> list[list[tuple[list[int], list[float]]]]:
    """G completions per prompt: (token ids, log-probabilities they were sampled with)."""
    for i, prompt in enumerate(prompts):
        ids = np.array(tokenizer(prompt)["input_ids"])
        engine.submit(
            Request(id=str(i), token_ids=ids, sampling=sampling, n=GROUP, seed=0, admission=step * PROMPTS + i)
        )
    groups: list[list] = [[None] * GROUP for _ in prompts]
    while engine.scheduler.has_work:
        for done in engine.step():
            groups[int(done.request)][done.sample] = (done.token_ids.tolist(), done.logprobs.tolist())
    return groups


def group_loss(prompt: str, group: list[tuple[list[int], list[float]]], num_tokens: int) -> torch.Tensor:
    """Policy gradient of one group: the prompt goes through the model once, its completions continue it."""
    ids = list(tokenizer(prompt)["input_ids"])
    last, nodes, rows, targets, behavior, advantage = len(ids) - 1, [Node(0, len(ids))], [], [], [], []
    values = grpo([reward(prompt, tokens) for tokens, _ in group])
    if not values.any():
        return torch.zeros(())  # every completion got the same reward: nothing to learn
    for (tokens, logprobs), value in zip(group, values, strict=True):
        start = len(ids)
        if len(tokens) > 1:
            nodes.append(Node(start, len(tokens) - 1, parent=0))
            ids += tokens[:-1]
        rows += [last, *range(start, start + len(tokens) - 1)]
        targets += tokens
        behavior += logprobs
        advantage += [value] * len(tokens)
    padded = numerics.rows(len(ids), threads=1)
    context = RowContext(nodes, padded)
    row_ids = torch.tensor(ids + [0] * (padded - len(ids)))
    logprobs, _, _ = learner(row_ids, context.positions, context, torch.tensor(rows), torch.tensor(targets))
    weight = (logprobs.detach() - torch.tensor(behavior)).exp().clamp(max=2.0)  # exactly 1 here: nothing is stale
    return -(weight * torch.tensor(advantage, dtype=torch.float32) * logprobs).sum() / num_tokens


def main() -> float:
    """Returns the share of right answers in the last step."""
    shares = []
    for step in range(STEPS):
        prompts = [f"after {digit}" for digit in range(10)]
        groups = sample(prompts, step)
        num_tokens = sum(len(tokens) for group in groups for tokens, _ in group)
        optimizer.zero_grad()
        for prompt, group in zip(prompts, groups, strict=True):
            loss = group_loss(prompt, group, num_tokens)
            if loss.requires_grad:
                loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        engine.interrupt()  # nothing computed under the old weights is used again
        load_weights(engine_model.model, named_weights(learner.model))
        scores = [reward(p, tokens) for p, group in zip(prompts, groups, strict=True) for tokens, _ in group]
        shares.append(float(np.mean(scores)))  # the reward is 1 or 0
        if step % 10 == 0:
            print(f"step {step:>3}: right {shares[-1]:.1%}", flush=True)
    print(f"right in step 0: {shares[0]:.1%}, in step {STEPS - 1}: {shares[-1]:.1%}")
    return shares[-1]


if __name__ == "__main__":
    sys.exit(0 if main() > 0.5 else 1)
