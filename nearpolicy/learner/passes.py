"""Forward passes over rows: how many go through a model at once, on how many threads, and padded to what.

    rows, indices -> trees -> micro-batches (`Packed`) -> one call of the model each -> numbers per token

Promise: with exact numerics a token's numbers have the same bits whatever stands beside it in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.packing import Packed, Share, num_sure, pack, shares, targets_by_row
from nearpolicy.learner.ranks import ALONE, Together
from nearpolicy.learner.sharding import at_rest, with_whole_head
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.policy import PolicyModel, Scores, Support
from nearpolicy.models.rows import RowContext
from nearpolicy.models.value import ValueModel
from nearpolicy.records import Row


class Passes:
    """Rows in, numbers out, for any model of packed rows. The thread that calls it is the learner's."""

    def __init__(
        self,
        numerics: Numerics,
        *,
        budget: int,
        temperature: float,
        threads: int = 1,
        threads_now: Callable[[], int] | None = None,
        ranks: Together = ALONE,
    ) -> None:
        """``budget``: tokens in one forward pass. ``threads``: the most that one operation uses. ``threads_now`` is
        asked before each micro-batch how many it may use at the moment. ``ranks``: who shares the work; all of them
        call everything here together, with the same rows, and get the same numbers."""
        self.threads_now = threads_now
        self._numerics = numerics
        self._budget = budget
        self._temperature = temperature
        self._threads = threads
        self._ranks = ranks

    def shares(self, rows: Sequence[Row], wanted: Sequence[int], whole_rollouts: bool = False) -> list[Share]:
        """What this rank computes of the ``wanted`` rows; ``whole_rollouts`` keeps all segments of a rollout
        together."""
        ranks = self._ranks
        return shares(rows, wanted, self._budget, rank=ranks.rank, num_ranks=ranks.size, whole_rollouts=whole_rollouts)

    def num_sure(self, rows: Sequence[Row], wanted: Sequence[int], whole_rollouts: bool) -> int:
        """Of those shares, how many stay as they are when rows are added behind."""
        return num_sure(rows, wanted, self._budget, self._ranks.size, whole_rollouts)

    def shared(self) -> Passes:
        """The same, for whoever does not belong to this thread."""
        return Passes(self._numerics, budget=self._budget, temperature=self._temperature, threads=self._threads)

    def packed(self, rows: Sequence[Row], wanted: Sequence[int], whole_rollouts: bool = False) -> Iterator[Packed]:
        """The micro-batches of this rank's shares."""
        for share in self.shares(rows, wanted, whole_rollouts):
            yield pack(rows, share.trees)

    def _annotating(self, rows: Sequence[Row], wanted: Sequence[int]) -> Iterator[tuple[Packed, bool]]:
        """(micro-batch of this rank, whether its numbers count)."""
        for share in self.shares(rows, wanted):
            yield pack(rows, share.trees), share.counts

    def score(
        self,
        model: PolicyModel,
        rows: Sequence[Row],
        packed: Packed,
        *,
        same_support: bool,
        entropy_has_gradient: bool = False,
        reference: tuple[PolicyModel, Sequence[Tensor]] | None = None,
    ) -> Scores:
        """[N] scores of the packed targets. ``reference``: another model, and its hidden states by row, for the KL."""
        ids, context, num_targets = self._begin(packed, model.device)
        theirs = None
        if reference is not None:
            with_whole_head(reference[0])
            hidden = torch.cat([reference[1][i] for i, _ in targets_by_row(packed)])
            theirs = reference[0], torch.nn.functional.pad(hidden, (0, 0, 0, num_targets - len(hidden)))
        scores = model(
            ids,
            context.positions,
            context,
            _padded(packed.predicted_from, num_targets, model.device),
            _padded(packed.targets, num_targets, model.device),
            self._temperature,
            entropy_has_gradient=entropy_has_gradient,
            reference=theirs,
            support=_support(rows, packed, num_targets, model.device) if same_support else None,
        )
        return scores.first(len(packed.targets))

    @torch.no_grad()
    def logprobs(
        self, model: PolicyModel, rows: Sequence[Row], wanted: Sequence[int], *, same_support: bool
    ) -> list[np.ndarray]:
        """[T] float32 per row, 0 where nothing is wanted."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed, counts in self._annotating(rows, wanted):
            found = self.score(model, rows, packed, same_support=same_support).logprobs
            if counts:
                _place(out, packed, found)
        at_rest(model)
        return self._of_all_ranks(out)

    @torch.no_grad()
    def hidden(self, model: PolicyModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[Tensor]:
        """[trained tokens, hidden] per row: the states that predict its trained tokens."""
        width = model.config.get_text_config().hidden_size
        out = [torch.zeros(int(row.trained.sum()), width, device=model.device) for row in rows]
        for packed, counts in self._annotating(rows, wanted):
            ids, context, _ = self._begin(packed, model.device)
            where = torch.from_numpy(packed.predicted_from).to(model.device)
            states = model.states(ids, context.positions, context, where)
            for i, here in targets_by_row(packed) if counts else ():
                out[i] = states[here]
        at_rest(model)
        return self._ranks.merged("hidden states of the reference", out)

    @torch.no_grad()
    def full_kl(
        self,
        model: PolicyModel,
        rows: Sequence[Row],
        wanted: Sequence[int],
        reference: tuple[PolicyModel, Sequence[Tensor]] | None,
        *,
        same_support: bool,
    ) -> list[np.ndarray]:
        """[T] float32 KL from the model to the reference over the vocabulary per row, 0 where nothing is wanted."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed, counts in self._annotating(rows, wanted):
            scores = self.score(model, rows, packed, same_support=same_support, reference=reference)
            if counts:
                _place(out, packed, scores.reference_kl)
        at_rest(model)
        return self._of_all_ranks(out)

    def value(self, model: ValueModel, packed: Packed) -> Tensor:
        """[N] values of the states that the packed targets were chosen in, with gradient."""
        ids, context, num_targets = self._begin(packed, model.device)
        rows = _padded(packed.predicted_from, num_targets, model.device)
        return model(ids, context.positions, context, rows)[: len(packed.targets)]

    @torch.no_grad()
    def values(self, model: ValueModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[np.ndarray]:
        """[T] float32 values before each trained token per row, 0 where nothing is wanted."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed, counts in self._annotating(rows, wanted):
            found = self.value(model, packed)
            if counts:
                _place(out, packed, found)
        at_rest(model)
        return self._of_all_ranks(out)

    def _of_all_ranks(self, out: list[np.ndarray]) -> list[np.ndarray]:
        """The arrays with what the others have computed of them; what nobody has computed stays 0."""
        merged = self._ranks.merged("numbers of tokens", [torch.from_numpy(of_row) for of_row in out])
        return [of_row.numpy() for of_row in merged]

    def _begin(self, packed: Packed, device: torch.device) -> tuple[Tensor, RowContext, int]:
        """(padded ids, their context, how many targets to compute), on as many threads as may be used now."""
        if self.threads_now is not None:
            torch.set_num_threads(self.threads_now())
        num_rows = self._numerics.rows(len(packed.input_ids), self._threads)
        num_targets = self._numerics.rows(len(packed.targets), self._threads)
        ids = _padded(packed.input_ids, num_rows, device)
        return ids, RowContext(packed.nodes, num_rows, device), num_targets


def _place(out: Sequence[np.ndarray], packed: Packed, values: Tensor) -> None:
    """Write [N] numbers of the packed targets where they belong in their rows."""
    found = values.cpu().numpy()
    for i, here in targets_by_row(packed):
        out[i][packed.position[here]] = found[here]


def _padded(array: np.ndarray, length: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.pad(array, (0, length - len(array)), mode="edge")).to(device)


def _support(rows: Sequence[Row], packed: Packed, length: int, device: torch.device) -> Support:
    """Of the packed targets, from what the engine recorded; the last one's for the padding behind."""
    sizes, ids = [], []
    for i, here in targets_by_row(packed):
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
