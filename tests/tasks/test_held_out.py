"""Held-out means by question text, never by seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.errors import DataError
from nearpolicy.tasks.held_out import question_key, split_held_out


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 41?", "what is  41 + 3?"),
        ("3+4=", "4 + 3="),
        ("1 + 2 + 3", "3 + 1 + 2"),
        ("1.5 + 2", "2 + 1.5"),
        ("(7 + 2) * 3", "(2 + 7) * 3"),
        ("6 × 7 =", "7 * 6 ="),
        ("-3 + 4", "4 + -3"),
        ("Ｗhat is 1 + 2?", "What is 2 + 1?"),
        ("a\n\tb", "A b"),
    ],
)
def test_same_question_in_another_form_has_the_same_key(one, other):
    assert question_key(one) == question_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 - 4", "4 - 3"),
        ("10 - 3 + 4", "10 - 4 + 3"),
        ("2 * 3 + 4", "2 * 4 + 3"),
        ("3 + 4 * 5", "4 + 3 * 5"),
        ("8 / 2 * 4", "8 / 4 * 2"),
        ("3 + 45x", "4 + 35x"),
        ("1 + 23", "12 + 3"),
        ("3 + 4 of 7", "3 + 7 of 4"),
        ("2 ^ 3 + 1", "2 ^ 1 + 3"),
    ],
)
def test_different_questions_have_different_keys(one, other):
    assert question_key(one) != question_key(other)


@settings(deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5), st.randoms())
def test_order_of_summands_never_matters_and_a_key_is_its_own_key(numbers, random):
    shuffled = random.sample(numbers, len(numbers))
    one, other = (f"Sum: {' + '.join(map(str, terms))} =" for terms in (numbers, shuffled))
    assert question_key(one) == question_key(other) == question_key(question_key(one))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=12, max_size=80),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_held_out_and_training_share_no_question(pairs, count, seed):
    keys = [question_key(f"What is {a} + {b}?") for a, b in pairs]
    if len(set(keys)) <= count:
        return
    training, held_out = split_held_out(keys, count, seed=seed, task="sums")
    assert len(held_out) == count
    assert not {keys[place] for place in training} & {keys[place] for place in held_out}
    assert {keys[place] for place in [*training, *held_out]} == set(keys)
    assert len(training) + len(held_out) == len(set(keys))
    assert training == sorted(training)


def test_choice_depends_on_seed_and_questions_not_on_their_order():
    keys = [f"question {number}" for number in range(100)]
    chosen = {keys[place] for place in split_held_out(keys, 20, seed=0, task="a")[1]}
    backwards = keys[::-1]
    assert chosen == {backwards[place] for place in split_held_out(backwards, 20, seed=0, task="a")[1]}
    assert chosen != {keys[place] for place in split_held_out(keys, 20, seed=1, task="a")[1]}


def test_neighbouring_seeds_of_reasoning_gym_share_questions_but_the_split_does_not():
    import reasoning_gym

    rows = [
        row["question"]
        for seed in (0, 1)
        for row in reasoning_gym.create_dataset("chain_sum", size=40, seed=seed, max_terms=2, max_digits=2)
    ]
    assert rows[1:40] == rows[40:79], "the reason why seeds do not separate"
    keys = [question_key(row) for row in rows]
    training, held_out = split_held_out(keys, 10, seed=0, task="sums")
    assert not {keys[place] for place in training} & {keys[place] for place in held_out}


def test_more_held_out_than_questions_is_refused_with_both_numbers():
    with pytest.raises(
        DataError, match=r"task sums: held_out is 3, but there are only 3 different questions in 4 rows"
    ):
        split_held_out(["a", "b", "c", "a"], 3, seed=0, task="sums")
