"""What is counted while a step is made, and what is said of it at the end. A logged mean is a mean over tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearpolicy.learner.packing import Packed, targets_by_row
from nearpolicy.learner.selection import as_used
from nearpolicy.objectives.diagnostics import (
    REPLAYED,
    advantage_covariance,
    causes_of,
    effective_sample_size,
    log_ratios,
    mismatch,
    mismatch_by_cause,
)
from nearpolicy.objectives.objective import TokenLosses, TokenObjective, Tokens
from nearpolicy.records import Row


@dataclass(slots=True)
class TokenStats:
    """Sums over the tokens of one or more updates; a logged mean is a mean over tokens, as its name says."""

    loss_sum: float = 0.0
    divisor: float = 0.0
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    proximal: list[np.ndarray] = field(default_factory=list)
    behavior: list[np.ndarray] = field(default_factory=list)
    advantages: list[np.ndarray] = field(default_factory=list)
    causes: list[np.ndarray] = field(default_factory=list)
    """Of what may separate the two policies, see `diagnostics.causes_of`."""
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> [T] bool: tokens in the sum of the loss; rows without a forward pass are not there."""

    @property
    def loss(self) -> float:
        """Of one update."""
        return self.loss_sum / self.divisor if self.divisor else 0.0

    def count(self, rows: Sequence[Row], packed: Packed, tokens: Tokens, found: TokenLosses, *, version: int) -> None:
        """The tokens of one micro-batch, once the objective has spoken. ``version``: of the proximal policy."""
        self.tokens += len(packed.targets)
        for name, values in {"policy/entropy": tokens.entropies.detach(), **found.named}.items():
            self.sums[name] += float(values.double().sum())
        self.proximal.append(tokens.proximal_logprobs.cpu().numpy())
        self.behavior.append(tokens.behavior_logprobs.cpu().numpy())
        self.advantages.append(tokens.advantages.cpu().numpy())
        kept = found.kept.cpu().numpy()
        causes = np.empty(len(packed.targets), dtype=np.int8)
        self.causes.append(causes)
        for i, here in targets_by_row(packed):
            segment = rows[i].segment
            found_here = causes_of(segment.versions, segment.mask, version)[packed.position[here]]
            causes[here] = REPLAYED if rows[i].replayed else found_here
            self.kept[i] = np.zeros(len(rows[i].trained), dtype=bool)
            self.kept[i][packed.position[here]] = kept[here]

    def include(self, part: TokenStats) -> None:
        """What another part of the same update has counted."""
        self.loss_sum += part.loss_sum
        self.divisor += part.divisor
        self.add(part)
        for name in ("proximal", "behavior", "advantages", "causes"):
            getattr(self, name).extend(getattr(part, name))
        self.kept |= part.kept

    def means(self) -> dict[str, float]:
        return {name: total / self.tokens for name, total in self.sums.items()} if self.tokens else {}

    def add(self, other: TokenStats) -> None:
        """Sums over tokens; not what belongs to one update alone."""
        self.tokens += other.tokens
        for name, total in other.sums.items():
            self.sums[name] += total


class StepTally:
    """What the updates of one step add up to."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.losses: list[float] = []
        """By update."""
        self.norms: list[float] = []
        """By update: of the gradient before clipping."""
        self._rows = rows
        self._total = TokenStats()
        self._applied = [np.zeros(len(row.trained), dtype=bool) for row in rows]
        """By row: tokens in the loss of an update that was applied."""

    def add(self, stats: TokenStats, norm: float, *, first_pass: bool) -> None:
        """One update; what describes the batch itself is kept from the first pass over it."""
        self.losses.append(stats.loss)
        self.norms.append(norm)
        self._total.add(stats)
        if first_pass:
            self._total.proximal += stats.proximal
            self._total.behavior += stats.behavior
            self._total.advantages += stats.advantages
            self._total.causes += stats.causes
        self.mark(stats.kept, norm)

    def mark(self, kept: Mapping[int, np.ndarray], norm: float) -> None:
        """Row -> [T] bool: tokens in the loss of an update whose gradient had this norm."""
        for i, of_row in kept.items():
            self._applied[i] |= of_row & np.isfinite(norm)

    def metrics(self, *, rate: float, updates: int, entropy_coef: float | None) -> dict[str, float]:
        """``rate``: learning rate of the step. ``updates``: since the start of the run. ``entropy_coef``: of the step,
        if something moves it."""
        total = self._total
        metrics = {"policy/loss": float(np.mean(self.losses)) if self.losses else 0.0, **total.means()}
        metrics["learner/learning_rate"] = rate
        metrics["learner/updates"] = float(updates)
        metrics["learner/forward_tokens"] = float(total.tokens)
        metrics["policy/skipped_updates"] = float(np.sum(~np.isfinite(self.norms)))
        if entropy_coef is not None:
            metrics["policy/entropy_coef"] = entropy_coef
        if self.norms:
            metrics["policy/grad_norm"] = float(np.mean(self.norms))
        if total.behavior:
            proximal, behavior, advantages = map(np.concatenate, (total.proximal, total.behavior, total.advantages))
            causes = np.concatenate(total.causes)
            new = causes != REPLAYED
            metrics |= mismatch(proximal[new], behavior[new])
            metrics |= mismatch_by_cause(proximal[new], behavior[new], causes[new])
            if not new.all():
                metrics["replay/ess"] = effective_sample_size(log_ratios(proximal[~new], behavior[~new]))
            metrics["policy/advantage_logprob_covariance"] = advantage_covariance(proximal, advantages)
        return metrics

    def rows_as_used(self, objective: TokenObjective) -> tuple[Row, ...]:
        """The step's rows with only those tokens trained that an applied update has seen, or that need none."""
        return tuple(as_used(row, tokens, objective) for row, tokens in zip(self._rows, self._applied, strict=True))
