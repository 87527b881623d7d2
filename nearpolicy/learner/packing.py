"""Rows -> trees -> micro-batches -> what each rank takes of them, without tensors and without a model.

Rows of one group that continue the same context form a *tree*: the context goes through the model once for all of
them. Trees are cut to fit the token budget and packed in order, so that the cut depends on the rows and the budget
alone.

    context c0..c4, completions [a b c] and [d e]:
    packed      c0 c1 c2 c3 c4 | a  b | d          the last token of a row predicts nothing that is needed
    predicted                a   b  c   e          from rows c4, a, b and c4 (d), d

Ranks compute in *rounds*: one micro-batch each, all at the same time. Every rank works out the same rounds from the
same rows, and has one forward and backward pass in each, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nearpolicy.models.rows import Node
from nearpolicy.records import Row


@dataclass(frozen=True, slots=True)
class Tree:
    """A context and the rows that continue it; ``rows`` are indices into the batch's rows."""

    context_ids: np.ndarray
    rows: tuple[int, ...]
    num_tokens: int


def build_trees(rows: Sequence[Row], wanted: Iterable[int], budget: int) -> Iterator[Tree]:
    """Trees over the ``wanted`` row indices, in order; a tree beyond the budget is cut between rows.

    A single row longer than the budget becomes a tree of its own: nothing is dropped for its length.
    """
    members: list[int] = []
    tokens = 0
    for i in wanted:
        row = rows[i]
        fed = max(0, len(row.segment.token_ids) - 1)
        same = bool(members) and row.group == rows[members[0]].group and _same_context(row, rows[members[0]])
        if members and (not same or tokens + fed > budget):
            yield Tree(rows[members[0]].segment.context_ids, tuple(members), tokens)
            members = []
        if not members:
            tokens = len(row.segment.context_ids)
        members.append(i)
        tokens += fed
    if members:
        yield Tree(rows[members[0]].segment.context_ids, tuple(members), tokens)


def _same_context(a: Row, b: Row) -> bool:
    return np.array_equal(a.segment.context_ids, b.segment.context_ids)


def microbatches(trees: Iterable[Tree], budget: int, whole_of: Sequence[Row] | None = None) -> Iterator[list[Tree]]:
    """Consecutive trees within the token budget; a tree beyond it alone.

    ``whole_of``: the rows that the trees are made of, if all segments of a rollout must stay together; then a rollout
    may exceed the budget.
    """
    current: list[Tree] = []
    tokens = 0
    for tree in trees:
        goes_on = whole_of is not None and bool(current) and _same_rollout(whole_of, current[-1], tree)
        if current and tokens + tree.num_tokens > budget and not goes_on:
            yield current
            current, tokens = [], 0
        current.append(tree)
        tokens += tree.num_tokens
    if current:
        yield current


def _same_rollout(rows: Sequence[Row], before: Tree, after: Tree) -> bool:
    last, first = rows[before.rows[-1]], rows[after.rows[0]]
    return (last.group, last.sample) == (first.group, first.sample)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes in one round."""

    number: int
    """Place of the micro-batch in the order of all."""
    trees: tuple[Tree, ...]
    counts: bool
    """False: another rank's micro-batch, taken up again with weight zero, because there is none for this rank."""


def shares(
    rows: Sequence[Row],
    wanted: Iterable[int],
    budget: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    whole_rollouts: bool = False,
) -> list[Share]:
    """What ``rank`` computes of the ``wanted`` rows, one share a round; every rank has as many.

    A round is ``num_ranks`` consecutive micro-batches, the largest for the rank that has the fewest tokens so far. What
    is left for the last round is cut again, into as many parts as there are ranks. Full rounds do not change when rows
    are added behind, unless their last micro-batch is the last of all.
    """
    whole_of = rows if whole_rollouts else None
    cut = [tuple(trees) for trees in microbatches(build_trees(rows, wanted, budget), budget, whole_of)]
    num_full = len(cut) // num_ranks * num_ranks
    rounds = [cut[start : start + num_ranks] for start in range(0, num_full, num_ranks)]
    if left := [i for trees in cut[num_full:] for tree in trees for i in tree.rows]:
        rounds.append(_dealt(rows, left, budget, num_ranks, whole_of))
    own, loads, first = [], [0] * num_ranks, 0
    for together in rounds:
        takers = sorted(range(num_ranks), key=lambda r: (loads[r], r))
        ordered = sorted(range(len(together)), key=lambda m: (-_num_tokens(together[m]), m))
        taken = dict(zip(takers, ordered, strict=False))
        mine = taken.get(rank, ordered[-1])
        own.append(Share(first + mine, together[mine], rank in taken))
        for r, m in taken.items():
            loads[r] += _num_tokens(together[m])
        first += len(together)
    return own


def num_sure(rows: Sequence[Row], wanted: Iterable[int], budget: int, num_ranks: int, whole_rollouts: bool) -> int:
    """Rounds that rows added behind cannot change."""
    whole_of = rows if whole_rollouts else None
    return max(0, sum(1 for _ in microbatches(build_trees(rows, wanted, budget), budget, whole_of)) - 1) // num_ranks


def _dealt(
    rows: Sequence[Row], wanted: Sequence[int], budget: int, most: int, whole_of: Sequence[Row] | None
) -> list[tuple[Tree, ...]]:
    """The ``wanted`` rows, which fit in fewer than ``most`` micro-batches, in up to ``most`` of about one size."""
    size = -(-sum(tree.num_tokens for tree in build_trees(rows, wanted, budget)) // most)
    while size < budget:
        cut = [tuple(trees) for trees in microbatches(build_trees(rows, wanted, size), size, whole_of)]
        if len(cut) <= most:
            return cut
        size += max(1, size // 16)
    return [tuple(trees) for trees in microbatches(build_trees(rows, wanted, budget), budget, whole_of)]


def _num_tokens(trees: Iterable[Tree]) -> int:
    return sum(tree.num_tokens for tree in trees)


@dataclass(frozen=True, slots=True)
class Packed:
    """One forward pass: packed ids and nodes, and per trained token where it is predicted and where it came from."""

    input_ids: np.ndarray
    """[T]"""
    nodes: tuple[Node, ...]
    predicted_from: np.ndarray
    """[N] packed row whose logits predict the token."""
    targets: np.ndarray
    """[N]"""
    row_index: np.ndarray
    """[N] index of the batch's row."""
    position: np.ndarray
    """[N] position in the row's segment."""


def pack(rows: Sequence[Row], trees: Sequence[Tree]) -> Packed:
    """Lay trees out in one packed row; only trained tokens are predicted."""
    ids: list[np.ndarray] = []
    nodes: list[Node] = []
    predicted_from, targets, row_index, position = [], [], [], []
    start = 0
    for tree in trees:
        context = len(tree.context_ids)
        if context == 0:
            raise ValueError(f"row {tree.rows[0]} has an empty context: nothing predicts its first token")
        ids.append(tree.context_ids)
        root = len(nodes)
        nodes.append(Node(start, context))
        last_of_context = start + context - 1
        start += context
        for i in tree.rows:
            tokens = rows[i].segment.token_ids
            where = np.flatnonzero(rows[i].trained)
            predicted_from.append(np.where(where == 0, last_of_context, start + where - 1))
            targets.append(tokens[where])
            row_index.append(np.full(len(where), i))
            position.append(where)
            if len(tokens) > 1:
                nodes.append(Node(start, len(tokens) - 1, parent=root))
                ids.append(tokens[:-1])
                start += len(tokens) - 1
    return Packed(
        input_ids=np.concatenate(ids).astype(np.int64),
        nodes=tuple(nodes),
        predicted_from=np.concatenate(predicted_from).astype(np.int64),
        targets=np.concatenate(targets).astype(np.int64),
        row_index=np.concatenate(row_index).astype(np.int64),
        position=np.concatenate(position).astype(np.int64),
    )


def targets_by_row(packed: Packed) -> Iterator[tuple[int, slice]]:
    """(index of the batch's row, where its targets stand); those of one row stand together. A loop over tokens would
    hold the interpreter's lock against the engine's thread."""
    starts = np.flatnonzero(np.diff(packed.row_index, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(packed.row_index)], strict=True):
        yield int(packed.row_index[start]), slice(start, end)
