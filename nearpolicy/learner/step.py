"""The learner's verbs, and the one function that makes a step of them.

    step(batch):  annotate -> revise -> for each pass and minibatch: forward_backward -> optim_step

The loss of an update is the sum over its kept tokens of share x token loss, divided by the update's divisor. Shares
depend on a token's own rollout, the divisor adds up beside the gradient and divides it once, in `optim_step`: how the
update was cut into micro-batches makes no difference.

    selection  which rows of a step do what          passes  rows through a model, in micro-batches
    tokens     what a loss sees of a micro-batch     report  what is counted and said of a step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import ModelError, NearpolicyError
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.passes import Passes
from nearpolicy.learner.report import StepTally, TokenStats
from nearpolicy.learner.schedule import learning_rate
from nearpolicy.learner.selection import minibatches, segment_places, trained_rows, useful_rows
from nearpolicy.learner.tokens import NOTHING_KNOWN, Annotated, sequences_of, tokens_of
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.weights import digests, fingerprint, load_weights
from nearpolicy.objectives import regularisers
from nearpolicy.objectives.assign import Annotations, assign_advantages, needs_annotations
from nearpolicy.objectives.objective import Objective, TokenObjective
from nearpolicy.records import Batch, Row, StepReport, VersionRecord
from nearpolicy.roles import Weights


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
        self.policy = policy
        self.reference = reference
        self.objective = objective
        self.config = config
        self.version = 0
        self.updates = 0
        self._updates_in = {0: 0}
        """By version of the weights: the updates they contain."""
        self.optimizer = MasterAdamW(policy, config)
        self.passes = Passes(
            numerics,
            budget=config.max_tokens_per_microbatch,
            temperature=temperature,
            threads=threads,
            threads_now=threads_now,
        )
        self._seed = seed
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
        tally = StepTally(rows)
        for iteration in range(self.config.num_iterations):
            for part in minibatches(batch, rows, self.config.minibatches):
                stats = TokenStats()
                known = self.with_choice(part, rows, annotated)
                if self._timed("forward_backward", self.forward_backward, part, self.objective, rows, known, stats):
                    tally.add(stats, self._timed("optim", self.optim_step, rate), first_pass=iteration == 0)
                else:
                    self.forget_gradient()  # and the divisor, which would weigh on the next update
        moved = self.objective.config.entropy_target is not None
        entropy_coef = self.objective.entropy_weight if moved else None
        metrics = tally.metrics(rate=rate, updates=self.updates, entropy_coef=entropy_coef)
        metrics |= self._lag(rows, updates_before + max(0, len(tally.norms) - 1))
        self._control_entropy(metrics)
        self.version += 1
        self._updates_in[self.version] = self.updates
        metrics["time/learn_s"] = time.perf_counter() - begin
        used = tally.rows_as_used(self.objective)
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
        return self._logprobs(self.policy, rows, useful_rows(rows, range(len(rows)), self.objective))

    def known_at_start(self, rows: Sequence[Row]) -> Annotated:
        """What the objective needs to know of the rows before the first update of a step."""
        needed = trained_rows(rows) if self._revises else useful_rows(rows, range(len(rows)), self.objective)
        proximal = reference = hidden = None
        if self.config.updates_per_step > 1 or self._revises:
            proximal = self._logprobs(self.policy, rows, needed)
        if self.reference is not None:
            reference = self._logprobs(self.reference, rows, needed)
            if self.objective.needs_full_kl:
                hidden = self.passes.hidden(self.reference, rows, needed)
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
        useful = useful_rows(rows, wanted, objective)
        self._count_the_others(wanted, useful, objective, rows, stats)
        for packed in self.passes.packed(rows, useful, objective.whole_rollouts):
            scores = self.passes.score(
                self.policy,
                rows,
                packed,
                same_support=objective.same_support,
                entropy_has_gradient=objective.entropy_has_gradient,
                reference=self._reference_states(known),
            )
            tokens = tokens_of(rows, packed, scores, known, self.version)
            found = objective.token_losses(tokens)
            shares = objective.shares(found.kept, tokens.sequences)
            loss = torch.where(found.kept, found.losses * shares, 0.0).sum()
            loss.backward()
            stats.count(rows, packed, tokens, found)
            stats.loss_sum += float(loss.detach())
            stats.divisor += objective.divisor(found.kept, tokens.sequences)
        self.optimizer.divisor += stats.divisor
        return bool(useful) and stats.divisor > 0

    def normalise(self) -> None:
        """Divide the gradient that has been added up by its divisor."""
        self.optimizer.normalise()

    def forget_gradient(self) -> None:
        """Throw away what has been added up."""
        self.optimizer.zero_grad()

    def optim_step(self, rate: float) -> float:
        """Normalise, clip, update, forget the gradient; returns the norm before clipping. A non-finite gradient is not
        applied."""
        norm = self.optimizer.step(rate, self.config.max_grad_norm)
        self.updates += bool(np.isfinite(norm))
        return norm

    def supervised_step(self, rows: Sequence[Row], objective: TokenObjective, rate: float) -> float:
        """One update of maximum likelihood; does not count as a step. Returns the mean loss over tokens, in nats."""
        stats = TokenStats()
        self.forward_backward(range(len(rows)), objective, rows, NOTHING_KNOWN, stats)
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
        self.settle_reference()

    def settle_reference(self) -> None:
        """If the reference is a copy of the initial policy: the weights of now are the initial ones."""
        own = self.reference is not None and self.reference.model is not self.policy.model
        if own and self.objective.config.reference == "initial":
            load_weights(self.reference.model, self.policy.weights())

    def weights(self, parent: int | None) -> Weights:
        """What there is to publish; the tensors are the live ones, so publish before the next step."""
        tensors = self.policy.weights()
        parts = digests(tensors)
        record = VersionRecord(
            lineage=0, version=self.version, updates=self.updates, fingerprint=fingerprint(parts), parent=parent
        )
        return Weights(record=record, tensors=tensors, digests=parts, adapter=self.policy.adapter())

    def state(self) -> dict[str, Any]:
        """Everything beside the weights that the next step depends on; with an adapter that is what there is of them,
        since saved weights contain it and cannot be taken apart."""
        adapter = None
        if isinstance(self.policy, LoraPolicy):
            adapter = {"base": self.policy.base_fingerprint, "factors": self.policy.factors()}
        return {
            "adapter": adapter,
            "version": self.version,
            "updates": self.updates,
            "updates_in": dict(self._updates_in),
            "entropy_coef": self.objective.entropy_coef,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._load_adapter(state.get("adapter"))
        self.version, self.updates = state["version"], state["updates"]
        self._updates_in = dict(state["updates_in"])
        self.objective = replace(self.objective, entropy_coef=state["entropy_coef"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _load_adapter(self, saved: Mapping[str, Any] | None) -> None:
        """`ModelError` unless what was saved belongs to this policy: an adapter on a base that has one in it already
        would count twice."""
        adapted = isinstance(self.policy, LoraPolicy)
        if adapted != (saved is not None):
            raise ModelError(
                f"the training state is of a run {'without' if adapted else 'with'} an adapter, and this learner has "
                f"{'one' if adapted else 'none'}; set learner.lora as that run had it"
            )
        if not adapted:
            return
        if (found := self.policy.base_fingerprint) != saved["base"]:
            raise ModelError(
                f"the adapter of the training state changes weights with the fingerprint {saved['base']}, and this "
                f"learner holds {found}; load the model that the run began with (the weights of a checkpoint contain "
                "the adapter already, and it would count twice)"
            )
        self.policy.load_factors(saved["factors"])

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
        places = segment_places(rows)

        def keyed(arrays: Sequence[np.ndarray] | None) -> dict[tuple[int, int, int], np.ndarray]:
            return {} if arrays is None else dict(zip(places, arrays, strict=True))

        full_kl = None
        if self.objective.needs_full_kl:
            states, support = self._reference_states(annotated), self.objective.same_support
            full_kl = self.passes.full_kl(self.policy, rows, trained_rows(rows), states, same_support=support)
        return Annotations(
            proximal_logprobs=keyed(annotated.proximal),
            reference_logprobs=keyed(annotated.reference),
            reference_kl=keyed(full_kl),
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
            sequences = sequences_of(rows, others, [int(rows[i].trained.sum()) for i in others])
            stats.divisor += objective.divisor(torch.ones_like(sequences.index, dtype=torch.bool), sequences)

    def _logprobs(self, model: PolicyModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[np.ndarray]:
        return self.passes.logprobs(model, rows, wanted, same_support=self.objective.same_support)

    def _reference_states(self, known: Annotated) -> tuple[PolicyModel, Sequence[torch.Tensor]] | None:
        """The reference and its hidden states by row, where the whole distribution is compared."""
        return None if known.reference_hidden is None else (self.reference, known.reference_hidden)

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

    def _lag(self, rows: Sequence[Row], updates: int) -> dict[str, float]:
        """How far the oldest token is behind the weights that the last update, after ``updates`` others, began with."""
        oldest = [int(row.segment.versions[row.trained].min()) for row in rows if row.trained.any()]
        return {"staleness/updates_max": float(updates - self._updates_in[min(oldest)])} if oldest else {}
