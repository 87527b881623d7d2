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
from nearpolicy.learner.packing import Packed, build_trees, microbatches, pack, targets_by_row
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
    ) -> None:
        """``budget``: tokens in one forward pass. ``threads``: the most that one operation uses. ``threads_now`` is
        asked before each micro-batch how many it may use at the moment."""
        self.threads_now = threads_now
        self._numerics = numerics
        self._budget = budget
        self._temperature = temperature
        self._threads = threads

    def shared(self) -> Passes:
        """The same, for whoever does not belong to this thread."""
        return Passes(self._numerics, budget=self._budget, temperature=self._temperature, threads=self._threads)

    def packed(self, rows: Sequence[Row], wanted: Sequence[int], whole_rollouts: bool = False) -> Iterator[Packed]:
        """The ``wanted`` rows in micro-batches; ``whole_rollouts`` keeps all segments of a rollout together."""
        trees = build_trees(rows, wanted, self._budget)
        for together in microbatches(trees, self._budget, rows if whole_rollouts else None):
            yield pack(rows, together)

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
        for packed in self.packed(rows, wanted):
            _place(out, packed, self.score(model, rows, packed, same_support=same_support).logprobs)
        return out

    @torch.no_grad()
    def hidden(self, model: PolicyModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[Tensor]:
        """[trained tokens, hidden] per row: the states that predict its trained tokens."""
        width = model.config.get_text_config().hidden_size
        out = [torch.zeros(int(row.trained.sum()), width, device=model.device) for row in rows]
        for packed in self.packed(rows, wanted):
            ids, context, _ = self._begin(packed, model.device)
            states = model.hidden(ids, context.positions, context)[
                torch.from_numpy(packed.predicted_from).to(model.device)
            ]
            for i, here in targets_by_row(packed):
                out[i] = states[here]
        return out

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
        for packed in self.packed(rows, wanted):
            scores = self.score(model, rows, packed, same_support=same_support, reference=reference)
            _place(out, packed, scores.reference_kl)
        return out

    def value(self, model: ValueModel, packed: Packed) -> Tensor:
        """[N] values of the states that the packed targets were chosen in, with gradient."""
        ids, context, num_targets = self._begin(packed, model.device)
        rows = _padded(packed.predicted_from, num_targets, model.device)
        return model(ids, context.positions, context, rows)[: len(packed.targets)]

    @torch.no_grad()
    def values(self, model: ValueModel, rows: Sequence[Row], wanted: Sequence[int]) -> list[np.ndarray]:
        """[T] float32 values before each trained token per row, 0 where nothing is wanted."""
        out = [np.zeros(len(row.segment.token_ids), dtype=np.float32) for row in rows]
        for packed in self.packed(rows, wanted):
            _place(out, packed, self.value(model, packed))
        return out

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
