"""The gradient of an objective group by group, on recorded data: what comparisons of objectives are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.pieces import whole
from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.comparison import GroupGradients
from nearpolicy.objectives.diagnostics import effective_sample_size
from nearpolicy.records import Batch, Row

EXACT_DIMENSIONS = 1 << 22
"""Models with at most so many parameters are compared in full."""
SKETCH_DIMENSIONS = 1 << 16
"""Larger ones through a random sketch, which keeps inner products to about 1 / sqrt of this: 0.4 %."""


class GradientSketch:
    """[D] numbers for the gradient of a policy: all of it, or its count sketch (Charikar et al. 2002), in which every
    parameter is added, with a random sign, to a random one of D sums."""

    def __init__(self, policy: torch.nn.Module, seed: int = 0) -> None:
        parameters = _trainable(policy)
        total = sum(p.numel() for p in parameters)
        self.is_exact = total <= EXACT_DIMENSIONS
        self._places: list[torch.Tensor] = []
        if not self.is_exact:
            generator = torch.Generator().manual_seed(seed)
            for p in parameters:  # the sign is the lowest bit
                drawn = torch.randint(2 * SKETCH_DIMENSIONS, (p.numel(),), generator=generator, dtype=torch.int32)
                self._places.append(drawn)

    def of(self, policy: torch.nn.Module) -> np.ndarray:
        """The gradient that a policy of the same shape holds now; if ranks hold it in pieces, all of them ask."""
        parameters = _trainable(policy)
        if self.is_exact:
            parts = [torch.zeros(p.numel()) if p.grad is None else _whole_gradient(p) for p in parameters]
            found = torch.cat(parts)
        else:
            found = torch.zeros(SKETCH_DIMENSIONS)
            for p, drawn in zip(parameters, self._places, strict=True):
                if p.grad is not None:
                    signed = _whole_gradient(p) * ((drawn & 1) * 2 - 1)
                    found.index_add_(0, (drawn >> 1).long(), signed)
        return found.double().numpy()


def group_gradients(learner: PolicyLearner, batch: Batch, sketch: GradientSketch) -> GroupGradients:
    """What the learner's objective says of a batch at the learner's weights, which stay as they are.

    Advantages are assigned anew by the objective; log-probabilities of the proximal policy are those of the weights.
    """
    objective = learner.objective
    rows = assign_advantages(batch.groups, objective.config, max_completion_length=objective.max_completion_length)
    batch = replace(batch, rows=rows)
    known = learner.known_at_start(rows)
    rows = learner.revised(batch, known)
    known = learner.with_choice(range(len(rows)), rows, known)
    everything, gradients, losses, divisors = TokenStats(), [], [], []
    for wanted in _by_group(rows):
        stats = TokenStats()
        learner.forward_backward(wanted, objective, rows, known, stats)
        gradients.append(sketch.of(learner.policy))
        learner.forget_gradient()
        losses.append(stats.loss_sum)
        divisors.append(stats.divisor)
        everything.add(stats)
        everything.proximal += stats.proximal
        everything.behavior += stats.behavior
    means = everything.means()
    if everything.behavior:
        log_ratios = np.concatenate(everything.proximal) - np.concatenate(everything.behavior)
        means["mismatch/ess"] = effective_sample_size(log_ratios)
    return GroupGradients(
        gradients=np.array(gradients), losses=np.array(losses), divisors=np.array(divisors), means=means
    )


def _trainable(policy: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in policy.parameters() if p.requires_grad]


def _whole_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return whole(parameter.grad).flatten().float()


def _by_group(rows: Sequence[Row]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group, []).append(i)
    return list(groups.values())
