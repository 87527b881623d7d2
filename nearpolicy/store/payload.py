"""Records to bytes and back, bit for bit and without pickle.

Arrays travel as safetensors: a NaN keeps its payload, a -0.0 its sign, and any other program can read them. Text
travels as UTF-8 with surrogates passed through. JSON is strict: a float that JSON cannot say is tagged, so that reading
gives it back and no parser stumbles.

    encode_segments(segments) -> bytes -> decode_segments -> equal segments
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from nearpolicy.errors import described
from nearpolicy.records import Finish, Segment


class PayloadError(ValueError):
    """Bytes that were not written here, or are not what was written."""


@contextmanager
def _undamaged() -> Iterator[None]:
    try:
        yield
    except PayloadError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise PayloadError(f"stored values cannot be read ({described(error)})") from error


_ARRAYS = ("context_ids", "token_ids", "behavior_logprobs", "versions", "mask")
"""Wide numbers first, see `_wide_first`."""


def encode_segments(segments: Sequence[Segment]) -> bytes:
    """One safetensors container for all segments of a rollout: ``0/mask``, ``0/extras/<name>``, ``1/token_ids``."""
    arrays: dict[str, np.ndarray] = {}
    for place, segment in enumerate(segments):
        for name, key in zip(_ARRAYS, _keys(place), strict=True):
            arrays[key] = getattr(segment, name)
        for name, values in segment.extras.items():
            arrays[f"{place}/extras/{name}"] = values
    return _container(arrays, {"finish": ",".join(segment.finish.value for segment in segments)})


@lru_cache(maxsize=256)
def _keys(place: int) -> tuple[str, ...]:
    return tuple(f"{place}/{name}" for name in _ARRAYS)


@_undamaged()
def decode_segments(data: bytes) -> tuple[Segment, ...]:
    arrays = decode_arrays(data)
    # safetensors.numpy.load drops the metadata, which stands in the header: eight bytes of length, then JSON.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    finishes = [Finish(word) for word in header["__metadata__"]["finish"].split(",") if word]
    return tuple(
        Segment(
            **{name: arrays[f"{place}/{name}"] for name in _ARRAYS},
            finish=finish,
            extras={
                name.removeprefix(f"{place}/extras/"): values
                for name, values in arrays.items()
                if name.startswith(f"{place}/extras/")
            },
        )
        for place, finish in enumerate(finishes)
    )


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    return _container(arrays, None)


@_undamaged()
def decode_arrays(data: bytes) -> dict[str, np.ndarray]:
    arrays = safetensors.numpy.load(data)
    for values in arrays.values():
        values.setflags(write=False)
    return arrays


def _container(arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None) -> bytes:
    """In the format of safetensors, which reads it back. Written here, because a group has dozens of small arrays, and
    `safetensors.numpy.save` takes several times as long for one as SQLite for storing it."""
    for name, values in arrays.items():
        if not isinstance(values, np.ndarray) or _kind(values) not in _NAMES:
            kind = f"dtype {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
            raise TypeError(f"array {name!r} is of {kind}; the store keeps bool, integer and float numpy arrays")
    ordered = sorted(arrays.items(), key=_wide_first)
    shapes = tuple((name, _kind(values), values.shape) for name, values in ordered)
    header = _header(shapes, tuple((metadata or {}).items()))
    return b"".join([header, *(_little_endian(values).tobytes() for _, values in ordered)])


def _little_endian(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.isnative and _NATIVE else values.astype(values.dtype.newbyteorder("<"))


_NATIVE = sys.byteorder == "little"


def _wide_first(item: tuple[str, np.ndarray]) -> tuple[int, str]:
    """So that each array lies where its numbers may lie."""
    return -item[1].dtype.itemsize, item[0]


def _kind(values: np.ndarray) -> tuple[str, int]:
    return values.dtype.kind, values.dtype.itemsize  # the name of a dtype is put together anew each time


@lru_cache(maxsize=4096)
def _header(
    arrays: tuple[tuple[str, tuple[str, int], tuple[int, ...]], ...], metadata: tuple[tuple[str, str], ...]
) -> bytes:
    """Eight bytes of length, then JSON: name -> type, shape, from where to where. Most rollouts share theirs."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, kind, shape in arrays:
        begin, end = end, end + kind[1] * math.prod(shape)
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_NAMES = {("b", 1): "BOOL"}
_NAMES |= {(kind, size): f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)}
_NAMES |= {("f", size): f"F{8 * size}" for size in (2, 4, 8)}


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@_undamaged()
def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def encode_json(value: Any) -> bytes:
    """Strict JSON. Tuples become lists, numpy values plain ones; what has no JSON form is kept as its ``repr``."""
    if isinstance(value, Mapping) and all(type(k) is str and type(v) in _SIMPLE for k, v in value.items()):
        with suppress(ValueError):  # a number that JSON cannot say
            return encode_text(_ENCODE(dict(value)))
    return encode_text(_ENCODE(_plain(value)))


@_undamaged()
def decode_json(data: bytes) -> Any:
    return json.loads(decode_text(data), object_hook=_untag)


_SIMPLE = {str, int, float, bool, type(None)}
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    return {"$repr": repr(value)}


def _untag(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        if isinstance(value.get("$float"), str):
            return float(value["$float"])
        if isinstance(value.get("$bytes"), str):
            return base64.b64decode(value["$bytes"])
    return value
