"""Packing is pure: whatever the rows and the budget, every trained token is predicted once, after its own history."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.learner.packing import build_trees, microbatches, num_sure, pack, shares
from nearpolicy.records import Finish, Row, Segment


def row_of(group: int, context: list[int], tokens: list[int], trained: list[bool]) -> Row:
    n = len(tokens)
    segment = Segment(
        context_ids=context,
        token_ids=tokens,
        mask=np.ones(n, bool),
        behavior_logprobs=np.zeros(n),
        versions=np.zeros(n),
        finish=Finish.STOP,
    )
    return Row(group=group, sample=0, segment=segment, trained=trained, advantages=np.ones(n))


@st.composite
def some_rows(draw) -> list[Row]:
    """Few contexts over few tokens, so that rows often share one, also across groups and apart from each other."""
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        context = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        tokens = draw(st.lists(st.integers(0, 5), min_size=0, max_size=5))
        trained = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        rows.append(row_of(draw(st.integers(0, 1)), context, tokens, trained))
    return rows


def history(packed, place: int) -> list[int]:
    """All tokens that the packed row at ``place`` has read, itself included."""
    [own] = [n for n in packed.nodes if n.start <= place < n.start + n.length]
    before = []
    if own.parent is not None:
        parent = packed.nodes[own.parent]
        before = packed.input_ids[parent.start : parent.start + parent.length].tolist()
    return before + packed.input_ids[own.start : place + 1].tolist()


@given(some_rows(), st.integers(1, 20))
def test_every_trained_token_is_predicted_once_after_exactly_its_own_history(rows, budget):
    wanted = [i for i, row in enumerate(rows) if row.trained.any()]
    predicted: Counter[tuple[int, int]] = Counter()
    for trees in microbatches(build_trees(rows, wanted, budget), budget):
        packed = pack(rows, trees)
        columns = zip(packed.predicted_from, packed.targets, packed.row_index, packed.position, strict=True)
        for place, target, i, position in columns:
            segment = rows[i].segment
            predicted[int(i), int(position)] += 1
            assert target == segment.token_ids[position]
            assert history(packed, int(place)) == [*segment.context_ids, *segment.token_ids[:position]]
    assert predicted == {(i, t): 1 for i, row in enumerate(rows) for t in np.flatnonzero(row.trained)}


@given(some_rows(), st.integers(1, 20))
def test_a_forward_pass_keeps_the_budget_unless_a_single_row_is_longer(rows, budget):
    wanted = [i for i, row in enumerate(rows) if row.trained.any()]
    for trees in microbatches(build_trees(rows, wanted, budget), budget):
        packed = pack(rows, trees)
        assert len(packed.input_ids) == sum(tree.num_tokens for tree in trees)
        assert len(packed.input_ids) <= budget or sum(len(tree.rows) for tree in trees) == 1


@given(some_rows())
def test_neighbours_with_one_group_and_context_share_it_and_others_do_not(rows):
    trees = list(build_trees(rows, range(len(rows)), 10**6))
    assert [i for tree in trees for i in tree.rows] == list(range(len(rows)))
    key = [(row.group, row.segment.context_ids.tolist()) for row in rows]
    assert all(key[i] == key[tree.rows[0]] for tree in trees for i in tree.rows)
    assert all(key[a.rows[0]] != key[b.rows[0]] for a, b in itertools.pairwise(trees))


def test_the_example_in_the_docstring():
    rows = [row_of(0, [0, 1, 2, 3, 4], [10, 11, 12], [True] * 3), row_of(0, [0, 1, 2, 3, 4], [20, 21], [True] * 2)]
    [trees] = microbatches(build_trees(rows, [0, 1], 100), 100)
    packed = pack(rows, trees)
    assert packed.input_ids.tolist() == [0, 1, 2, 3, 4, 10, 11, 20]
    assert packed.predicted_from.tolist() == [4, 5, 6, 4, 7]
    assert packed.targets.tolist() == [10, 11, 12, 20, 21]


def test_a_row_without_context_is_an_error_that_says_so():
    rows = [row_of(0, [], [1], [True])]
    [trees] = microbatches(build_trees(rows, [0], 10), 10)
    with pytest.raises(ValueError, match="row 0 has an empty context"):
        pack(rows, trees)


# Shares of ranks.


def of_all_ranks(rows, wanted, budget, num_ranks, whole=False):
    return [shares(rows, wanted, budget, rank=r, num_ranks=num_ranks, whole_rollouts=whole) for r in range(num_ranks)]


@given(some_rows(), st.integers(1, 30), st.integers(1, 5), st.booleans())
def test_ranks_have_as_many_rounds_and_every_row_counts_once_in_order(rows, budget, num_ranks, whole):
    found = of_all_ranks(rows, range(len(rows)), budget, num_ranks, whole)
    assert len({len(of_rank) for of_rank in found}) == 1
    counted = sorted((share for of_rank in found for share in of_rank if share.counts), key=lambda s: s.number)
    assert [share.number for share in counted] == list(range(len(counted)))
    assert [i for share in counted for tree in share.trees for i in tree.rows] == list(range(len(rows)))
    for share in (share for of_rank in found for share in of_rank):
        tokens, members = sum(t.num_tokens for t in share.trees), [i for t in share.trees for i in t.rows]
        assert tokens <= budget or len(members) == 1 or whole
    for place in range(len(found[0])):
        assert any(of_rank[place].counts for of_rank in found)


@given(some_rows(), st.integers(1, 30), st.booleans())
def test_one_rank_computes_the_micro_batches_of_one_process(rows, budget, whole):
    usual = list(microbatches(build_trees(rows, range(len(rows)), budget), budget, rows if whole else None))
    [found] = of_all_ranks(rows, range(len(rows)), budget, 1, whole)
    assert [list(share.trees) for share in found] == [list(trees) for trees in usual] or not rows
    assert all(share.counts for share in found)


@given(some_rows(), some_rows(), st.integers(1, 30), st.integers(1, 4), st.booleans())
def test_sure_rounds_stay_when_rows_are_added_behind(rows, more, budget, num_ranks, whole):
    count = num_sure(rows, range(len(rows)), budget, num_ranks, whole)
    before = of_all_ranks(rows, range(len(rows)), budget, num_ranks, whole)
    both = [*rows, *more]
    after = of_all_ranks(both, range(len(both)), budget, num_ranks, whole)
    for mine, theirs in zip(before, after, strict=True):
        layout = [[(s.number, s.counts, [t.rows for t in s.trees]) for s in of[:count]] for of in (mine, theirs)]
        assert layout[0] == layout[1]


def test_work_is_balanced_by_tokens():
    """Ten rows of very different length on two ranks: in each round the longer part goes to who has less so far."""
    rows = [row_of(i, [1], [1] * length, [True] * length) for i, length in enumerate([30, 10] * 5)]
    loads = [sum(t.num_tokens for s in of for t in s.trees if s.counts) for of in of_all_ranks(rows, range(10), 31, 2)]
    assert abs(loads[0] - loads[1]) <= 20
    few = [row_of(0, [1, 2, 3], [1] * 6, [True] * 6) for _ in range(8)]
    cut = of_all_ranks(few, range(8), 1000, 4)
    assert [[len(t.rows) for s in of for t in s.trees] for of in cut] == [[2]] * 4  # and nobody rests beside one batch
