"""What travels between a program and its judge, and when it is what was expected."""

from __future__ import annotations

import collections
import contextlib
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.verifier.sandbox import values
from nearpolicy.verifier.sandbox.comparison import same_text, same_value

keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False))
leaves = st.one_of(keys, st.complex_numbers(allow_nan=False), st.binary().map(bytearray))
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.sets(keys),
        st.frozensets(keys),
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_travel_with_their_types(value):
    returned = values.loads(values.dumps(value))
    assert repr(returned) == repr(value) or same_value(value, returned)
    assert type(returned) is type(value)


@given(plain)
def test_a_value_is_what_it_is(value):
    assert same_value(value, value)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_value_are_told_and_never_raise_otherwise(data):
    with contextlib.suppress(ValueError):
        values.loads(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000, b'{"$":"set","v":[[1]]}', b'{"$":"dict","v":[[1]]}', b'{"$":"exec","v":"1"}', b'{"$":"int"}',
        b'{"$":"int","v":1}', b'{"$":"bytes","v":"zz"}', b'{"$":"complex","v":[]}', b'{"$":["a"],"v":1}', b"\xff", b"",
        b"1" * 10_000, b'{"$":"tuple","v":' * 200, b'{"$":"float","v":1' + b"0" * 400 + b"}",
        b'{"$":"complex","v":[1' + b"0" * 400 + b",0]}", b'{"$":"dict","v":["ab"]}', b"[" * 66 + b"]" * 66,
        "[1]".encode("utf-16"),
    ],
)  # fmt: skip
def test_what_no_honest_harness_writes_is_refused(data):
    with pytest.raises(ValueError):
        values.loads(data)


class Chameleon(int):
    def __eq__(self, other):
        return True

    def __add__(self, other):
        return 42

    def __index__(self):
        return 42

    __hash__ = int.__hash__

    @property
    def __class__(self):
        return str


class Loud(str):
    def __str__(self):
        return "expected"

    def __getitem__(self, key):
        return "expected"


class Twice(list):
    def __iter__(self):
        return iter([1, 2, 3])


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (Chameleon(7), 7), (Loud("found"), "found"), (Twice([9]), [9]), (Point(1, 2), (1, 2)),
        (collections.Counter("aab"), {"a": 2, "b": 1}), (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
    ids=["int", "str", "list", "namedtuple", "Counter", "OrderedDict"],
)  # fmt: skip
def test_a_subclass_travels_as_its_builtin_base_whatever_it_claims(value, base):
    returned = values.loads(values.dumps(value))
    assert type(returned) is type(base)
    assert returned == base


@pytest.mark.parametrize("value", [object(), len, (x for x in ()), type, range(3), [object()], {1: map(str, ())}])
def test_what_is_no_plain_value_does_not_travel(value):
    with pytest.raises(values.NotPlain):
        values.dumps(value)


def test_a_value_that_holds_itself_does_not_travel():
    own: list = []
    own.append(own)
    with pytest.raises(values.NotPlain, match="deeper than 64"):
        values.dumps(own)


def test_what_can_be_read_can_be_written():
    deepest = values.loads(b"[" * 65 + b"]" * 65)
    assert values.loads(values.dumps(deepest)) == deepest


def test_what_is_nested_too_deeply_is_not_even_parsed(monkeypatch):
    def parsed(_):
        raise AssertionError

    monkeypatch.setattr(values.json, "loads", parsed)
    for data in (b"[" * 1_000_000, b'{"a":' * 200_000, b'["]]]"' * 300, b'{"$":"tuple","v":[' * 300):
        with pytest.raises(ValueError, match="nested too deeply"):
            values.loads(data)


def test_brackets_in_text_are_text():
    value = ["[{" * 500, '"[' * 500, "\\" * 99 + "[" * 500, {"]" * 300: "}" * 300}]
    assert values.loads(values.dumps(value)) == value


def test_members_that_all_have_one_hash_are_refused_at_once():
    alike = [str(each * (2**61 - 1)) for each in range(50_000)]
    pairs = [f"[{each},0]" for each in alike]
    begin = time.perf_counter()
    for tag, items in (("set", alike), ("frozenset", alike), ("dict", pairs)):
        with pytest.raises(ValueError, match="same hash"):
            values.loads(f'{{"$":"{tag}","v":[{",".join(items)}]}}'.encode())
    assert time.perf_counter() - begin < 5
    many = {each * 2**32 for each in range(10_000)}
    assert values.loads(values.dumps(many)) == many


def test_an_int_of_any_length_travels():
    assert values.loads(values.dumps(10**20_000)) == 10**20_000


# K43: numbers with a decimal point have a tolerance, whole ones are exact, trailing white space is ignored


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("2.718281828", "2.7182818"), ("1 2", "1 2 \n"), ("a\nb\n", "a\nb"), ("a\nb", "a  \nb\t\n\n\n"), ("", "\n\n"),
        ("3.0", "3"), ("1e3", "1000"), ("0.5 x 2", "0.5000001 x 2"), ("a\r\nb", "a\nb"), ("-0.0", "0"), ("1e-9", "0.0"),
        ("inf", "inf"), ("nan", "nan"), ("1.5  2", "1.5 2"),
    ],
)  # fmt: skip
def test_printed_text_that_is_right(expected, found):
    """K43."""
    assert same_text(expected, found)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("2.718281828", "2.7183"), ("1 2", "12"), ("1 2", "1  2"), ("10000000000000000", "10000000000000001"),
        ("3", "3.0"), ("a\nb", "a b"), ("a", "a\nb"), ("a\n\nb", "a\nb"), (" a", "a"), ("\na", "a"), ("0.5", "0,5"),
        ("1.0", "1.0 1.0"), ("1.0", "nan"), ("1.0", "inf"), ("1.0", "1.0.0"), ("yes 1.0", "no 1.0"), ("A", "a"),
        ("1.0", "1_0"), ("1.0", "0x1"), ("", "0"), ("1.0", "١.٠"), ("9" * 500 + ".0", "1" + "9" * 499 + ".0"),
    ],
)  # fmt: skip
def test_printed_text_that_is_not(expected, found):
    """K43."""
    assert not same_text(expected, found)


@pytest.mark.parametrize(
    ("expected", "found"),
    [(0.1 + 0.2, 0.3), (1.0, 1), ([1.0, "a"], [1.0000001, "a"]), ({"a": 0.5}, {"a": 0.5000001}), (math.inf, math.inf)],
)
def test_values_that_are_right(expected, found):
    assert same_value(expected, found)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (1, True), (True, 1), (1, 1.0), (0, False), ("1", 1), ([1], (1,)), ((1,), [1]), ([1, 2], [1]),
        ({"a": 1}, [("a", 1)]),
        ({1: "a"}, {True: "a"}), ({1}, {True}), ({1}, {1.0}), ({1}, frozenset({1})), (b"a", "a"), (None, 0),
        (None, False), ({(1,)}, {(True,)}), ({frozenset({1})}, {frozenset({1.0})}), ({(1, (2,))}, {(1, (2.0,))}),
        (1.0, True), (math.nan, math.nan), (0.5, 10**400), (10**16, 10**16 + 1), ([], None), ("", None), ({}, set()),
        ([[1]], [[True]]), ("a", "a "), ({"a": 1}, {"a": 1, "b": 2}),
    ],
)  # fmt: skip
def test_values_that_are_not(expected, found):
    assert not same_value(expected, found)
