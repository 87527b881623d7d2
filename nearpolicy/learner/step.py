"""The learner's verbs, and the one function that makes a step of them.

    step(batch):  annotate -> for each pass and minibatch: forward_backward -> optim_step

The loss of an update is a sum over its trained tokens of share x token loss, with shares known before the cut into
micro-batches. Gradients add up in place; nothing is divided afterwards.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.packing import Packed, build_trees, microbatches, pack
from nearpolicy.learner.schedule import learning_rate
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.rows import RowContext
from nearpolicy.models.weights import digests, fingerprint, named_weights
from nearpolicy.objectives.diagnostics import mismatch
from nearpolicy.objectives.objective import Objective
from nearpolicy.records import Batch, Row, StepReport, VersionRecord
from nearpolicy.roles import Weights


class TokenObjective(Protocol):
    """What `forward_backward` needs of an objective."""

    skips_zero_advantage: bool

    def shares(self, trained_tokens: Sequence[int]) -> np.ndarray: ...

    def token_losses(
        self, logprobs: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(slots=True)
class TokenStats:
    """Sums over trained tokens of one or more updates; a logged mean is a mean over tokens, as its name says."""

    loss: float = 0.0
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    proximal: list[np.ndarray] = field(default_factory=list)
    behavior: list[np.ndarray] = field(default_factory=list)

    def means(self) -> dict[str, float]:
        return {name: total / self.tokens for name, total in self.sums.items()} if self.tokens else {}


class PolicyLearner:
    """Holds the weights that change. One thread calls it."""

    def __init__(
        self,
        policy: PolicyModel,
        objective: Objective,
        config: LearnerConfig,
        numerics: Numerics,
        *,
        temperature: float,
        total_steps: int,
        threads: int = 1,
        threads_now: Callable[[], int] | None = None,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        """``threads``: the most that one operation uses. ``threads_now`` is asked before each micro-batch how many it
        may use at the moment; with exact numerics the bits do not depend on the answer."""
        self._threads_now = threads_now
        self.policy = policy
        self.objective = objective
        self.config = config
        self.version = 0
        self.updates = 0
        self._updates_in = {0: 0}
        """By version of the weights: the updates they contain."""
        self.optimizer = MasterAdamW(policy, config)
        self._numerics = numerics
        self._threads = threads
        self._temperature = temperature
        self._total_steps = total_steps
        self._emit = on_event or (lambda *_, **__: None)
        if config.activation_checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})
            policy.model.train()  # checkpointing acts in training mode only; every dropout is 0

    def step(self, batch: Batch) -> StepReport:
        """Consume one batch: ``num_iterations`` passes of ``minibatches`` updates. An empty batch makes no update."""
        stats, begin = TokenStats(), time.perf_counter()
        updates_before = self.updates
        proximal = self._timed("annotate", self.annotate, batch.rows) if self.config.updates_per_step > 1 else None
        rate = self.learning_rate
        norms: list[float] = []
        groups: dict[bool, set[int]] = {True: set(), False: set()}
        """By whether an update with them was applied."""
        for _ in range(self.config.num_iterations):
            for part in _minibatches(batch, self.config.minibatches):
                data = (part, self.objective, batch.rows, proximal, stats)
                if not self._timed("forward_backward", self.forward_backward, *data):
                    continue
                norm = self._timed("optim", self.optim_step, rate)
                norms.append(norm)
                groups[bool(np.isfinite(norm))].update(batch.rows[i].group for i in part)
        metrics = self._metrics(batch, stats, norms, rate)
        metrics |= self._lag(batch, updates_before + max(0, len(norms) - 1))
        self.version += 1
        self._updates_in[self.version] = self.updates
        metrics["policy/skipped_updates"] = float(np.sum(~np.isfinite(norms)))
        metrics["time/learn_s"] = time.perf_counter() - begin
        untrained = frozenset(groups[False] - groups[True])
        return StepReport(version=self.version, updates=self.updates, metrics=metrics, untrained=untrained)

    @property
    def learning_rate(self) -> float:
        """Rate of the step that comes next."""
        config = self.config
        return learning_rate(
            self.version,
            peak=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self._total_steps,
        )

    @torch.no_grad()
    def annotate(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probabilities of the policy as it is now, [T] float32 per row; 0 where the loss does not need them."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed in self._packed(rows, _useful(rows, range(len(rows)), self.objective)):
            logprobs, _ = self._score(packed)
            values = logprobs.cpu().numpy()
            for i, here in _targets_by_row(packed):
                out[i][packed.position[here]] = values[here]
        return out

    def forward_backward(
        self,
        wanted: Sequence[int],
        objective: TokenObjective,
        rows: Sequence[Row],
        proximal: Sequence[np.ndarray] | None,
        stats: TokenStats,
    ) -> bool:
        """Add the gradient of one update over the ``wanted`` rows; False if there was nothing to learn from.

        ``proximal`` [T] per row, or None where this is the first update of a step: then the policy is still the
        proximal one, and its own log-probabilities (detached) are used.
        """
        shares = dict(zip(wanted, objective.shares([int(rows[i].trained.sum()) for i in wanted]), strict=True))
        useful = _useful(rows, wanted, objective)
        for packed in self._packed(rows, useful):
            logprobs, entropies = self._score(packed)
            columns = _columns(rows, packed, proximal, shares)
            here = {name: torch.from_numpy(values).to(logprobs.device) for name, values in columns.items()}
            base = logprobs.detach() if proximal is None else here["proximal"]
            losses, named = objective.token_losses(logprobs, base, here["behavior"], here["advantages"])
            loss = (losses * here["shares"]).sum()
            loss.backward()
            stats.loss += float(loss.detach())
            stats.tokens += len(packed.targets)
            for name, values in {"policy/entropy": entropies, **named}.items():
                stats.sums[name] += float(values.double().sum())
            stats.proximal.append(base.cpu().numpy())
            stats.behavior.append(columns["behavior"])
        return bool(useful)

    def optim_step(self, rate: float) -> float:
        """Clip, update, forget the gradient; returns the norm before clipping. A non-finite gradient is not applied."""
        norm = self.optimizer.step(rate, self.config.max_grad_norm)
        self.updates += bool(np.isfinite(norm))
        return norm

    def supervised_step(self, rows: Sequence[Row], objective: TokenObjective, rate: float) -> float:
        """One update of maximum likelihood; does not count as a step. Returns the mean loss over tokens, in nats."""
        stats = TokenStats()
        self.forward_backward(range(len(rows)), objective, rows, None, stats)
        norm = self.optimizer.step(rate, self.config.max_grad_norm)
        if not np.isfinite(norm):
            raise NearpolicyError(
                f"the gradient of a supervised step over {len(rows)} rows is not finite (norm {norm}, loss "
                f"{stats.loss}); lower warm_start.learning_rate, or use float32 if the model is narrower"
            )
        return stats.loss

    def forget_optimizer(self) -> None:
        """Begin version 0 with fresh moments: those of a warm start belong to another loss."""
        self.optimizer = MasterAdamW(self.policy, self.config)

    def weights(self, parent: int | None) -> Weights:
        """What there is to publish; the tensors are the live ones, so publish before the next step."""
        tensors = named_weights(self.policy.model)
        parts = digests(tensors)
        record = VersionRecord(
            lineage=0, version=self.version, updates=self.updates, fingerprint=fingerprint(parts), parent=parent
        )
        return Weights(record=record, tensors=tensors, digests=parts)

    def state(self) -> dict[str, Any]:
        """Everything beside the weights that the next step depends on."""
        return {
            "version": self.version,
            "updates": self.updates,
            "updates_in": dict(self._updates_in),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version, self.updates = state["version"], state["updates"]
        self._updates_in = dict(state["updates_in"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _packed(self, rows: Sequence[Row], wanted: Sequence[int]) -> Iterator[Packed]:
        budget = self.config.max_tokens_per_microbatch
        for trees in microbatches(build_trees(rows, wanted, budget), budget):
            yield pack(rows, trees)

    def _score(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """[N] log-probabilities (with gradient) and entropies of the packed targets."""
        if self._threads_now is not None:
            torch.set_num_threads(self._threads_now())
        num_rows = self._numerics.rows(len(packed.input_ids), self._threads)
        num_targets = self._numerics.rows(len(packed.targets), self._threads)
        device = self.policy.device
        context = RowContext(packed.nodes, num_rows, device)

        def padded(array: np.ndarray, length: int) -> Tensor:
            return torch.from_numpy(np.pad(array, (0, length - len(array)), mode="edge")).to(device)

        logprobs, entropies = self.policy(
            padded(packed.input_ids, num_rows),
            context.positions,
            context,
            padded(packed.predicted_from, num_targets),
            padded(packed.targets, num_targets),
            self._temperature,
        )
        return logprobs[: len(packed.targets)], entropies[: len(packed.targets)]

    def _timed(self, phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        self._emit(phase, seconds=time.perf_counter() - begin, version=self.version)
        return result

    def _metrics(self, batch: Batch, stats: TokenStats, norms: list[float], rate: float) -> dict[str, float]:
        metrics = {"policy/loss": stats.loss / max(1, len(norms)), **stats.means()}
        metrics["learner/learning_rate"] = rate
        metrics["learner/updates"] = float(self.updates)
        metrics["learner/forward_tokens"] = float(stats.tokens)
        if norms:
            metrics["policy/grad_norm"] = float(np.mean(norms))
        if stats.behavior:
            first_pass = len(stats.behavior) // self.config.num_iterations
            proximal, behavior = (np.concatenate(parts[:first_pass]) for parts in (stats.proximal, stats.behavior))
            metrics |= mismatch(proximal, behavior)
        return metrics

    def _lag(self, batch: Batch, updates: int) -> dict[str, float]:
        """How far the oldest token is behind the weights that the last update, after ``updates`` others, began with."""
        oldest = [int(r.segment.versions[r.trained].min()) for r in batch.rows if r.trained.any()]
        return {"staleness/updates_max": float(updates - self._updates_in[min(oldest)])} if oldest else {}


def _useful(rows: Sequence[Row], wanted: Sequence[int], objective: TokenObjective) -> list[int]:
    """Rows whose tokens can contribute to the loss."""
    if objective.skips_zero_advantage:
        return [i for i in wanted if rows[i].advantages.any()]
    return [i for i in wanted if rows[i].trained.any()]


def _minibatches(batch: Batch, count: int) -> list[list[int]]:
    """Row indices of ``count`` equal parts of the step's places, in order."""
    by_place = {group.index: place for place, group in enumerate(batch.groups)}
    per_part = batch.places / count
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, row in enumerate(batch.rows):
        parts[int(by_place[row.group] / per_part)].append(i)
    return parts


def _columns(
    rows: Sequence[Row], packed: Packed, proximal: Sequence[np.ndarray] | None, shares: Mapping[int, float]
) -> dict[str, np.ndarray]:
    """Per-token inputs of the loss, [N] float32 each, in the order of the packed targets."""
    names = ("behavior", "advantages", "shares", *(["proximal"] if proximal is not None else []))
    columns = {name: np.empty(len(packed.targets), dtype=np.float32) for name in names}
    for i, here in _targets_by_row(packed):
        positions = packed.position[here]
        columns["behavior"][here] = rows[i].segment.behavior_logprobs[positions]
        columns["advantages"][here] = rows[i].advantages[positions]
        columns["shares"][here] = shares[i]
        if proximal is not None:
            columns["proximal"][here] = proximal[i][positions]
    return columns


def _targets_by_row(packed: Packed) -> Iterator[tuple[int, slice]]:
    """(index of the batch's row, where its targets stand); those of one row stand together. A loop over tokens would
    hold the interpreter's lock against the engine's thread."""
    starts = np.flatnonzero(np.diff(packed.row_index, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(packed.row_index)], strict=True):
        yield int(packed.row_index[start]), slice(start, end)
