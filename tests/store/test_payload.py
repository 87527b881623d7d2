"""Bytes in the store give back the records they were made of, bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.records import Finish, Rollout, Segment
from nearpolicy.store.payload import (
    Trained,
    decode_arrays,
    decode_group,
    decode_json,
    decode_rows,
    decode_segments,
    decode_text,
    encode_arrays,
    encode_group,
    encode_json,
    encode_rows,
    encode_text,
)

any_text = st.text(st.characters(exclude_categories=()))  # surrogates and control characters included
names = st.text(st.characters(exclude_categories=["Cs"]))  # of arrays


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

    of_rollout = Rollout(sample=3, segments=(first, empty), text="", numerics="exact")
    got_first, got_empty = decode_group(encode_group([of_rollout]))[3]

    for name in ("context_ids", "token_ids", "mask", "behavior_logprobs", "versions"):
        assert same_bits(getattr(got_first, name), getattr(first, name)), name
        assert same_bits(getattr(got_empty, name), getattr(empty, name)), name
    assert (got_first.finish, got_empty.finish) == (Finish.ABORTED, Finish.FAILED)
    assert got_first.extras.keys() == first.extras.keys() and not got_empty.extras
    assert all(same_bits(got_first.extras[name], first.extras[name]) for name in first.extras)
    assert not got_first.extras["entropy"].flags.writeable


def test_a_rollout_without_segments_has_none_in_the_container_of_its_group():
    nothing, empty = (Rollout(sample=sample, segments=(), text="", numerics="exact") for sample in range(2))
    assert decode_group(encode_group([])) == decode_group(encode_group([nothing, empty])) == {}


lengths = st.integers(0, 5)


@st.composite
def any_segment(draw) -> Segment:
    tokens, context = draw(lengths), draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = np.random.default_rng(draw(st.integers(0, 9)))
    extras = draw(st.dictionaries(names, st.sampled_from(["bool", "int8", "float64"]), max_size=2))
    return Segment(
        context_ids=context,
        token_ids=numbers.integers(0, 2**31 - 1, tokens),
        mask=numbers.random(tokens) < 0.5,
        behavior_logprobs=numbers.integers(0, 2**32, tokens, np.uint32).view(np.float32),
        versions=numbers.integers(-1, 5, tokens),
        finish=draw(st.sampled_from(Finish)),
        extras={name: numbers.integers(0, 2, (tokens, 2)).astype(kind) for name, kind in extras.items()},
    )


@given(st.dictionaries(st.integers(-1, 9), st.lists(any_segment(), max_size=3), max_size=4))
def test_the_segments_of_a_group_come_back_by_sample_bit_for_bit(told):
    rollouts = [Rollout(sample=s, segments=tuple(each), text="", numerics="exact") for s, each in told.items()]
    got = decode_group(encode_group(rollouts))
    assert got.keys() == {sample for sample, segments in told.items() if segments}
    for sample, segments in got.items():
        for a, b in zip(segments, told[sample], strict=True):
            assert a.finish is b.finish and a.extras.keys() == b.extras.keys()
            for name in ("context_ids", "token_ids", "mask", "behavior_logprobs", "versions"):
                assert same_bits(getattr(a, name), getattr(b, name)), name
            assert all(same_bits(a.extras[name], b.extras[name]) for name in b.extras)


def test_a_prompt_that_a_group_shares_is_stored_once():
    def size(contexts: list[list[int]]) -> int:
        each = Segment(
            context_ids=[], token_ids=[1], mask=[True], behavior_logprobs=[0.0], versions=[0], finish=Finish.STOP
        )
        return len(
            encode_group(
                [
                    Rollout(sample=i, segments=(replace(each, context_ids=context),), text="", numerics="exact")
                    for i, context in enumerate(contexts)
                ]
            )
        )

    assert size([[7] * 1000] * 8) < size([[7] * 1000]) + 1000 < size([[i] * 1000 for i in range(8)]) - 20_000


def test_what_was_trained_of_a_group_comes_back_by_sample_and_segment():
    rows = [
        Trained(2, 1, np.array([True, False]), np.array([0.5, -0.0], np.float32)),
        Trained(0, 0, np.array([True]), np.array([np.nan], np.float32)),
    ]
    got = decode_rows(encode_rows(rows))
    assert list(got) == [(2, 1), (0, 0)]
    for row, arrays in zip(rows, got.values(), strict=True):
        assert same_bits(arrays["trained"], row.trained) and same_bits(arrays["advantages"], row.advantages)
    assert decode_rows(encode_rows([])) == {}


def test_what_schema_3_stored_of_a_rollout_is_read():
    arrays = {
        "0/context_ids": np.arange(3, dtype=np.int32),
        "0/token_ids": np.arange(2, dtype=np.int32),
        "0/behavior_logprobs": np.array([-0.0, np.nan], np.float32),
        "0/versions": np.array([4, -1], np.int32),
        "0/mask": np.array([True, False]),
        "0/extras/kept/ids": np.arange(2.0),
    }
    (got,) = decode_segments(safetensors.numpy.save(arrays, {"finish": "length"}))
    assert got.finish is Finish.LENGTH and list(got.extras) == ["kept/ids"]
    assert same_bits(got.behavior_logprobs, arrays["0/behavior_logprobs"]) and got.versions.tolist() == [4, -1]


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


plain = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans() | st.none() | any_text


@given(st.dictionaries(any_text, plain | st.dictionaries(any_text, plain)))
def test_simple_mappings_are_stored_as_json_writes_them(value):
    expected = json.dumps(value, ensure_ascii=False, allow_nan=False)
    assert encode_json(value) == expected.encode("utf-8", "surrogatepass")


def test_json_is_strict_and_still_says_what_json_cannot():
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = encode_json({"a": math.nan, "b": [math.inf, -math.inf], "c": np.float32(0.5), "d": b"\x00\xff", "e": (1, 2)})
    json.loads(data, parse_constant=refuse)
    got = decode_json(data)
    assert math.isnan(got.pop("a"))
    assert got == {"b": [math.inf, -math.inf], "c": 0.5, "d": b"\x00\xff", "e": [1, 2]}
