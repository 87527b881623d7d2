"""The critic in training: what it says of a step's tokens, its gradient, its updates, its state.

    annotate -> values before each trained token -> advantages, targets (`assign`) -> forward_backward -> optim_step

Its loss is aggregated as the policy's is: share x token loss over all trained tokens, divided by the update's divisor.
Every trained token counts, those of rollouts without advantage and those that a correction rejects too: the critic
learns what to expect, and they tell it as well as any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import NearpolicyError, UserError
from nearpolicy.learner.config import CriticConfig, LearnerConfig
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.packing import Packed, pack, targets_by_row
from nearpolicy.learner.passes import Passes
from nearpolicy.learner.ranks import Together
from nearpolicy.learner.schedule import learning_rate
from nearpolicy.learner.selection import trained_rows
from nearpolicy.learner.tokens import Annotated, packed_sequences
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.value import ValueModel
from nearpolicy.models.weights import load_weights, named_weights
from nearpolicy.objectives.diagnostics import explained_variance
from nearpolicy.objectives.losses import clipped_value_loss
from nearpolicy.objectives.objective import TokenObjective
from nearpolicy.records import Row


class Critic:
    """Holds the value model. The learner's thread calls it."""

    def __init__(
        self, model: ValueModel, config: CriticConfig, learner: LearnerConfig, passes: Passes, ranks: Together
    ) -> None:
        """``learner``: optimizer, schedule and micro-batches, but for the peak rate."""
        self.model = model
        self._ranks = ranks
        self._sharding = ranks.shard(model, replicas=learner.replicas, offload=learner.offload == "parameters")
        self.config = config
        self.optimizer = MasterAdamW(model, learner)
        self._learner = learner
        self._passes = passes
        if learner.activation_checkpointing:
            model.decoder.activation_checkpointing_enable({"use_reentrant": False})
            model.decoder.train()  # as the policy's: checkpointing acts in training mode only; every dropout is 0

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Rate of step ``step``, from 0."""
        return learning_rate(
            step,
            peak=self.config.learning_rate or self._learner.learning_rate,
            schedule=self._learner.lr_schedule,
            warmup_steps=self._learner.warmup_steps,
            total_steps=total_steps,
        )

    def annotate(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """[T] float32 values before each trained token per row; 0 elsewhere."""
        values = self._passes.values(self.model, rows, trained_rows(rows))
        with self._ranks.agreement("values"):
            for row, of_row in zip(rows, values, strict=True):
                _require_finite(row, of_row)
        return values

    def forward_backward(
        self,
        wanted: Sequence[int],
        objective: TokenObjective,
        rows: Sequence[Row],
        known: Annotated,
        stats: ValueStats,
    ) -> bool:
        """Add the gradient over the ``wanted`` rows and what it is divided by; False if none has a trained token.

        ``known``: values at the start of the step, and targets. ``objective``: by what rule tokens are aggregated.
        Rows of one rollout stand together in ``wanted``.
        """
        trained = [i for i in wanted if rows[i].trained.any()]
        parts: list[tuple[int, ValueStats]] = []
        shares = self._passes.shares(rows, trained, objective.whole_rollouts)
        for place, share in enumerate(shares, start=1):
            self._sharding.begin(last=place == len(shares))
            packed, part = pack(rows, share.trees), ValueStats()
            loss = self._loss(packed, objective, rows, known, part) * (1.0 if share.counts else 0.0)
            loss.backward()
            parts += [(share.number, part)] if share.counts else []
        self._sharding.settle()
        everything = [part for of_rank in self._ranks.exchange("the critic's counts", parts) for part in of_rank]
        for _, part in sorted(everything, key=lambda numbered: numbered[0]):
            stats.include(part)
            self.optimizer.divisor += part.divisor
        return bool(trained)

    def _loss(
        self, packed: Packed, objective: TokenObjective, rows: Sequence[Row], known: Annotated, stats: ValueStats
    ) -> torch.Tensor:
        """Of one micro-batch, before it is divided; counted in ``stats``."""
        values = self._passes.value(self.model, packed)
        before, targets = (
            torch.from_numpy(_column(packed, arrays)).to(values.device) for arrays in (known.values, known.targets)
        )
        sequences = packed_sequences(rows, packed, values.device)
        kept = torch.ones_like(values, dtype=torch.bool)
        losses = clipped_value_loss(values, before, targets, clip=self.config.clip)
        loss = (losses * objective.shares(kept, sequences)).sum()
        stats.loss_sum += float(loss.detach())
        stats.divisor += objective.divisor(kept, sequences)
        stats.tokens += len(packed.targets)
        stats.clipped += self._num_clipped(values.detach(), before, targets)
        stats.rows |= {i: rows[i].trained for i, _ in targets_by_row(packed)}
        return loss

    def _num_clipped(self, values: torch.Tensor, before: torch.Tensor, targets: torch.Tensor) -> int:
        """Tokens without a gradient: beyond the range, and nearer to their targets than its end is."""
        clip = self.config.clip
        if clip is None:
            return 0
        moved = values - before
        end = before + moved.clamp(-clip, clip)
        return int(((moved.abs() > clip) & ((end - targets).abs() > (values - targets).abs())).sum())

    def optim_step(self, rate: float) -> float:
        """Normalise, clip, update, forget the gradient; returns the norm before clipping. A non-finite gradient is not
        applied."""
        return self.optimizer.step(rate, self._learner.max_grad_norm)

    def restart(self) -> None:
        """Fresh moments."""
        self.optimizer = MasterAdamW(self.model, self._learner)

    def begin(self, policy: PolicyModel) -> None:
        """Start from the policy of now, as version 0 does after a warm start, unless the critic is another model."""
        self.restart()
        if self.config.path is None:
            decoder = policy.model.get_decoder()
            inside = next(name for name, module in policy.model.named_modules() if module is decoder) + "."
            own = {name.removeprefix(inside): t for name, t in policy.weights().items() if name.startswith(inside)}
            load_weights(self.model.decoder, own)

    def state(self) -> dict[str, Any]:
        """Weights and optimizer: no other file of a checkpoint holds anything of the critic."""
        return {"weights": named_weights(self.model), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        load_weights(self.model, state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])


def _require_finite(row: Row, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NearpolicyError(
            f"group {row.group}, sample {row.sample}, token {bad}: the critic's value is {values[bad]}; nothing is "
            "trained on such a batch. Lower critic.learning_rate"
        )


def require_same(critic: Critic | None, state: dict[str, Any] | None) -> None:
    """A saved learner and this one both have a critic, or neither has."""
    if (critic is None) != (state is None):
        raise UserError(
            "the checkpoint holds a critic and the recipe has none; set objective.advantage=gae, as the run had it"
            if critic is None
            else "the recipe has a critic and the checkpoint holds none; go on with the objective that the run had, or "
            "start from the checkpoint's weights (model.path) with a new critic"
        )


@dataclass(slots=True)
class ValueStats:
    """Sums over the tokens of one update of the critic."""

    loss_sum: float = 0.0
    divisor: float = 0.0
    tokens: int = 0
    clipped: int = 0
    """Tokens without a gradient, because their value has moved far enough."""
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> [T] bool: tokens in the loss."""

    def include(self, part: ValueStats) -> None:
        """What another part of the same update has counted."""
        self.loss_sum += part.loss_sum
        self.divisor += part.divisor
        self.tokens += part.tokens
        self.clipped += part.clipped
        self.rows |= part.rows


class ValueTally:
    """What the critic's updates of one step add up to."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self._losses: list[float] = []
        self._tokens = self._clipped = 0

    def add(self, stats: ValueStats, norm: float) -> None:
        self.norms.append(norm)
        self._losses.append(stats.loss_sum / stats.divisor)
        self._tokens += stats.tokens
        self._clipped += stats.clipped

    def metrics(self, rows: Sequence[Row], known: Annotated, *, clip: float | None, rate: float) -> dict[str, float]:
        """Of the updates, and of the values at the start of the step. ``clip``: the critic's range."""
        metrics = {"critic/learning_rate": rate, "critic/skipped_updates": float(np.sum(~np.isfinite(self.norms)))}
        if not self.norms:
            return metrics
        metrics["critic/loss"] = float(np.mean(self._losses))
        metrics["critic/grad_norm"] = float(np.mean(self.norms))
        if clip is not None:
            metrics["critic/clip_share"] = self._clipped / self._tokens
        values, targets = (
            np.concatenate([of_row[row.trained] for row, of_row in zip(rows, arrays, strict=True)]).astype(np.float64)
            for arrays in (known.values, known.targets)
        )
        metrics["critic/value_mean"] = float(values.mean())
        metrics["critic/target_mean"] = float(targets.mean())
        explained = explained_variance(values, targets)
        return metrics if explained is None else metrics | {"critic/explained_variance": explained}


def _column(packed: Packed, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """[N] float32 of the packed targets, from [T] per row."""
    column = np.empty(len(packed.targets), dtype=np.float32)
    for i, here in targets_by_row(packed):
        column[here] = arrays[i][packed.position[here]]
    return column
