"""Records to bytes and back, bit for bit and without pickle.

Arrays travel as safetensors: a NaN keeps its payload, a -0.0 its sign, and any other program can read them. Text
travels as UTF-8 with surrogates passed through. JSON is strict: a float that JSON cannot say is tagged, so that reading
gives it back and no parser stumbles.

    encode_group(rollouts) -> bytes -> decode_group -> sample -> equal segments        one container for a whole group
    encode_rows(rows)      -> bytes -> decode_rows  -> (sample, segment) -> equal arrays
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from nearpolicy.errors import described
from nearpolicy.records import Finish, Rollout, Segment


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


_DTYPES = {"token_ids": "I32", "behavior_logprobs": "F32", "versions": "I32", "mask": "BOOL"}
_OF_TOKENS = tuple(_DTYPES)
_ARRAYS = ("context_ids", *_OF_TOKENS)
_FINISHES = (Finish.STOP, Finish.LENGTH, Finish.ABORTED, Finish.FAILED)
"""By the number that stands for each in a container."""


def encode_group(rollouts: Sequence[Rollout]) -> bytes:
    """All segments of a group, laid end to end in one array of each name; equal contexts, as those of a shared prompt,
    stand there once. ``segments`` says of each: sample, tokens, where its context begins, its length, the finish."""
    contexts: dict[bytes, int] = {}
    table: list[int] = []
    parts: dict[str, list[bytes]] = {name: [] for name in _OF_TOKENS}
    ids, logprobs, versions, masks = parts.values()
    extras: dict[str, np.ndarray] = {}
    end = num_tokens = 0
    for rollout in rollouts:
        for segment in rollout.segments:
            context, length, tokens = _bytes(segment.context_ids), len(segment.context_ids), len(segment.token_ids)
            begin = contexts.setdefault(context, end)
            end += length if begin == end else 0
            if segment.extras:
                extras |= {f"extras/{len(table) // 5}/{name}": values for name, values in segment.extras.items()}
            table += (rollout.sample, tokens, begin, length, _FINISHES.index(segment.finish))
            ids.append(_bytes(segment.token_ids))
            logprobs.append(_bytes(segment.behavior_logprobs))
            versions.append(_bytes(segment.versions))
            masks.append(_bytes(segment.mask))
            num_tokens += tokens
    laid_out = [
        ("segments", "I32", (len(table) // 5, 5), _bytes(np.array(table, np.int32))),
        ("context_ids", "I32", (end,), b"".join(contexts)),
        *((name, _DTYPES[name], (num_tokens,), b"".join(parts[name])) for name in _OF_TOKENS),
    ]
    if extras:
        laid_out = sorted([*laid_out, *map(_laid_out, extras.items())], key=_wide_first)
    return _container(laid_out)


@_undamaged()
def decode_group(data: bytes) -> dict[int, tuple[Segment, ...]]:
    """Sample -> its segments; a rollout without any is not there."""
    arrays = decode_arrays(data)
    extras: dict[int, dict[str, np.ndarray]] = {}
    for key, values in arrays.items():
        if key.startswith("extras/"):
            _, place, name = key.split("/", 2)
            extras.setdefault(int(place), {})[name] = values
    found: dict[int, list[Segment]] = {}
    begin = 0
    for place, (sample, length, context, context_length, finish) in enumerate(arrays["segments"].tolist()):
        segment = Segment(
            context_ids=arrays["context_ids"][context : context + context_length],
            **{name: arrays[name][begin : begin + length] for name in _OF_TOKENS},
            finish=_FINISHES[finish],
            extras=extras.get(place, {}),
        )
        found.setdefault(sample, []).append(segment)
        begin += length
    return {sample: tuple(segments) for sample, segments in found.items()}


class Trained(NamedTuple):
    """A row without its segment."""

    sample: int
    place: int
    """Of the segment in its rollout."""
    trained: Any
    """[T] bool, perhaps distant."""
    advantages: Any
    """[T] float32, likewise."""


def encode_rows(rows: Sequence[Trained]) -> bytes:
    """What was trained of a group. The array ``rows`` says: sample, place, tokens."""
    table = [number for row in rows for number in (row.sample, row.place, len(row.trained))]
    num_tokens = sum(len(row.trained) for row in rows)
    return _container(
        [
            ("rows", "I32", (len(rows), 3), _bytes(np.array(table, np.int32))),
            ("advantages", "F32", (num_tokens,), b"".join([_bytes(row.advantages) for row in rows])),
            ("trained", "BOOL", (num_tokens,), b"".join([_bytes(row.trained) for row in rows])),
        ]
    )


@_undamaged()
def decode_rows(data: bytes) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """(sample, segment) -> the arrays `trained` and `advantages` of its row."""
    arrays, found, begin = decode_arrays(data), {}, 0
    for sample, place, length in arrays["rows"].tolist():
        found[sample, place] = {name: arrays[name][begin : begin + length] for name in ("trained", "advantages")}
        begin += length
    return found


@_undamaged()
def decode_segments(data: bytes) -> tuple[Segment, ...]:
    """Of one rollout, as schema 3 and older have them: ``0/mask``, ``0/extras/<name>``, ``1/token_ids``."""
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
    return _container(sorted(map(_laid_out, arrays.items()), key=_wide_first))


@_undamaged()
def decode_arrays(data: bytes) -> dict[str, np.ndarray]:
    arrays = safetensors.numpy.load(data)
    for values in arrays.values():
        values.setflags(write=False)
    return arrays


LaidOut = tuple[str, str, tuple[int, ...], bytes]
"""Name, dtype as safetensors calls it, shape, bytes."""


def _container(arrays: Sequence[LaidOut]) -> bytes:
    """In the format of safetensors, which reads it back. Written here, because `safetensors.numpy.save` takes several
    times as long for small arrays as SQLite for storing them. Wide numbers come first (see `_wide_first`)."""
    begin, header = 0, []
    for name, kind, shape, data in arrays:
        end = begin + len(data)
        sizes = ",".join(map(str, shape))
        header.append(f'{_quoted(name)}:{{"dtype":"{kind}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
        begin = end
    try:
        text = f"{{{','.join(header)}}}".encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"a name of an array is no text that UTF-8 can hold: {error}") from None
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *[data for *_, data in arrays]])


def _laid_out(item: tuple[str, np.ndarray]) -> LaidOut:
    name, values = item
    kind = _NAMES.get((values.dtype.kind, values.dtype.itemsize)) if isinstance(values, np.ndarray) else None
    if kind is None:
        found = f"dtype {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise TypeError(f"array {name!r} is of {found}; the store keeps bool, integer and float numpy arrays")
    return name, kind, values.shape, _bytes(values)


def _wide_first(array: LaidOut) -> tuple[int, str]:
    """So that each array lies where its numbers may lie."""
    return -_SIZES[array[1]], array[0]


def _bytes(values: np.ndarray) -> bytes:
    if _NATIVE and values.dtype.isnative:
        return values.tobytes()
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


_NATIVE = sys.byteorder == "little"
_NAMES = {("b", 1): "BOOL"}
_NAMES |= {(kind, size): f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)}
_NAMES |= {("f", size): f"F{8 * size}" for size in (2, 4, 8)}
_SIZES = {name: size for (_, size), name in _NAMES.items()}


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@_undamaged()
def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def encode_json(value: Any) -> bytes:
    """Strict JSON. Tuples become lists, numpy values plain ones; what has no JSON form is kept as its ``repr``."""
    if isinstance(value, Mapping) and (told := _simple(value)) is not None:
        return encode_text(told)
    return encode_text(_ENCODE(_plain(value)))


def _simple(mapping: Mapping[Any, Any]) -> str | None:
    """What `json` makes of it, in half of the time; None for all but the plainest values under names."""
    told = []
    for name, value in mapping.items():
        kind = type(value)
        if type(name) is not str:
            return None
        if kind is int or (kind is float and isfinite(value)):
            text = repr(value)
        elif kind is str:
            text = _ENCODE(value)
        elif kind is dict:
            text = _simple(value)
        else:
            text = _WORDS[value] if kind is bool or value is None else None
        if text is None:
            return None
        told.append(f"{_quoted(name)}: {text}")
    return f"{{{', '.join(told)}}}"


@_undamaged()
def decode_json(data: bytes) -> Any:
    return json.loads(decode_text(data), object_hook=_untag)


@lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return _ENCODE(name)


_WORDS = {None: "null", False: "false", True: "true"}
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
