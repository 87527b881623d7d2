"""The learner's verbs, and the one function that makes a step of them.

    step(batch):  annotate -> revise -> for each pass and minibatch: forward_backward -> optim_step (and the critic's)

The loss of an update is the sum over its kept tokens of share x token loss, divided by the update's divisor. Shares
depend on a token's own rollout, the divisor adds up beside the gradient and divides it once, in `optim_step`: how the
update was cut into micro-batches makes no difference. Nor does it by whom they were computed: several processes
(`ranks`) make the same calls with the same rows, each computes its share, and all of them count the same.

    selection  which rows of a step do what          passes    rows through a model, in micro-batches
    tokens     what a loss sees of a micro-batch     report    what is counted and said of a step
    critic     the value model, where there is one   sharding  weights and gradients that ranks hold in pieces
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import ModelError, NearpolicyError
from nearpolicy.learner.config import CriticConfig, LearnerConfig
from nearpolicy.learner.critic import Critic, ValueStats, ValueTally, require_same
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.packing import Packed, Share, pack
from nearpolicy.learner.passes import Passes
from nearpolicy.learner.ranks import ALONE, Together
from nearpolicy.learner.report import StepTally, TokenStats
from nearpolicy.learner.schedule import learning_rate
from nearpolicy.learner.selection import minibatches, segment_places, trained_rows, useful_rows
from nearpolicy.learner.sharding import at_rest
from nearpolicy.learner.tokens import NOTHING_KNOWN, Annotated, require_finite, sequences_of, tokens_of
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.policy import PolicyModel, Scores
from nearpolicy.models.value import ValueModel
from nearpolicy.models.weights import digest, digests, fingerprint, load_weights
from nearpolicy.objectives import regularisers
from nearpolicy.objectives.assign import (
    Annotations,
    assign_advantages,
    needs_annotations,
    needs_logprobs,
    value_targets,
)
from nearpolicy.objectives.objective import Objective, TokenObjective
from nearpolicy.records import Batch, Group, Row, StepReport, VersionRecord
from nearpolicy.roles import Shard, Weights


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
        value_model: ValueModel | None = None,
        critic: CriticConfig | None = None,
        seed: int = 0,
        threads: int = 1,
        threads_now: Callable[[], int] | None = None,
        on_event: Callable[..., None] | None = None,
        ranks: Together | None = None,
    ) -> None:
        """``reference``: the policy that the objective compares with, or its teacher. ``value_model``: makes the
        learner hold a critic, trained as ``critic`` says. ``threads``: the most that one operation uses.
        ``threads_now`` is asked before each micro-batch how many it may use at the moment; with exact numerics the bits
        do not depend on the answer. ``ranks``: the processes of this learner, all of which make one, with the same
        arguments, and call its methods together; the models are cut into pieces in place."""
        self.ranks = ranks or ALONE
        if self.ranks.size != config.ranks:
            raise ValueError(f"learner.ranks is {config.ranks}, and {self.ranks.size} take part")
        self.policy = policy
        self.reference = reference
        self.objective = objective
        self.config = config
        self.lineage = 0
        """Of the weights that are published; the same version may be other weights in another one."""
        self.version = 0
        self.updates = 0
        self._updates_in = {0: 0}
        """By version of the weights: the updates they contain."""
        how = {"replicas": config.replicas, "offload": config.offload == "parameters"}
        self.sharding = self.ranks.shard(policy, **how)
        if reference is not None and reference.model is not policy.model:
            self.ranks.shard(reference, **how)
        self.optimizer = MasterAdamW(policy, config)
        self.passes = Passes(
            numerics,
            budget=config.max_tokens_per_microbatch,
            temperature=temperature,
            threads=threads,
            threads_now=threads_now,
            ranks=self.ranks,
        )
        self.critic: Critic | None = None
        if value_model is not None:
            if not objective.config.parts["advantage"].uses_values:
                raise ValueError(f"objective.advantage={objective.config.advantage} has no use for a value_model")
            self.critic = Critic(value_model, critic or CriticConfig(), config, self.passes, self.ranks)
        self._ahead: _Ahead | None = None
        """What has been learnt of the coming step."""
        self._seed = seed
        self._total_steps = total_steps
        self._emit = on_event or (lambda *_, **__: None)
        if config.activation_checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})
            policy.model.train()  # checkpointing acts in training mode only; every dropout is 0

    @property
    def same_support(self) -> bool:
        """Whether log-probabilities are over the tokens that could be drawn."""
        return self.objective.same_support

    @property
    def can_learn_ahead(self) -> bool:
        """Whether a step can begin with its first rows: one update, nothing to know of the rows before it, no choice
        out of all of them, advantages of each group by itself."""
        alone = self.objective.config.by_group and not self.objective.chooses
        return alone and not self._annotates

    def learn_ahead(self, rows: Sequence[Row]) -> None:
        """Begin the coming step with the rows of its first groups, all that are known so far: those micro-batches that
        further rows cannot change. `step` goes on from there; it must be given the same rows first."""
        if not self.can_learn_ahead:
            raise ValueError(f"objective.advantage={self.objective.config.advantage} cannot be learnt ahead of a batch")
        begin = time.perf_counter()
        ahead = self._ahead = self._ahead or _Ahead()
        ahead.require_continued(rows)
        ahead.rows = tuple(rows)
        useful, whole = useful_rows(rows, range(len(rows)), self.objective), self.objective.whole_rollouts
        num_sure = self.passes.num_sure(rows, useful, whole)
        sure = self.passes.shares(rows, useful, whole)[len(ahead.parts) : num_sure] if num_sure else []
        with self.ranks.together("learn_ahead"):
            self.ranks.agree("rows of a coming step", same=(self.version, _outline(rows)))
            for share in sure:
                self.sharding.begin(last=False)
                ahead.parts.append(self._part(share, self.objective, rows, NOTHING_KNOWN))
        seconds = time.perf_counter() - begin
        ahead.seconds += seconds
        if sure:
            self._emit("forward_backward", seconds=seconds, version=self.version)

    def step(self, batch: Batch) -> StepReport:
        """Consume one batch: ``num_iterations`` passes of ``minibatches`` updates. An empty batch makes no update."""
        with self.ranks.together(f"step {self.version}"):
            return self._step(batch)

    def _step(self, batch: Batch) -> StepReport:
        self.ranks.agree("batches", same=(self.version, _outline(batch.rows)))
        begin, updates_before = time.perf_counter(), self.updates
        if self._ahead is not None:
            self._ahead.require_continued(batch.rows)
            begin -= self._ahead.seconds
        annotated = self._timed("annotate", self.known_at_start, batch.rows) if self._annotates else NOTHING_KNOWN
        with self.ranks.agreement("rows of a step"):
            rows = self.revised(batch, annotated)
            require_finite(rows)
            annotated = self.with_targets(batch, annotated)
        tally, values = StepTally(rows), ValueTally()
        for iteration in range(self.config.num_iterations):
            for part in minibatches(batch, rows, self.config.minibatches):
                if not self.is_pretraining:
                    self._update_policy(part, rows, annotated, tally, first_pass=iteration == 0)
                if self.critic is not None:
                    self._update_critic(part, rows, annotated, tally, values)
        moved = self.objective.config.entropy_target is not None
        entropy_coef = self.objective.entropy_weight if moved else None
        metrics = tally.metrics(rate=self.learning_rate, updates=self.updates, entropy_coef=entropy_coef)
        if self.critic is not None:
            metrics |= values.metrics(rows, annotated, clip=self.critic.config.clip, rate=self._critic_rate)
        metrics |= self._lag(rows, updates_before + max(0, len(tally.norms) - 1))
        self._control_entropy(metrics)
        self.version += 1
        self._updates_in[self.version] = self.updates
        metrics["time/learn_s"] = time.perf_counter() - begin
        used = tally.rows_as_used(self.objective)
        return StepReport(version=self.version, updates=self.updates, metrics=metrics, rows=used)

    @property
    def learning_rate(self) -> float:
        """The policy's rate in the step that comes next: 0 while the critic is trained alone, on schedule after it."""
        config, before = self.config, self._pretraining_steps
        if self.is_pretraining:
            return 0.0
        return learning_rate(
            self.version - before,
            peak=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self._total_steps - before,
        )

    @property
    def is_pretraining(self) -> bool:
        """Whether the step that comes next trains the critic alone."""
        return self.version < self._pretraining_steps

    @property
    def _pretraining_steps(self) -> int:
        return 0 if self.critic is None else self.critic.config.pretraining_steps

    @property
    def _critic_rate(self) -> float:
        return self.critic.learning_rate(self.version, self._total_steps)

    def annotate(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probabilities of the policy as it is now, [T] float32 per row; 0 where the loss does not need them."""
        with self.ranks.together("annotate"):
            return self._logprobs(self.policy, rows, useful_rows(rows, range(len(rows)), self.objective))

    def known_at_start(self, rows: Sequence[Row]) -> Annotated:
        """What the objective needs to know of the rows before the first update of a step."""
        needed = trained_rows(rows) if self._revises else useful_rows(rows, range(len(rows)), self.objective)
        proximal = reference = hidden = full_kl = None
        several = self.config.updates_per_step > 1 and not self.is_pretraining
        if several or needs_logprobs(self.objective.config):
            proximal = self._logprobs(self.policy, rows, needed)
        if self.reference is not None:
            reference = self._logprobs(self.reference, rows, needed)
            if self.objective.needs_full_kl:
                hidden = self.passes.hidden(self.reference, rows, needed)
                if self.objective.config.kl_in == "reward":
                    states, support = (self.reference, hidden), self.objective.same_support
                    full_kl = self.passes.full_kl(self.policy, rows, needed, states, same_support=support)
        return Annotated(
            proximal=proximal,
            reference=reference,
            reference_hidden=hidden,
            reference_kl=full_kl,
            values=None if self.critic is None else self.critic.annotate(rows),
        )

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
        own log-probabilities (detached) are used. Rows of one rollout stand together in ``wanted``. ``stats`` may hold
        earlier parts of the same update.
        """
        with self.ranks.together("forward_backward"):
            return self._learn(wanted, objective, rows, known, stats, [])

    def _learn(
        self,
        wanted: Sequence[int],
        objective: TokenObjective,
        rows: Sequence[Row],
        known: Annotated,
        stats: TokenStats,
        ahead: list[_Part],
    ) -> bool:
        """`forward_backward` from behind the parts that were made ``ahead``; their gradients are there already."""
        before = stats.divisor
        useful = useful_rows(rows, wanted, objective)
        self._count_the_others(wanted, useful, objective, rows, stats)
        own, todo = list(ahead), self.passes.shares(rows, useful, objective.whole_rollouts)[len(ahead) :]
        for place, share in enumerate(todo, start=1):
            self.sharding.begin(last=place == len(todo))
            own.append(self._part(share, objective, rows, known))
        if known.reference_hidden is not None:
            at_rest(self.reference)
        self.sharding.settle()
        for part in self._parts_of_all(own):
            stats.include(part.stats)
        self.optimizer.divisor += stats.divisor - before
        return bool(useful) and stats.divisor > 0

    def _part(self, share: Share, objective: TokenObjective, rows: Sequence[Row], known: Annotated) -> _Part:
        """Add the gradient of one micro-batch. With several ranks an error waits until they agree: the others are in
        their backward passes, which take all ranks."""
        packed, part = pack(rows, share.trees), _Part(share.number, TokenStats(), share.counts)
        scores = self.passes.score(
            self.policy,
            rows,
            packed,
            same_support=objective.same_support,
            entropy_has_gradient=objective.entropy_has_gradient,
            reference=self._reference_states(known),
        )
        loss = None
        if share.counts:
            try:
                loss = self._loss(packed, scores, objective, rows, known, part.stats)
            except Exception as error:
                if self.ranks is ALONE:
                    raise
                part.error = error
        (scores.logprobs.sum() * 0.0 if loss is None else loss).backward()
        return part

    def _loss(
        self,
        packed: Packed,
        scores: Scores,
        objective: TokenObjective,
        rows: Sequence[Row],
        known: Annotated,
        stats: TokenStats,
    ) -> torch.Tensor:
        """Of one micro-batch, before it is divided; counted in ``stats``."""
        tokens = tokens_of(rows, packed, scores, known, self.version)
        found = objective.token_losses(tokens)
        shares = objective.shares(found.kept, tokens.sequences)
        loss = torch.where(found.kept, found.losses * shares, 0.0).sum()
        stats.count(rows, packed, tokens, found, version=self.version)
        stats.loss_sum += float(loss.detach())
        stats.divisor += objective.divisor(found.kept, tokens.sequences)
        return loss

    def _parts_of_all(self, own: list[_Part]) -> list[_Part]:
        """Every rank's micro-batches, in order; an error in one of them is an error everywhere, and nothing is left of
        the gradient."""
        error = next((part.error for part in own if part.error is not None), None)
        try:
            self.ranks.agree("micro-batches", error)
        except NearpolicyError:
            self.forget_gradient()
            raise
        told = [(part.number, part.stats) for part in own if part.counts]
        everything = [part for of_rank in self.ranks.exchange("counts", told) for part in of_rank]
        return [_Part(number, stats) for number, stats in sorted(everything, key=lambda part: part[0])]

    def normalise(self) -> None:
        """Divide the gradient that has been added up by its divisor."""
        self.optimizer.normalise()

    def forget_gradient(self) -> None:
        """Throw away what has been added up."""
        self.sharding.forget()
        self.optimizer.zero_grad()
        self._ahead = None

    def optim_step(self, rate: float) -> float:
        """Normalise, clip, update, forget the gradient; returns the norm before clipping. A non-finite gradient is not
        applied."""
        with self.ranks.together("optim_step"):
            norm = self.optimizer.step(rate, self.config.max_grad_norm)
        self.updates += bool(np.isfinite(norm))
        return norm

    def supervised_step(self, rows: Sequence[Row], objective: TokenObjective, rate: float) -> float:
        """One update of maximum likelihood; does not count as a step. Returns the mean loss over tokens, in nats."""
        stats = TokenStats()
        with self.ranks.together("supervised_step"):
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
        if self.critic is not None:
            self.critic.restart()

    def begin(self) -> None:
        """Take the weights of now for version 0: fresh moments, since those of a warm start belong to another loss."""
        self.optimizer = MasterAdamW(self.policy, self.config)
        with self.ranks.together("begin"):
            self.settle_reference()
            if self.critic is not None:
                self.critic.begin(self.policy)

    def settle_reference(self) -> None:
        """If the reference is a copy of the initial policy: the weights of now are the initial ones."""
        own = self.reference is not None and self.reference.model is not self.policy.model
        if own and self.objective.config.reference == "initial":
            load_weights(self.reference.model, self.policy.weights())

    def weights(self, parent: int | None, *, keep: bool = True) -> Weights:
        """What there is to publish; the tensors are the live ones, so publish before the next step.

        Of several ranks all get the same record and digests; the tensors are put together one by one, and only rank 0
        keeps them, in host memory, and only if it is to ``keep`` them (`shards` are what each rank has anyway).
        """
        if self.ranks is ALONE:
            tensors = self.policy.weights()
            parts = digests(tensors)
        else:
            tensors, parts = {}, {}
            with self.ranks.together("weights"):
                for name, tensor in self.policy.whole_weights():
                    parts[name] = digest(tensor)
                    if keep and self.ranks.rank == 0:
                        tensors[name] = tensor.detach().cpu()
        record = VersionRecord(
            lineage=self.lineage,
            version=self.version,
            updates=self.updates,
            fingerprint=fingerprint(parts),
            parent=parent,
            digests=parts,
        )
        return Weights(record=record, tensors=tensors, digests=parts, adapter=self.policy.adapter())

    def shards(self) -> dict[str, Shard]:
        """What this rank holds of each tensor of `weights`, the live memory; of several copies each rank shows its own.
        Matrices with an adapter are put together first, one by one: their pieces are copies of rows of the merged
        ones."""
        with self.ranks.together("shards"):
            return dict(self.policy.pieces())

    def state(self) -> dict[str, Any]:
        """Everything beside the weights that the next step depends on; with an adapter that is what there is of them,
        since saved weights contain it and cannot be taken apart."""
        own_critic = {} if self.critic is None else {"critic": self.critic.state()}
        adapter = None
        if isinstance(self.policy, LoraPolicy):
            with self.ranks.together("state"):
                adapter = {"base": self.policy.base_fingerprint, "factors": self.policy.factors()}
        return {
            "adapter": adapter,
            "version": self.version,
            "updates": self.updates,
            "updates_in": dict(self._updates_in),
            "entropy_coef": self.objective.entropy_coef,
            "optimizer": self.optimizer.state_dict(),
            **own_critic,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        require_same(self.critic, state.get("critic"))
        self._load_adapter(state.get("adapter"))
        self.version, self.updates = state["version"], state["updates"]
        self._updates_in = dict(state["updates_in"])
        self.objective = replace(self.objective, entropy_coef=state["entropy_coef"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None:
            self.critic.load_state(state["critic"])

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
        with self.ranks.together("load_state"):
            found = self.policy.base_fingerprint
        if found != saved["base"]:
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
        needs_more = self.reference is not None or self.critic is not None or self._revises
        return self.config.updates_per_step > 1 or needs_more

    def revised(self, batch: Batch, annotated: Annotated) -> tuple[Row, ...]:
        """The rows with advantages that depend on log-probabilities, or on the critic's values."""
        if not self._revises:
            return batch.rows
        if self.objective.needs_critic and annotated.values is None:
            raise ValueError("objective.advantage=gae needs values; give PolicyLearner a value_model")
        return assign_advantages(
            _groups_with_rows(batch),
            self.objective.config,
            max_completion_length=self.objective.max_completion_length,
            annotations=self._for_advantages(batch.rows, annotated),
        )

    def with_targets(self, batch: Batch, annotated: Annotated) -> Annotated:
        """Add what the critic is trained towards, if there is one."""
        if self.critic is None:
            return annotated
        targets = value_targets(
            _groups_with_rows(batch),
            self.objective.config,
            self._for_advantages(batch.rows, annotated),
            gae_lambda=self.critic.config.gae_lambda,
            max_completion_length=self.objective.max_completion_length,
        )
        return replace(annotated, targets=[targets[place].astype(np.float32) for place in segment_places(batch.rows)])

    def _for_advantages(self, rows: Sequence[Row], annotated: Annotated) -> Annotations:
        places = segment_places(rows)

        def keyed(arrays: Sequence[np.ndarray] | None) -> dict[tuple[int, int, int], np.ndarray]:
            return {} if arrays is None else dict(zip(places, arrays, strict=True))

        return Annotations(
            proximal_logprobs=keyed(annotated.proximal),
            reference_logprobs=keyed(annotated.reference),
            reference_kl=keyed(annotated.reference_kl),
            values=keyed(annotated.values),
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

    def _update_policy(
        self, part: Sequence[int], rows: Sequence[Row], annotated: Annotated, tally: StepTally, *, first_pass: bool
    ) -> None:
        ahead, self._ahead = self._ahead or _Ahead(), None
        stats, known = TokenStats(), self.with_choice(part, rows, annotated)
        learn = partial(self._learn, part, self.objective, rows, known, stats, ahead.parts)
        if self._timed("forward_backward", learn):
            norm = self._timed("optim", self.optim_step, self.learning_rate)
            tally.add(stats, norm, first_pass=first_pass)
        else:
            self.forget_gradient()  # and the divisor, which would weigh on the next update

    def _update_critic(
        self, part: Sequence[int], rows: Sequence[Row], known: Annotated, tally: StepTally, values: ValueTally
    ) -> None:
        stats, gradient = ValueStats(), self.critic.forward_backward
        if self._timed("forward_backward", gradient, part, self.objective, rows, known, stats, model="critic"):
            norm = self._timed("optim", self.critic.optim_step, self._critic_rate, model="critic")
            values.add(stats, norm)
            if self.is_pretraining:
                tally.mark(stats.rows, norm)

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

    def _timed(self, phase: str, call: Callable[..., Any], *arguments: Any, **numbers: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        self._emit(phase, seconds=time.perf_counter() - begin, version=self.version, **numbers)
        return result

    def _lag(self, rows: Sequence[Row], updates: int) -> dict[str, float]:
        """How far the oldest token is behind the weights that the last update, after ``updates`` others, began with."""
        new = [row for row in rows if row.trained.any() and not row.replayed]
        oldest = [int(row.segment.versions[row.trained].min()) for row in new]
        return {"staleness/updates_max": float(updates - self._updates_in[min(oldest)])} if oldest else {}


@dataclass(slots=True)
class _Part:
    """What one rank has made of one micro-batch, beside the gradient."""

    number: int
    """Place in the order of all micro-batches of the update."""
    stats: TokenStats
    counts: bool = True
    error: Exception | None = None


@dataclass(slots=True)
class _Ahead:
    """The part of an update that was made before its batch was complete."""

    rows: tuple[Row, ...] = ()
    parts: list[_Part] = field(default_factory=list)
    seconds: float = 0.0

    def require_continued(self, rows: Sequence[Row]) -> None:
        if any(a is not b for a, b in zip(self.rows, rows, strict=False)) or len(rows) < len(self.rows):
            raise ValueError(f"a step that began with {len(self.rows)} rows goes on with other ones")


def _outline(rows: Sequence[Row]) -> list[tuple[int, int, int, bool]]:
    """Enough of rows to tell whether two ranks would cut them alike."""
    return [(row.group, row.sample, len(row.trained), bool(row.advantages.any())) for row in rows]


def _groups_with_rows(batch: Batch) -> list[Group]:
    """Groups of the batch that were not left out."""
    there = {row.group for row in batch.rows}
    return [group for group in batch.groups if group.index in there]
