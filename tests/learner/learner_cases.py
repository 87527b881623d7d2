"""What the learner's tests share: a tiny model, random rows, and the loss written out plainly in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.ranks import Together
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.numerics import Numerics
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective
from nearpolicy.records import Admission, Batch, Finish, Group, Prompt, Row, Segment

EXACT = Numerics(min_rows=16, max_threads=2)
"""More rows than any processor seen so far needs."""
SHAPE = {"initializer_range": 0.15, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 272}


def model_folder(**init) -> Path:
    return resolve("random:llama", SHAPE | init, seed=3)


def learner(
    *,
    objective: ObjectiveConfig | object | None = None,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    total_steps: int = 10,
    threads: int = 1,
    policy: torch.nn.Module | None = None,
    ranks: Together | None = None,
    **config,
) -> PolicyLearner:
    shared = {} if ranks is None else {"ranks": ranks.size}
    settings = LearnerConfig(**{"learning_rate": 1e-3, "max_grad_norm": None} | shared | config)
    chosen = objective if objective is not None else ObjectiveConfig()
    return PolicyLearner(
        policy or load_policy(folder or model_folder(), dtype, known_to_fit=True),
        Objective(chosen, 12) if isinstance(chosen, ObjectiveConfig) else chosen,
        settings,
        EXACT,
        temperature=temperature,
        total_steps=total_steps,
        threads=threads,
        ranks=ranks,
    )


def random_rows(
    seed: int = 0, *, groups: int = 3, size: int = 4, longest: int = 12, signal: Sequence[bool] | None = None
) -> list[Row]:
    """``groups`` prompts with ``size`` completions each; some tokens are observations. No signal: advantage 0."""
    numbers = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        context = numbers.integers(0, 256, numbers.integers(3, 20))
        for sample in range(size):
            length = int(numbers.integers(1, longest + 1))
            mask = numbers.random(length) < 0.85
            mask[0] = True
            advantage = numbers.normal() if signal is None or signal[group] else 0.0
            segment = Segment(
                context_ids=context,
                token_ids=numbers.integers(0, 256, length),
                mask=mask,
                behavior_logprobs=np.where(mask, numbers.normal(-6.0, 1.0, length), 0.0),
                versions=np.where(mask, 0, -1),
                finish=Finish.STOP,
            )
            advantages = np.where(mask, advantage, 0.0)
            rows.append(Row(group=group, sample=sample, segment=segment, trained=mask, advantages=advantages))
    return rows


def batch_of(rows: Sequence[Row], *, step: int = 0, places: int | None = None) -> Batch:
    indices = sorted({row.group for row in rows})
    groups = tuple(
        Group(admission=Admission(index=i, prompt=Prompt(id=str(i), task="t", text="?"), seed=0, version=0))
        for i in indices
    )
    return Batch(step=step, places=places or len(groups), groups=groups, rows=tuple(rows))


def gradients(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def weights(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in policy.parameters()]).clone()


def reference_logprobs(model: torch.nn.Module, row: Row, temperature: float = 1.0) -> torch.Tensor:
    """[T] of every token of the row, one plain forward pass of transformers."""
    context, tokens = row.segment.context_ids.tolist(), row.segment.token_ids.tolist()
    logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def reference(
    folder: Path, rows: Sequence[Row], *, temperature: float = 1.0, cap: float = 2.0, loss_agg: str = "token_mean"
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one first update, in float64: truncated importance sampling, nothing to clip yet."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    all_tokens = sum(int(row.trained.sum()) for row in rows)
    sequences = sum(bool(row.trained.any()) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if not row.trained.any():
            continue
        kept = torch.from_numpy(row.trained.copy())
        logprobs = reference_logprobs(model, row, temperature)[kept]
        behavior = torch.from_numpy(row.segment.behavior_logprobs.astype(np.float64))[kept]
        advantages = torch.from_numpy(row.advantages.astype(np.float64))[kept]
        weight = (logprobs.detach() - behavior).exp().clamp(max=cap)
        ratio = (logprobs - logprobs.detach()).exp()
        summed = -(weight * advantages * ratio).sum()
        if loss_agg == "token_mean":
            total = total + summed / all_tokens
        elif loss_agg == "seq_mean_token_mean":
            total = total + summed / (len(logprobs) * sequences)
        else:
            total = total + summed / (12 * sequences)
    total.backward()
    return float(total.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])


class FixedLogits(torch.nn.Module):
    """A policy of one position: the same logits after every token."""

    device = torch.device("cpu")

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids, positions, context, rows, targets, temperature, **options):
        from nearpolicy.models.policy import Scores, log_softmax

        logprobs = log_softmax(self.logits.expand(len(rows), -1), temperature)
        return Scores(logprobs.gather(1, targets[:, None])[:, 0], torch.zeros(len(rows)))


def constant_row(group: int, length: int, value: float) -> Row:
    """``length`` tokens that all carry the number ``value`` where an advantage would stand."""
    everywhere = np.ones(length, dtype=bool)
    segment = Segment(
        context_ids=[1],
        token_ids=np.zeros(length),
        mask=everywhere,
        behavior_logprobs=np.zeros(length),
        versions=np.zeros(length),
        finish=Finish.STOP,
    )
    return Row(group=group, sample=0, segment=segment, trained=everywhere, advantages=np.full(length, value))
