"""Drives an engine by hand, and scores what it made the way a learner does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from nearpolicy.generator.engine import Engine, EngineLimits
from nearpolicy.models.numerics import FAST, Numerics
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.rows import Node, RowContext
from nearpolicy.models.weights import digests, fingerprint, named_weights
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Completion, Request, Sampling, Weights

Outcome = dict[tuple[str, int], Completion]


def make_engine(
    policy: PolicyModel,
    numerics: Numerics = FAST,
    *,
    max_running: int = 32,
    num_pages: int = 200,
    prefill_chunk: int = 512,
    **options: Any,
) -> Engine:
    return Engine(policy, EngineLimits(max_running, num_pages, prefill_chunk), numerics, **options)


def make_request(
    prompt: int | Sequence[int] = 5, *, id: str = "r", n: int = 1, seed: int = 0, admission: int = 0, **sampling: Any
) -> Request:
    """``prompt``: token ids, or a length to be filled with random ones."""
    of = {name: sampling.pop(name) for name in ("turn", "purpose", "version") if name in sampling}
    ids = np.random.default_rng(admission).integers(3, 256, prompt) if isinstance(prompt, int) else np.asarray(prompt)
    return Request(id=id, token_ids=ids, sampling=Sampling(**sampling), n=n, seed=seed, admission=admission, **of)


def run(
    engine: Engine,
    requests: Iterable[Request] = (),
    *,
    between: Callable[[int], None] = lambda step: None,
    max_steps: int = 2000,
) -> Outcome:
    """Complete everything; ``between`` is called with the number of passes done after each."""
    outcome: Outcome = {}

    def keep(completions: list[Completion]) -> None:
        for c in completions:
            assert (c.request, c.sample) not in outcome, f"{c.request}/{c.sample} ended twice"
            outcome[c.request, c.sample] = c

    for request in requests:
        keep(engine.submit(request))
    steps = 0
    while not engine.scheduler.is_idle:
        keep(engine.step())
        steps += 1
        assert steps < max_steps, "the engine makes no progress"
        between(steps)
    return outcome


def assert_same_bits(ours: Outcome, theirs: Outcome) -> None:
    assert ours.keys() == theirs.keys()
    for key, mine in ours.items():
        assert mine.token_ids.tolist() == theirs[key].token_ids.tolist(), key
        assert mine.logprobs.tobytes() == theirs[key].logprobs.tobytes(), key


def learner_logprobs(
    policy: PolicyModel, numerics: Numerics, threads: int, request: Request, completions: Sequence[Completion]
) -> torch.Tensor:
    """What a learner computes for all tokens of a group, from one packed row that holds the prompt once."""
    ids, nodes = request.token_ids.tolist(), [Node(0, len(request.token_ids))]
    last_of_prompt = len(ids) - 1
    rows: list[int] = []
    targets: list[int] = []
    for completion in completions:
        tokens = completion.token_ids.tolist()
        rows.append(last_of_prompt)
        if len(tokens) > 1:
            nodes.append(Node(len(ids), len(tokens) - 1, parent=0))
            rows += range(len(ids), len(ids) + len(tokens) - 1)
            ids += tokens[:-1]
        targets += tokens
    num_rows, num_targets = numerics.rows(len(ids), threads), numerics.rows(len(rows), threads)
    context = RowContext(nodes, num_rows)

    def padded(values: list[int], length: int) -> torch.Tensor:
        return torch.tensor(values + [values[-1]] * (length - len(values)))

    logprobs, _, _ = policy(
        padded(ids, num_rows),
        context.positions,
        context,
        padded(rows, num_targets),
        padded(targets, num_targets),
        request.sampling.temperature,
    )
    return logprobs[: len(targets)]


def weights_of(policy: PolicyModel, version: int) -> Weights:
    """What a learner that holds this model would publish."""
    tensors = {name: tensor.clone() for name, tensor in named_weights(policy.model).items()}
    parts = digests(tensors)
    record = VersionRecord(lineage=0, version=version, updates=version, fingerprint=fingerprint(parts), parent=None)
    return Weights(record=record, tensors=tensors, digests=parts)
