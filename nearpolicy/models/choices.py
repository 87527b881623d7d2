"""A frozen language model that decides between given answers, many questions in one packed forward pass.

A question is one node of the packed row, each of its prefixes with a choice another that continues it, so that the
question goes through the model once. A question's answer does not depend on the others in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nearpolicy.models.label_tree import LabelTree
from nearpolicy.models.policy import PolicyModel, log_softmax
from nearpolicy.models.rows import Node, RowContext


class ChoiceModel:
    """What a policy would answer, if it may answer nothing but the labels."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy.eval()

    @torch.inference_mode()
    def decide(self, questions: Sequence[tuple[Sequence[int], LabelTree]]) -> list[dict[str, float]]:
        """Label -> probability for each question, given by its tokens."""
        ids: list[int] = []
        nodes: list[Node] = []
        ends: list[int] = []
        for tokens, tree in questions:
            parent = len(nodes)
            nodes.append(Node(len(ids), len(tokens)))
            ids += tokens
            asked = len(ids) - 1
            for prefix in tree.choices:
                if prefix:
                    nodes.append(Node(len(ids), len(prefix), parent=parent))
                    ids += prefix
                ends.append(len(ids) - 1 if prefix else asked)
        device = self._policy.device
        context = RowContext(nodes, len(ids), device)
        logits = self._policy.logits(torch.tensor(ids, device=device), context.positions, context, torch.tensor(ends))
        rows = iter(log_softmax(logits, 1.0))
        return [
            tree.probabilities({prefix: _of(next(rows), allowed) for prefix, allowed in tree.choices.items()})
            for _, tree in questions
        ]


def _of(logprobs: torch.Tensor, tokens: Sequence[int]) -> dict[int, float]:
    return dict(zip(tokens, logprobs[list(tokens)].tolist(), strict=True))
