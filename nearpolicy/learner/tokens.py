"""From packed rows to the tokens that a loss looks at: columns [N] in the order of the packed targets.

A number that is none is refused here, with its group, sample and token, before anything is trained on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.packing import Packed, targets_by_row
from nearpolicy.models.policy import Scores
from nearpolicy.objectives.objective import Tokens
from nearpolicy.objectives.sequences import Sequences
from nearpolicy.records import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """What is known of the tokens of rows at the start of a step, one array per row; None where nothing needs it."""

    proximal: Sequence[np.ndarray] | None = None
    """[T] float32 log-probabilities of the policy; 0 where a token is not trained."""
    reference: Sequence[np.ndarray] | None = None
    """[T] float32 log-probabilities of the reference; 0 where a token is not trained."""
    reference_hidden: Sequence[Tensor] | None = None
    """[trained tokens, hidden] states of the reference that predict them."""
    reference_kl: Sequence[np.ndarray] | None = None
    """[T] float32 KL from the policy to the reference over the whole vocabulary; 0 where a token is not trained."""
    chosen: Sequence[np.ndarray] | None = None
    """[T] bool: tokens picked out of the whole update."""
    values: Sequence[np.ndarray] | None = None
    """[T] float32 of the critic, before each trained token; 0 elsewhere."""
    targets: Sequence[np.ndarray] | None = None
    """[T] what the values are trained towards; 0 where a token is not trained."""


NOTHING_KNOWN = Annotated()


def tokens_of(rows: Sequence[Row], packed: Packed, scores: Scores, known: Annotated, version: int) -> Tokens:
    """The packed targets with what the policy of now says of them and what was known before. ``version``: that of the
    policy at the start of the step."""
    given = {"proximal": known.proximal, "reference": known.reference, "chosen": known.chosen}
    columns = _columns(rows, packed, {name: arrays for name, arrays in given.items() if arrays is not None}, version)
    here = {name: torch.from_numpy(values).to(scores.logprobs.device) for name, values in columns.items()}
    return Tokens(
        logprobs=scores.logprobs,
        entropies=scores.entropies,
        proximal_logprobs=here.get("proximal", scores.logprobs.detach()),
        behavior_logprobs=here["behavior"],
        advantages=here["advantages"],
        sequences=packed_sequences(rows, packed, scores.logprobs.device),
        staleness=here["staleness"],
        reference_logprobs=here.get("reference"),
        reference_kl=scores.reference_kl,
        chosen=here.get("chosen"),
    )


def packed_sequences(rows: Sequence[Row], packed: Packed, device: torch.device) -> Sequences:
    """The packed targets by rollout."""
    by_row = list(targets_by_row(packed))
    sequences = sequences_of(rows, [i for i, _ in by_row], [part.stop - part.start for _, part in by_row])
    return Sequences(sequences.index.to(device), sequences.count)


def sequences_of(rows: Sequence[Row], which: Sequence[int], lengths: Sequence[int]) -> Sequences:
    """Tokens by rollout, for rows with so many tokens each."""
    numbers: dict[tuple[int, int], int] = {}
    index = [numbers.setdefault((rows[i].group, rows[i].sample), len(numbers)) for i in which]
    repeated = np.repeat(np.array(index, dtype=np.int64), lengths)
    return Sequences(torch.from_numpy(repeated), len(numbers))


def _columns(
    rows: Sequence[Row], packed: Packed, given: dict[str, Sequence[np.ndarray]], version: int
) -> dict[str, np.ndarray]:
    """Per-token inputs of the loss, [N] each; ``given``: arrays [T] per row, by name."""
    columns = {
        name: np.empty(len(packed.targets), dtype=bool if name == "chosen" else np.float32)
        for name in ("behavior", "advantages", "staleness", *given)
    }
    for i, here in targets_by_row(packed):
        positions = packed.position[here]
        columns["behavior"][here] = rows[i].segment.behavior_logprobs[positions]
        columns["advantages"][here] = rows[i].advantages[positions]
        columns["staleness"][here] = version - rows[i].segment.versions[positions]
        for name, arrays in given.items():
            columns[name][here] = arrays[i][positions]
        for name, values in columns.items():
            _require_finite(rows[i], name, values[here], positions)
    return columns


_NAMES = {"behavior": "behavior_logprobs", "proximal": "proximal_logprobs", "reference": "reference_logprobs"}


def require_finite(rows: Sequence[Row]) -> None:
    """`NearpolicyError` that names the first trained token whose advantage or log-probability is no number: before
    anything is computed, so that no part of its batch is trained on."""
    for row in rows:
        positions = np.flatnonzero(row.trained)
        _require_finite(row, "behavior", row.segment.behavior_logprobs[positions], positions)
        _require_finite(row, "advantages", row.advantages[positions], positions)


def _require_finite(row: Row, name: str, values: np.ndarray, positions: np.ndarray) -> None:
    """``values``: of the tokens at these positions of the row."""
    bad = ~np.isfinite(values)
    if bad.any():
        raise NearpolicyError(
            f"group {row.group}, sample {row.sample}, token {int(positions[bad][0])}: its {_NAMES.get(name, name)} is "
            f"{values[bad][0]}; nothing is trained on such a batch. Find where it was made (nearpolicy inspect "
            "--group), or leave the group out"
        )
