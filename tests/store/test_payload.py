"""Bytes in the store give back the records they were made of, bit for bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.records import Finish, Segment
from nearpolicy.store.payload import (
    decode_arrays,
    decode_json,
    decode_segments,
    decode_text,
    encode_arrays,
    encode_json,
    encode_segments,
    encode_text,
)

any_text = st.text(st.characters(exclude_categories=()))  # surrogates and control characters included


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_segments_come_back_bit_for_bit_with_nan_payload_and_negative_zero():
    logprobs = np.array([0x7FC00123, 0x80000000, 0xFF800000, 0x00000001], np.uint32).view(np.float32)
    wide = np.arange(8, dtype=np.int64)[::2]  # not contiguous
    first = Segment(
        context_ids=[1, 2, 3],
        token_ids=[5, 2**31 - 1, 0, 7],
        mask=[True, False, True, True],
        behavior_logprobs=logprobs,
        versions=[3, -1, 4, 4],
        finish=Finish.ABORTED,
        extras={"kept/ids": wide, "entropy": np.array([0.1, np.nan, -0.0, 1e-310])},
    )
    empty = Segment(context_ids=[], token_ids=[], mask=[], behavior_logprobs=[], versions=[], finish=Finish.FAILED)

    got_first, got_empty = decode_segments(encode_segments([first, empty]))

    for name in ("context_ids", "token_ids", "mask", "behavior_logprobs", "versions"):
        assert same_bits(getattr(got_first, name), getattr(first, name)), name
        assert same_bits(getattr(got_empty, name), getattr(empty, name)), name
    assert (got_first.finish, got_empty.finish) == (Finish.ABORTED, Finish.FAILED)
    assert got_first.extras.keys() == first.extras.keys() and not got_empty.extras
    assert all(same_bits(got_first.extras[name], first.extras[name]) for name in first.extras)
    assert not got_first.extras["entropy"].flags.writeable


def test_a_rollout_without_segments_is_kept():
    assert decode_segments(encode_segments([])) == ()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", ">f4", ">i8"])
def test_arrays_of_every_plain_dtype_are_kept(dtype):
    values = np.array([[0, 1], [2, 3]]).astype(dtype)
    got = decode_arrays(encode_arrays({"x": values}))["x"]
    assert same_bits(got, values.astype(values.dtype.newbyteorder("=")))


def test_an_array_that_would_need_pickle_is_refused_by_name():
    with pytest.raises(TypeError, match="'notes' is of dtype object"):
        encode_arrays({"notes": np.array([{}, None])})


@given(any_text)
def test_any_text_comes_back(text):
    assert decode_text(encode_text(text)) == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | any_text, lambda x: st.lists(x) | st.dictionaries(any_text, x)
    )
)
def test_any_json_value_comes_back_with_any_text_in_it(value):
    assert decode_json(encode_json(value)) == value


def test_json_is_strict_and_still_says_what_json_cannot():
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = encode_json({"a": math.nan, "b": [math.inf, -math.inf], "c": np.float32(0.5), "d": b"\x00\xff", "e": (1, 2)})
    json.loads(data, parse_constant=refuse)
    got = decode_json(data)
    assert math.isnan(got.pop("a"))
    assert got == {"b": [math.inf, -math.inf], "c": 0.5, "d": b"\x00\xff", "e": [1, 2]}
