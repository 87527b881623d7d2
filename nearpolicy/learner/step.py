"""The learner's verbs, and the one function that makes a step of them.

    step(batch):  annotate -> revise -> for each pass and minibatch: forward_backward -> optim_step

The loss of an update is the sum over its kept tokens of share x token loss, divided by the update's divisor. Shares
depend on a token's own rollout, the divisor adds up beside the gradient and divides it once, in `optim_step`: how the
update was cut into micro-batches makes no difference.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.packing import Packed, build_trees, microbatches, pack
from nearpolicy.learner.schedule import learning_rate
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.policy import PolicyModel, Scores, Support
from nearpolicy.models.rows import RowContext
from nearpolicy.models.weights import digests, fingerprint, load_weights, named_weights
from nearpolicy.objectives import regularisers
from nearpolicy.objectives.assign import Annotations, assign_advantages, needs_annotations
from nearpolicy.objectives.diagnostics import advantage_covariance, mismatch
from nearpolicy.objectives.objective import Objective, TokenObjective, Tokens
from nearpolicy.objectives.sequences import Sequences
from nearpolicy.records import Batch, Row, StepReport, VersionRecord
from nearpolicy.roles import Weights


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
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> [T] bool: tokens in the sum of the loss; rows without a forward pass are not there."""

    @property
    def loss(self) -> float:
        """Of one update."""
        return self.loss_sum / self.divisor if self.divisor else 0.0

    def means(self) -> dict[str, float]:
        return {name: total / self.tokens for name, total in self.sums.items()} if self.tokens else {}

    def add(self, other: TokenStats) -> None:
        """Sums over tokens; not what belongs to one update alone."""
        self.tokens += other.tokens
        for name, total in other.sums.items():
            self.sums[name] += total


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """What is known of the tokens of rows at the start of a step, one array per row; None where nothing needs it."""

    proximal: Sequence[np.ndarray] | None = None
    """[T] float32 log-probabilities of the policy; 0 where a token is not trained."""
    reference: Sequence[np.ndarray] | None = None
    """[T] float32 log-probabilities of the reference; 0 where a token is not trained."""
    reference_hidden: Sequence[Tensor] | None = None
    """[trained tokens, hidden] states of the reference that predict them."""
    chosen: Sequence[np.ndarray] | None = None
    """[T] bool: tokens picked out of the whole update."""


NOTHING_KNOWN = Annotated()


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
        reference: PolicyModel | None = None,
        seed: int = 0,
        threads: int = 1,
        threads_now: Callable[[], int] | None = None,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        """``reference``: the policy that the objective compares with, or its teacher. ``threads``: the most that one
        operation uses. ``threads_now`` is asked before each micro-batch how many it may use at the moment; with exact
        numerics the bits do not depend on the answer."""
        self._threads_now = threads_now
        self.policy = policy
        self.reference = reference
        self.objective = objective
        self.config = config
        self.version = 0
        self.updates = 0
        self._updates_in = {0: 0}
        """By version of the weights: the updates they contain."""
        self.optimizer = MasterAdamW(policy, config)
        self._divisor = 0.0
        """Of the gradient that has been added up."""
        self._seed = seed
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
        begin, updates_before, rate = time.perf_counter(), self.updates, self.learning_rate
        annotated = self._timed("annotate", self.known_at_start, batch.rows) if self._annotates else NOTHING_KNOWN
        rows = self.revised(batch, annotated)
        total, losses, norms = TokenStats(), [], []
        applied = [np.zeros(len(row.trained), dtype=bool) for row in rows]
        """By row: tokens in the loss of an update that was applied."""
        for iteration in range(self.config.num_iterations):
            for part in _minibatches(batch, rows, self.config.minibatches):
                stats = TokenStats()
                known = self.with_choice(part, rows, annotated)
                if not self._timed("forward_backward", self.forward_backward, part, self.objective, rows, known, stats):
                    continue
                norms.append(self._timed("optim", self.optim_step, rate))
                losses.append(stats.loss)
                total.add(stats)
                if iteration == 0:
                    total.proximal += stats.proximal
                    total.behavior += stats.behavior
                    total.advantages += stats.advantages
                for i, kept in stats.kept.items():
                    applied[i] |= kept & np.isfinite(norms[-1])
        metrics = self._metrics(total, losses, norms, rate)
        metrics |= self._lag(rows, updates_before + max(0, len(norms) - 1))
        self._control_entropy(metrics)
        self.version += 1
        self._updates_in[self.version] = self.updates
        metrics["time/learn_s"] = time.perf_counter() - begin
        used = tuple(_as_used(row, tokens, self.objective) for row, tokens in zip(rows, applied, strict=True))
        return StepReport(version=self.version, updates=self.updates, metrics=metrics, rows=used)

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

    def annotate(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probabilities of the policy as it is now, [T] float32 per row; 0 where the loss does not need them."""
        return self._logprobs(self.policy, rows, _useful(rows, range(len(rows)), self.objective))

    def known_at_start(self, rows: Sequence[Row]) -> Annotated:
        """What the objective needs to know of the rows before the first update of a step."""
        everything = [i for i, row in enumerate(rows) if row.trained.any()]
        needed = everything if self._revises else _useful(rows, range(len(rows)), self.objective)
        proximal = reference = hidden = None
        if self.config.updates_per_step > 1 or self._revises:
            proximal = self._logprobs(self.policy, rows, needed)
        if self.reference is not None:
            reference = self._logprobs(self.reference, rows, needed)
            if self.objective.needs_full_kl:
                hidden = self._hidden(self.reference, rows, needed)
        return Annotated(proximal=proximal, reference=reference, reference_hidden=hidden)

    def forward_backward(
        self,
        wanted: Sequence[int],
        objective: TokenObjective,
        rows: Sequence[Row],
        known: Annotated,
        stats: TokenStats,
    ) -> bool:
        """Add the gradient over the ``wanted`` rows and what it is divided by; False if there was nothing to learn.

        ``known.proximal`` is None in the first update of a step: then the policy is still the proximal one, and its
        own log-probabilities (detached) are used. Rows of one rollout stand together in ``wanted``.
        """
        useful = _useful(rows, wanted, objective)
        self._count_the_others(wanted, useful, objective, rows, stats)
        for packed in self._packed(rows, useful, objective.whole_rollouts):
            scores = self._score(self.policy, rows, packed, objective, known)
            tokens = self._tokens(rows, packed, scores, known)
            found = objective.token_losses(tokens)
            shares = objective.shares(found.kept, tokens.sequences)
            loss = torch.where(found.kept, found.losses * shares, 0.0).sum()
            loss.backward()
            stats.loss_sum += float(loss.detach())
            stats.divisor += objective.divisor(found.kept, tokens.sequences)
            stats.tokens += len(packed.targets)
            for name, values in {"policy/entropy": tokens.entropies.detach(), **found.named}.items():
                stats.sums[name] += float(values.double().sum())
            stats.proximal.append(tokens.proximal_logprobs.cpu().numpy())
            stats.behavior.append(tokens.behavior_logprobs.cpu().numpy())
            stats.advantages.append(tokens.advantages.cpu().numpy())
            kept = found.kept.cpu().numpy()
            for i, here in _targets_by_row(packed):
                stats.kept[i] = np.zeros(len(rows[i].trained), dtype=bool)
                stats.kept[i][packed.position[here]] = kept[here]
        self._divisor += stats.divisor
        return bool(useful) and stats.divisor > 0

    def normalise(self) -> None:
        """Divide the gradient that has been added up by its divisor."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        if self._divisor and gradients:
            torch._foreach_mul_(gradients, 1.0 / self._divisor)
        self._divisor = 0.0

    def forget_gradient(self) -> None:
        """Throw away what has been added up."""
        self.optimizer.zero_grad()
        self._divisor = 0.0

    def optim_step(self, rate: float) -> float:
        """Normalise, clip, update, forget the gradient; returns the norm before clipping. A non-finite gradient is not
        applied."""
        self.normalise()
        norm = self.optimizer.step(rate, self.config.max_grad_norm)
        self.updates += bool(np.isfinite(norm))
        return norm

    def supervised_step(self, rows: Sequence[Row], objective: TokenObjective, rate: float) -> float:
        """One update of maximum likelihood; does not count as a step. Returns the mean loss over tokens, in nats."""
        stats = TokenStats()
        self.forward_backward(range(len(rows)), objective, rows, NOTHING_KNOWN, stats)
        self.normalise()
        norm = self.optimizer.step(rate, self.config.max_grad_norm)
        if not np.isfinite(norm):
            raise NearpolicyError(
                f"the gradient of a supervised step over {len(rows)} rows is not finite (norm {norm}, loss "
                f"{stats.loss}); lower warm_start.learning_rate, or use float32 if the model is narrower"
            )
        return stats.loss

    def restart(self, version: int) -> None:
        """Call the weights of now this version, of unknown history: fresh moments, no update counted."""
        self.optimizer = MasterAdamW(self.policy, self.config)
        self.version, self.updates = version, 0
        self._updates_in = dict.fromkeys(range(version + 1), 0)

    def begin(self) -> None:
        """Take the weights of now for version 0: fresh moments, since those of a warm start belong to another loss."""
        self.optimizer = MasterAdamW(self.policy, self.config)
        if self.reference is not None and self.objective.config.reference == "initial":
            load_weights(self.reference.model, named_weights(self.policy.model))

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
            "entropy_coef": self.objective.entropy_coef,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version, self.updates = state["version"], state["updates"]
        self._updates_in = dict(state["updates_in"])
        self.objective = replace(self.objective, entropy_coef=state["entropy_coef"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def _revises(self) -> bool:
        return needs_annotations(self.objective.config)

    @property
    def _annotates(self) -> bool:
        return self.config.updates_per_step > 1 or self.reference is not None or self._revises

    def revised(self, batch: Batch, annotated: Annotated) -> tuple[Row, ...]:
        """The rows with advantages that depend on log-probabilities."""
        if not self._revises:
            return batch.rows
        there = {row.group for row in batch.rows}
        return assign_advantages(
            [group for group in batch.groups if group.index in there],
            self.objective.config,
            max_completion_length=self.objective.max_completion_length,
            annotations=self._for_advantages(batch.rows, annotated),
        )

    def _for_advantages(self, rows: Sequence[Row], annotated: Annotated) -> Annotations:
        places = _segment_places(rows)

        def keyed(arrays: Sequence[np.ndarray] | None) -> dict[tuple[int, int, int], np.ndarray]:
            return {} if arrays is None else dict(zip(places, arrays, strict=True))

        in_full = self.objective.needs_full_kl
        return Annotations(
            proximal_logprobs=keyed(annotated.proximal),
            reference_logprobs=keyed(annotated.reference),
            reference_kl=keyed(self._full_kl(rows, annotated) if in_full else None),
        )

    def with_choice(self, part: Sequence[int], rows: Sequence[Row], known: Annotated) -> Annotated:
        """Pick tokens out of the whole update, where the loss works on some only."""
        if not self.objective.chooses:
            return known
        now = self._logprobs(self.policy, rows, [i for i in part if rows[i].trained.any()])
        trained = [rows[i].trained for i in part]
        flat = {
            "logprobs": np.concatenate([now[i][rows[i].trained] for i in part] or [np.zeros(0)]),
            "advantages": np.concatenate([rows[i].advantages[rows[i].trained] for i in part] or [np.zeros(0)]),
        }
        key = np.random.Philox(key=[self._seed, (self.version << 20) + self.updates % (1 << 20)])
        flat["chances"] = np.random.Generator(key).random(len(flat["logprobs"]))
        picked = self.objective.choose(**{name: torch.from_numpy(values) for name, values in flat.items()}).numpy()
        chosen = [np.zeros(len(row.trained), dtype=bool) for row in rows]
        ends = np.cumsum([mask.sum() for mask in trained])
        for i, of_row in zip(part, np.split(picked, ends)[:-1], strict=True):
            chosen[i][rows[i].trained] = of_row
        return replace(known, chosen=chosen)

    def _count_the_others(
        self,
        wanted: Sequence[int],
        useful: Sequence[int],
        objective: TokenObjective,
        rows: Sequence[Row],
        stats: TokenStats,
    ) -> None:
        """Rows without a forward pass add 0 to the loss and their tokens to its divisor."""
        others = [i for i in wanted if i not in set(useful) and rows[i].trained.any()]
        if others:
            sequences = _sequences(rows, others, [int(rows[i].trained.sum()) for i in others])
            stats.divisor += objective.divisor(torch.ones_like(sequences.index, dtype=torch.bool), sequences)

    def _packed(self, rows: Sequence[Row], wanted: Sequence[int], whole_rollouts: bool = False) -> Iterator[Packed]:
        budget = self.config.max_tokens_per_microbatch
        trees = build_trees(rows, wanted, budget)
        for together in microbatches(trees, budget, rows if whole_rollouts else None):
            yield pack(rows, together)

    def _tokens(self, rows: Sequence[Row], packed: Packed, scores: Scores, known: Annotated) -> Tokens:
        columns = _columns(rows, packed, known, self.version)
        here = {name: torch.from_numpy(values).to(scores.logprobs.device) for name, values in columns.items()}
        by_row = list(_targets_by_row(packed))
        sequences = _sequences(rows, [i for i, _ in by_row], [part.stop - part.start for _, part in by_row])
        return Tokens(
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            proximal_logprobs=here.get("proximal", scores.logprobs.detach()),
            behavior_logprobs=here["behavior"],
            advantages=here["advantages"],
            sequences=Sequences(sequences.index.to(scores.logprobs.device), sequences.count),
            staleness=here["staleness"],
            reference_logprobs=here.get("reference"),
            reference_kl=scores.reference_kl,
            chosen=here.get("chosen"),
        )

    def _score(
        self,
        model: PolicyModel,
        rows: Sequence[Row],
        packed: Packed,
        objective: TokenObjective | None = None,
        known: Annotated = NOTHING_KNOWN,
    ) -> Scores:
        """[N] scores of the packed targets."""
        if self._threads_now is not None:
            torch.set_num_threads(self._threads_now())
        num_rows = self._numerics.rows(len(packed.input_ids), self._threads)
        num_targets = self._numerics.rows(len(packed.targets), self._threads)
        context = RowContext(packed.nodes, num_rows, model.device)
        hidden = None
        if known.reference_hidden is not None:
            hidden = torch.cat([known.reference_hidden[i] for i, _ in _targets_by_row(packed)])
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, num_targets - len(hidden)))
        scores = model(
            _padded(packed.input_ids, num_rows, model.device),
            context.positions,
            context,
            _padded(packed.predicted_from, num_targets, model.device),
            _padded(packed.targets, num_targets, model.device),
            self._temperature,
            entropy_has_gradient=objective is not None and objective.entropy_has_gradient,
            reference=None if hidden is None else (self.reference, hidden),
            support=_support(rows, packed, num_targets, model.device) if self.objective.same_support else None,
        )
        return scores.first(len(packed.targets))

    @torch.no_grad()
    def _logprobs(self, model: PolicyModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[np.ndarray]:
        """[T] float32 per row, 0 where nothing is wanted."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed in self._packed(rows, wanted):
            values = self._score(model, rows, packed).logprobs.cpu().numpy()
            for i, here in _targets_by_row(packed):
                out[i][packed.position[here]] = values[here]
        return out

    @torch.no_grad()
    def _hidden(self, model: PolicyModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[Tensor]:
        """[trained tokens, hidden] per row: the states that predict its trained tokens."""
        width = model.config.get_text_config().hidden_size
        out = [torch.zeros(int(row.trained.sum()), width, device=model.device) for row in rows]
        for packed in self._packed(rows, wanted):
            num_rows = self._numerics.rows(len(packed.input_ids), self._threads)
            context = RowContext(packed.nodes, num_rows, model.device)
            states = model.hidden(_padded(packed.input_ids, num_rows, model.device), context.positions, context)
            states = states[torch.from_numpy(packed.predicted_from).to(model.device)]
            for i, here in _targets_by_row(packed):
                out[i] = states[here]
        return out

    @torch.no_grad()
    def _full_kl(self, rows: Sequence[Row], annotated: Annotated) -> list[np.ndarray]:
        """[T] KL from the policy to the reference per row."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed in self._packed(rows, [i for i, row in enumerate(rows) if row.trained.any()]):
            values = self._score(self.policy, rows, packed, None, annotated).reference_kl.cpu().numpy()
            for i, here in _targets_by_row(packed):
                out[i][packed.position[here]] = values[here]
        return out

    def _control_entropy(self, metrics: Mapping[str, float]) -> None:
        config = self.objective.config
        if config.entropy_target is not None and "policy/entropy" in metrics:
            coefficient = regularisers.next_entropy_coefficient(
                self.objective.entropy_weight,
                metrics["policy/entropy"],
                target=config.entropy_target,
                step=config.entropy_step,
            )
            self.objective = replace(self.objective, entropy_coef=coefficient)

    def _timed(self, phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        self._emit(phase, seconds=time.perf_counter() - begin, version=self.version)
        return result

    def _metrics(
        self, stats: TokenStats, losses: Sequence[float], norms: Sequence[float], rate: float
    ) -> dict[str, float]:
        metrics = {"policy/loss": float(np.mean(losses)) if losses else 0.0, **stats.means()}
        metrics["learner/learning_rate"] = rate
        metrics["learner/updates"] = float(self.updates)
        metrics["learner/forward_tokens"] = float(stats.tokens)
        metrics["policy/skipped_updates"] = float(np.sum(~np.isfinite(norms)))
        if self.objective.config.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.objective.entropy_weight
        if norms:
            metrics["policy/grad_norm"] = float(np.mean(norms))
        if stats.behavior:
            proximal, behavior, advantages = map(np.concatenate, (stats.proximal, stats.behavior, stats.advantages))
            metrics |= mismatch(proximal, behavior)
            metrics["policy/advantage_logprob_covariance"] = advantage_covariance(proximal, advantages)
        return metrics

    def _lag(self, rows: Sequence[Row], updates: int) -> dict[str, float]:
        """How far the oldest token is behind the weights that the last update, after ``updates`` others, began with."""
        oldest = [int(row.segment.versions[row.trained].min()) for row in rows if row.trained.any()]
        return {"staleness/updates_max": float(updates - self._updates_in[min(oldest)])} if oldest else {}


def _useful(rows: Sequence[Row], wanted: Sequence[int], objective: TokenObjective) -> list[int]:
    """Rows whose tokens can contribute to the loss: whole rollouts, so that none is cut."""
    trained = [i for i in wanted if rows[i].trained.any()]
    if not objective.skips_zero_advantage:
        return trained
    with_signal = {(rows[i].group, rows[i].sample) for i in trained if rows[i].advantages.any()}
    return [i for i in trained if (rows[i].group, rows[i].sample) in with_signal]


def _as_used(row: Row, applied: np.ndarray, objective: TokenObjective) -> Row:
    """The row with only those tokens trained that an applied update has seen, or that need none."""
    skipped = objective.skips_zero_advantage and not row.advantages.any()
    if skipped or np.array_equal(applied, row.trained):
        return row
    return replace(row, trained=applied, advantages=np.where(applied, row.advantages, 0.0))


def _minibatches(batch: Batch, rows: Sequence[Row], count: int) -> list[list[int]]:
    """Row indices of ``count`` equal parts of the step's places, in order."""
    by_place = {group.index: place for place, group in enumerate(batch.groups)}
    per_part = batch.places / count
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, row in enumerate(rows):
        parts[int(by_place[row.group] / per_part)].append(i)
    return parts


def _sequences(rows: Sequence[Row], which: Sequence[int], lengths: Sequence[int]) -> Sequences:
    """Tokens by rollout, for rows with so many tokens each."""
    numbers: dict[tuple[int, int], int] = {}
    index = [numbers.setdefault((rows[i].group, rows[i].sample), len(numbers)) for i in which]
    repeated = np.repeat(np.array(index, dtype=np.int64), lengths)
    return Sequences(torch.from_numpy(repeated), len(numbers))


def _segment_places(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """(group, sample, place of the segment) of each row."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    places = []
    for row in rows:
        key = (row.group, row.sample)
        places.append((*key, counts[key]))
        counts[key] += 1
    return places


def _columns(rows: Sequence[Row], packed: Packed, known: Annotated, version: int) -> dict[str, np.ndarray]:
    """Per-token inputs of the loss, [N] each, in the order of the packed targets."""
    given = {"proximal": known.proximal, "reference": known.reference, "chosen": known.chosen}
    given = {name: arrays for name, arrays in given.items() if arrays is not None}
    columns = {
        name: np.empty(len(packed.targets), dtype=bool if name == "chosen" else np.float32)
        for name in ("behavior", "advantages", "staleness", *given)
    }
    for i, here in _targets_by_row(packed):
        positions = packed.position[here]
        columns["behavior"][here] = rows[i].segment.behavior_logprobs[positions]
        columns["advantages"][here] = rows[i].advantages[positions]
        columns["staleness"][here] = version - rows[i].segment.versions[positions]
        for name, arrays in given.items():
            columns[name][here] = arrays[i][positions]
        for name, values in columns.items():
            if not np.isfinite(values[here]).all():
                bad = int(positions[~np.isfinite(values[here])][0])
                raise NearpolicyError(
                    f"group {rows[i].group}, sample {rows[i].sample}, token {bad}: its {_NAMES.get(name, name)} is "
                    f"{values[here][~np.isfinite(values[here])][0]}; nothing is trained on such a batch. Find where it "
                    "was made (nearpolicy inspect --group), or leave the group out"
                )
    return columns


_NAMES = {"behavior": "behavior_logprobs", "proximal": "proximal_logprobs", "reference": "reference_logprobs"}


def _support(rows: Sequence[Row], packed: Packed, length: int, device: torch.device) -> Support:
    """Of the packed targets, from what the engine recorded; the last one's for the padding behind."""
    sizes, ids = [], []
    for i, here in _targets_by_row(packed):
        extras = rows[i].segment.extras
        if "support_sizes" not in extras:
            raise NearpolicyError(
                f"group {rows[i].group}, sample {rows[i].sample} has no recorded support, which "
                "objective.same_support needs; sample with record_support, or set objective.same_support: false"
            )
        of_row = np.split(extras["support_ids"], np.cumsum(extras["support_sizes"])[:-1])
        for position in packed.position[here]:
            sizes.append(len(of_row[position]))
            ids.append(of_row[position])
    padding = length - len(sizes)
    sizes, ids = sizes + sizes[-1:] * padding, ids + ids[-1:] * padding
    flat = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device)
    return Support(torch.tensor(sizes, dtype=torch.int64, device=device), flat)


def _padded(array: np.ndarray, length: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.pad(array, (0, length - len(array)), mode="edge")).to(device)


def _targets_by_row(packed: Packed) -> Iterator[tuple[int, slice]]:
    """(index of the batch's row, where its targets stand); those of one row stand together. A loop over tokens would
    hold the interpreter's lock against the engine's thread."""
    starts = np.flatnonzero(np.diff(packed.row_index, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(packed.row_index)], strict=True):
        yield int(packed.row_index[start]), slice(start, end)
