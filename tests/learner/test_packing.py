"""Packing is pure: whatever the rows and the budget, every trained token is predicted once, after its own history."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.learner.packing import build_trees, microbatches, pack
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
