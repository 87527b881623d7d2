"""Arrays that lie elsewhere: whoever directs a run handles groups of tokens without holding the tokens.

parcel   the arrays of one message end to end, kept somewhere until nobody refers to them
Distant  one of them: it has a length and a type here, and is fetched when somebody looks into it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

ALIGNED = 8
"""Bytes: an array begins at a multiple of them, where numbers of any width may lie."""


class Parcel(Protocol):
    """Where bytes are to be had. Cheap to hold."""

    def read(self) -> np.ndarray:
        """[N] uint8, all of it, which nobody can write to; waits until it is here."""
        ...


@dataclass(slots=True, eq=False)
class Distant:
    """An array in a parcel. Takes the place of a numpy array in a record: numpy fetches it where it needs the numbers,
    and so does an index. Nobody changes one; to be frozen would make each of them slower to build."""

    parcel: Parcel
    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = array_in(self.parcel.read(), self.offset, self.shape, self.dtype)
        return np.array(found, dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __iter__(self) -> Any:
        return iter(np.asarray(self))


def array_in(data: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A view of bytes."""
    if 0 in shape:
        return nothing(shape, dtype)
    if len(shape) == 1:  # nearly all of them
        return np.frombuffer(data, dtype, shape[0], offset)
    return np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)


def nothing(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without elements, which nobody can write to."""
    return np.frombuffer(b"", dtype).reshape(shape)


def placed(parcel: Parcel | None, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Distant | np.ndarray:
    """An array in a parcel, which is None where there is nothing to keep; one without elements is here."""
    return nothing(shape, dtype) if parcel is None or 0 in shape else Distant(parcel, offset, shape, dtype)


class Loading:
    """A parcel that is being filled."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.num_bytes = 0

    def add(self, arrays: Sequence[np.ndarray]) -> int:
        """One behind the other, without a gap; where the first one begins. All of one type."""
        begin = self.num_bytes
        pieces = [array.tobytes() for array in arrays]
        length = sum(map(len, pieces))
        gap = -length % ALIGNED
        self._pieces += [*pieces, bytes(gap)]
        self.num_bytes += length + gap
        return begin

    def data(self) -> bytes:
        return b"".join(self._pieces)


@functools.lru_cache(maxsize=4096)
def constant(value: int, length: int, dtype: np.dtype) -> np.ndarray:
    """[length] of one value; made once."""
    return same(dtype.type(value), length)


def same(value: np.generic, length: int) -> np.ndarray:
    """[length] of one number, in the memory of one; nobody can write to it."""
    return np.ndarray((length,), value.dtype, value.tobytes(), strides=(0,))
