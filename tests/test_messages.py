"""Records between processes: what stays elsewhere, what comes out bit for bit, and how little of it travels."""

from __future__ import annotations

import gc
import pickle
import weakref
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nearpolicy.distant import Distant, Loading
from nearpolicy.messages import from_runs, pack, runs, unpack
from nearpolicy.records import Finish, Prompt, Row, Segment, Verdict, read_only


class Kept:
    """A parcel that counts how often it is read."""

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.reads = 0

    def read(self) -> np.ndarray:
        self.reads += 1
        return self.data


def distant_segment(length: int) -> tuple[Segment, Kept, dict[str, np.ndarray]]:
    near = {"token_ids": np.arange(length, dtype=np.int32), "behavior_logprobs": -np.arange(length, dtype=np.float32)}
    loading = Loading()
    places = {name: loading.add([values]) for name, values in near.items()}
    parcel = Kept(loading.data())
    far = {name: Distant(parcel, places[name], (length,), values.dtype) for name, values in near.items()}
    segment = Segment(
        context_ids=np.array([7, 8, 9]),
        mask=np.ones(length, bool),
        versions=np.full(length, 3),
        finish=Finish.STOP,
        **far,
    )
    return segment, parcel, near


def row_of(segment: Segment) -> Row:
    advantages = np.full(len(segment.token_ids), 0.5)
    return Row(group=4, sample=1, segment=segment, trained=segment.mask, advantages=advantages)


@pytest.mark.parametrize("value", [None, lambda: None], ids=["records", "a function of a script too"])
def test_a_message_that_is_gone_holds_no_parcel(value):
    """At once, and not when garbage is looked for: parcels are large."""
    segment, parcel, _ = distant_segment(10)
    message = pack([row_of(segment), value])
    assert message.parcels == (parcel,)
    left = weakref.ref(parcel)
    gc.disable()
    try:
        del segment, parcel, message
        assert left() is None
    finally:
        gc.enable()


def test_who_directs_passes_tokens_on_without_looking_at_them():
    segment, parcel, near = distant_segment(1000)
    message = pack([row_of(segment)])
    [again] = unpack(message.head, message.parcels)
    [further] = unpack(*reversed([pack([again]).parcels, pack([again]).head]))
    assert message.parcels == (parcel,) and parcel.reads == 0
    assert (further.segment.num_sampled, further.num_trained, further.num_useful) == (1000, 1000, 1000)
    assert type(further.segment.token_ids) is Distant

    [here] = unpack(message.head, [parcel.data])
    for name, values in near.items():
        np.testing.assert_array_equal(getattr(here.segment, name), values)
    np.testing.assert_array_equal(here.advantages, np.full(1000, 0.5, np.float32))


def test_a_message_is_no_longer_for_longer_completions():
    short, long = (len(pack(row_of(distant_segment(n)[0])).head) for n in (10, 100_000))
    assert long < short + 50


def test_a_distant_array_is_fetched_where_its_numbers_are_needed():
    segment, parcel, near = distant_segment(5)
    assert len(segment.token_ids) == 5 and parcel.reads == 0
    np.testing.assert_array_equal(segment.token_ids[segment.mask], near["token_ids"])
    assert list(segment.token_ids) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(np.concatenate([segment.token_ids, [9]]), [0, 1, 2, 3, 4, 9])
    assert not np.asarray(segment.token_ids).flags.writeable


def test_it_may_not_be_of_another_type_than_the_record_wants():
    _, parcel, _ = distant_segment(5)
    far = Distant(parcel, 0, (5,), np.dtype(np.int32))
    assert read_only(far, np.int32) is far
    assert read_only(far, np.float32).dtype == np.float32  # fetched, and converted as any other array


def test_arrays_of_all_widths_lie_where_their_numbers_may():
    loading, values = Loading(), [np.arange(3, dtype=kind) for kind in ("u1", "i4", "f8", "i2", "f4")]
    places = [loading.add([each]) for each in values]
    parcel = Kept(loading.data())
    for at, each in zip(places, values, strict=True):
        assert at % 8 == 0
        np.testing.assert_array_equal(Distant(parcel, at, each.shape, each.dtype), each)


KINDS = st.sampled_from([np.int32, np.float32, np.bool_])


@given(KINDS.flatmap(lambda kind: arrays.arrays(kind, st.integers(0, 30))))
def test_runs_are_the_array_bit_for_bit(array):
    again = from_runs(pickle.loads(pickle.dumps(runs(array))))
    assert again.dtype == array.dtype and again.tobytes() == array.tobytes()


@pytest.mark.parametrize("values", [[0.0, -0.0, 0.0], [np.nan, np.nan], [1.0] * 9, list(range(9)), []])
def test_signs_of_zero_and_numbers_that_are_none_stay(values):
    array = np.array(values, np.float32)
    assert from_runs(runs(array)).tobytes() == array.tobytes()


def test_what_plain_pickle_refuses_travels_all_the_same():
    segment, _, _ = distant_segment(3)
    message = pack((segment, lambda: 5, MappingProxyType({"a": 1})))
    assert len(message.parcels) == 1
    found, function, mapping = unpack(message.head, message.parcels)
    assert (found.num_sampled, function(), dict(mapping)) == (3, 5, {"a": 1})


def test_a_message_with_parcels_is_read_with_them_alone():
    segment, _, _ = distant_segment(3)
    with pytest.raises(pickle.UnpicklingError, match="unpack"):
        pickle.loads(pack(segment).head)


def test_records_need_no_more_than_plain_pickle(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    segment, _, _ = distant_segment(3)
    pack([row_of(segment), Verdict.scored(1.0, part=0.5), Prompt(id="a", task="t", text="?", columns={"answer": "4"})])
