"""What has changed between two versions of a tensor, without loss and in few bytes.

Bits are compared, not values, so that -0.0 and NaN survive. Each tensor takes the smallest of

- ``same``: nothing changed, no bytes;
- ``indices``: the gaps between changed elements, one byte each (255: so many unchanged ones, and the gap goes on), and
  the changed bits of each, compressed;
- ``xor``: the changed bits of all elements, compressed;
- ``raw``: the new bytes.

Bits are compressed byte by byte of the elements, all first bytes together, then all second ones: after a small update
the high bytes are nearly all zero.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from torch import Tensor

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import bytes_of

_LEVEL = 1
"""Of zstd: higher ones save a few percent and take several times as long."""
_LONG = 255
_FEW = 0.25
"""Share of changed elements from which positions are not worth writing down."""


def encode(old: Tensor, new: Tensor) -> tuple[str, bytes]:
    """Method and bytes that make ``new`` out of ``old``; both contiguous, of one shape and dtype, on the CPU."""
    bits = _bits(new)
    changed = _bits(old) ^ bits
    where = np.flatnonzero(changed)
    if not len(where):
        return "same", b""
    found = {"raw": bits.tobytes(), "xor": _compressed(_planes(changed))}
    if len(where) < _FEW * len(changed):
        gaps = _gaps(where)
        lead = np.array([len(where), len(gaps)], dtype="<i8").tobytes()
        found["indices"] = lead + _compressed(gaps.tobytes() + _planes(changed[where]))
    method = min(found, key=lambda name: len(found[name]))
    return method, found[method]


def apply(method: str, data: bytes, tensor: Tensor) -> None:
    """Turn the old tensor into the new one, in place. `SyncError` for bytes that are no change of it."""
    bits = _bits(tensor)
    try:
        if method == "raw":
            bits[:] = np.frombuffer(data, dtype=bits.dtype)
        elif method == "xor":
            bits ^= _from_planes(_expanded(data, bits.nbytes), bits.dtype)
        elif method == "indices":
            count, tokens = (int(n) for n in np.frombuffer(data[:16], dtype="<i8"))
            if not (0 <= count <= len(bits) and 0 <= tokens <= count + len(bits) // _LONG):
                raise ValueError(f"{count} changes at {tokens} places, of {len(bits)} elements")
            plain = _expanded(data[16:], tokens + count * bits.itemsize)
            where = _positions(np.frombuffer(plain[:tokens], dtype=np.uint8))
            bits[where] ^= _from_planes(plain[tokens:], bits.dtype)
        elif method != "same":
            raise SyncError(f"a change of weights is written as {method!r}, which this version does not know")
    except (ValueError, IndexError, OSError) as error:
        raise SyncError(f"a change of weights cannot be read: {error}") from None


def _bits(tensor: Tensor) -> np.ndarray:
    """The elements as unsigned integers, sharing memory."""
    return bytes_of(tensor.detach()).numpy().view(f"<u{tensor.element_size()}")


def _planes(bits: np.ndarray) -> bytes:
    return np.ascontiguousarray(bits.view(np.uint8).reshape(-1, bits.itemsize).T).tobytes()


def _from_planes(data: bytes, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _gaps(where: np.ndarray) -> np.ndarray:
    """Unchanged elements before each changed one, as bytes."""
    gaps = np.diff(where, prepend=-1) - 1
    long = gaps // _LONG
    found = np.full(len(gaps) + int(long.sum()), _LONG, dtype=np.uint8)
    found[np.cumsum(long + 1) - 1] = gaps % _LONG
    return found


def _positions(gaps: np.ndarray) -> np.ndarray:
    ends = gaps != _LONG
    return (np.cumsum(gaps.astype(np.int64) + ends) - 1)[ends]


def _compressed(data: bytes) -> bytes:
    return pa.Codec("zstd", _LEVEL).compress(data, asbytes=True)


def _expanded(data: bytes, size: int) -> bytes:
    return pa.Codec("zstd").decompress(data, size, asbytes=True)
