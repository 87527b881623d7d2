"""Records as messages between processes: a head of bytes, and parcels that the head refers to.

    pack(value) -> Message             arrays that are distant stay where they are, the message names their parcels
    unpack(head, parcels)              for who directs: distant again
    unpack(head, bytes of parcels)     for who computes: arrays

What is the same for many tokens (versions, masks, advantages of a whole completion) goes as runs, not token by token.
A message is a pickle: it travels between processes of one run, and is never read from anywhere else.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from nearpolicy.distant import Distant, Parcel, array_in, constant
from nearpolicy.records import Finish, Row, Segment, all_chosen, read_only

MOST_RUNS = 8
"""Of one array; one with more goes as it is."""
_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)
_BITS = {_INT32: _INT32, _FLOAT32: _INT32, _BOOL: np.dtype(np.uint8)}
"""Types that are cut into runs -> what their bits are compared as: 0.0 is not -0.0."""
_FINISHES = tuple(Finish)
_PLACE_OF = {finish: place for place, finish in enumerate(_FINISHES)}


@dataclass(frozen=True, slots=True)
class Message:
    head: bytes
    parcels: tuple[Parcel, ...] = ()
    """In the order in which the head counts them."""


Reduce = Callable[[Any], tuple[Any, ...]]
"""An object -> what makes it again, as `object.__reduce__` says it."""


def pack(value: Any, also: Mapping[type, Reduce] | None = None) -> Message:
    """Records, and what else can be pickled; functions and classes of a script too, which takes longer. ``also``: how
    further types travel."""
    reduced = {**_REDUCED, **(also or {})}
    try:
        return _packed(value, pickle.Pickler, {**copyreg.dispatch_table, **reduced})
    except (TypeError, AttributeError, pickle.PicklingError):  # something is not to be found by its name
        import cloudpickle

        return _packed(value, cloudpickle.Pickler, {**cloudpickle.Pickler.dispatch_table, **reduced})


def _packed(value: Any, kind: type[pickle.Pickler], known: Mapping[type, Any]) -> Message:
    file, parcels = io.BytesIO(), _Parcels()
    packer = kind.__new__(kind)
    packer.dispatch_table = {**known, Distant: parcels.reduced}  # where picklers look for it when they begin
    packer.__init__(file, protocol=5)
    packer.dump(value)
    return Message(file.getvalue(), tuple(parcels.found))


def unpack(head: bytes, parcels: Sequence[Parcel | np.ndarray]) -> Any:
    """``parcels``: as the message names them, or what is in them, [N] uint8 each."""
    return _Unpacker(io.BytesIO(head), parcels).load()


class _Parcels:
    """Those of one message."""

    def __init__(self) -> None:
        self.found: list[Parcel] = []
        self._numbers: dict[int, int] = {}

    def reduced(self, array: Distant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        number = self._numbers.get(id(array.parcel))
        if number is None:
            number = self._numbers[id(array.parcel)] = len(self.found)
            self.found.append(array.parcel)
        return _brought, (number, array.offset, array.shape, array.dtype.str)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parcels: Sequence[Parcel | np.ndarray]) -> None:
        super().__init__(file)
        self._parcels = parcels

    def find_class(self, module: str, name: str) -> Any:
        if name == "_brought" and module == __name__:
            return self._brought
        return super().find_class(module, name)

    def _brought(self, number: int, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        parcel = self._parcels[number]
        if isinstance(parcel, np.ndarray):
            return array_in(parcel, offset, shape, np.dtype(dtype))
        return Distant(parcel, offset, shape, np.dtype(dtype))


def _brought(*place: Any) -> Any:
    raise pickle.UnpicklingError("a message with parcels is read by `nearpolicy.messages.unpack`")


def _array(array: np.ndarray) -> tuple[Any, ...]:
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        return array.__reduce_ex__(5)
    return _made_array, (array.tobytes(), array.dtype.str)


def _made_array(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, dtype)


def _segment(segment: Segment) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    mask, length = segment.mask, len(segment.token_ids)
    return _made_segment, (
        segment.context_ids,
        segment.token_ids,
        segment.num_sampled,
        None if segment.num_sampled == length else runs(mask),
        segment.behavior_logprobs,
        runs(segment.versions),
        _PLACE_OF[segment.finish],
        dict(segment.extras) or None,
    )


def _made_segment(
    context: Any,
    tokens: Any,
    num_sampled: int,
    mask: Any,
    logprobs: Any,
    versions: Any,
    finish: int,
    extras: Mapping[str, Any] | None,
) -> Segment:
    return Segment.counted(
        num_sampled,
        context_ids=context,
        token_ids=tokens,
        mask=all_chosen(num_sampled) if mask is None else from_runs(mask),
        behavior_logprobs=logprobs,
        versions=from_runs(versions),
        finish=_FINISHES[finish],
        extras=extras or {},
    )


def _row(row: Row) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    trained = None if row.trained is row.segment.mask else runs(row.trained)
    counts = row.num_trained, row.num_useful
    return _made_row, (row.group, row.sample, row.segment, trained, runs(row.advantages), row.replayed, *counts)


def _made_row(
    group: int, sample: int, segment: Segment, trained: Any, advantages: Any, replayed: bool, *counts: int
) -> Row:
    return Row.counted(
        *counts,
        group=group,
        sample=sample,
        segment=segment,
        trained=segment.mask if trained is None else from_runs(trained),
        advantages=from_runs(advantages),
        replayed=replayed,
    )


_REDUCED: Mapping[type, Reduce] = {
    np.ndarray: _array,
    Segment: _segment,
    Row: _row,
    MappingProxyType: lambda mapping: (_unchangeable, (dict(mapping),)),  # the type has no name that pickle finds
}


def _unchangeable(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


Runs = tuple[str, list[int], list[int]]
"""Type, bits of each run, length of each."""


def runs(array: np.ndarray | Distant) -> Runs | np.ndarray | Distant:
    """[T] of few values one after the other as that; any other array as it is."""
    kind = None if type(array) is Distant else _BITS.get(array.dtype)
    if kind is None or not len(array):
        return array
    if array.strides == (0,):
        return array.dtype.str, [int(array[0].view(kind))], [len(array)]
    bits = array.view(kind)
    changes = np.flatnonzero(bits[1:] != bits[:-1])
    if len(changes) >= MOST_RUNS:
        return array
    ends = [*(changes + 1).tolist(), len(bits)]
    begins = [0, *ends[:-1]]
    return array.dtype.str, bits[begins].tolist(), [end - begin for begin, end in zip(begins, ends, strict=True)]


def from_runs(told: Runs | np.ndarray | Distant) -> np.ndarray | Distant:
    """The array, which nobody can write to."""
    if type(told) is not tuple:
        return told if type(told) is Distant else read_only(told, told.dtype)
    name, bits, lengths = told
    dtype = np.dtype(name)
    if len(bits) == 1:
        return constant(bits[0], lengths[0], _BITS[dtype]).view(dtype)
    array = np.repeat(np.array(bits, _BITS[dtype]), lengths).view(dtype)
    array.setflags(write=False)
    return array
