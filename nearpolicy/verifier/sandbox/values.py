"""Python values as JSON that only builtin types can come out of: what a tested function is given and gives back.

    None, bool, int, float, str, list, dict with str keys     as JSON has them
    tuple, set, frozenset, bytes, complex, other keys, ...    {"$": tag, "v": ...}

A subclass travels as its builtin base, whatever its methods claim: `encode` calls the methods of the base alone. This
module is loaded inside the sandbox too, and uses nothing but the standard library.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

MAX_DEPTH = 64
LONG_INT = 4000
"""Digits from which an int travels in hexadecimal: Python refuses to read longer ones in decimal."""
MOST_ALIKE = 100
"""Members of a set, or keys, with one hash: each is compared with all of them, and who knows how numbers are hashed can
make a million of them alike."""
_TAG = "$"


class NotPlain(Exception):
    """A value of a type that does not travel; the message names the type."""


class TooDeep(NotPlain):
    """A value that is nested too deeply, whatever its types."""


def encode(value: Any, depth: int = 0) -> Any:
    """What `json` can write, or `NotPlain` for what has no form here (functions, generators, own classes, cycles)."""
    if depth > MAX_DEPTH:
        raise TooDeep(f"a value nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind is bool:
        return value
    for base, written in _WRITERS:
        if base in kind.__mro__:
            return written(value, depth + 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy.generic in kind.__mro__:  # its scalars equal Python's own in every test
        return encode(numpy.generic.item(value), depth + 1)
    raise NotPlain(f"a value of type {kind.__name__}")


def _int(value: int, _: int) -> Any:
    plain = int.__add__(value, 0)
    return plain if plain.bit_length() < LONG_INT * 3 else {_TAG: "int", "v": hex(plain)}


def _float(value: float, _: int) -> Any:
    plain = float.__pos__(value)
    return plain if plain - plain == 0 else {_TAG: "float", "v": float.__repr__(plain)}


def _str(value: str, _: int) -> str:
    return str.__getitem__(value, slice(None))  # a whole slice of a subclass is a plain copy


def _items(tag: str | None, base: type) -> Any:
    def written(value: Any, depth: int) -> Any:
        items = [encode(each, depth) for each in base.__iter__(value)]  # type: ignore[attr-defined]
        return items if tag is None else {_TAG: tag, "v": items}

    return written


def _dict(value: dict, depth: int) -> Any:
    items = [(encode(key, depth), encode(each, depth)) for key, each in dict.items(value)]
    if all(type(key) is str and key != _TAG for key, _ in items):
        return dict(items)
    return {_TAG: "dict", "v": [list(item) for item in items]}


def _bytes(tag: str, base: type) -> Any:
    return lambda value, _: {_TAG: tag, "v": base.hex(value)}  # type: ignore[attr-defined]


def _complex(value: complex, _: int) -> Any:
    plain = complex.__add__(value, 0)
    return {_TAG: "complex", "v": [float.__repr__(plain.real), float.__repr__(plain.imag)]}


_WRITERS: list[tuple[type, Any]] = [
    (bool, lambda value, _: bool(int.__add__(value, 0))),
    (int, _int),
    (float, _float),
    (str, _str),
    (list, _items(None, list)),
    (tuple, _items("tuple", tuple)),
    (dict, _dict),
    (set, _items("set", set)),
    (frozenset, _items("frozenset", frozenset)),
    (bytes, _bytes("bytes", bytes)),
    (bytearray, _bytes("bytearray", bytearray)),
    (complex, _complex),
]


def decode(value: Any, depth: int = 0) -> Any:
    """The value that `encode` wrote; ValueError for anything else, whoever wrote it. What comes out can be encoded."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [decode(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(each, depth + 1) for key, each in value.items()}
    if value.keys() != {_TAG, "v"} or not isinstance(value[_TAG], str) or value[_TAG] not in _READERS:
        raise ValueError(f"no value is written {str(value)[:80]}")
    try:
        return _READERS[value[_TAG]](value["v"], depth + 1)
    except (TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"no {value[_TAG]} is written so: {error}") from None


def _decoded(items: Any, depth: int) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError("items are written as a list")
    return [decode(each, depth) for each in items]


def _pairs(items: Any, depth: int) -> list[tuple[Any, Any]]:
    if not isinstance(items, list) or not all(isinstance(item, list) and len(item) == 2 for item in items):
        raise ValueError("items of a dict are written as pairs")
    return [(decode(key, depth), decode(each, depth)) for key, each in items]


def _spread(keys: list[Any]) -> list[Any]:
    """These keys, unless too many of them have the same hash."""
    if max(Counter(map(hash, keys)).values(), default=0) > MOST_ALIKE:
        raise ValueError(f"more than {MOST_ALIKE} members with the same hash")
    return keys


def _dict_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    _spread([key for key, _ in pairs])
    return dict(pairs)


_READERS: dict[str, Any] = {
    "int": lambda v, _: int(v, 16),
    "float": lambda v, _: float(v),
    "tuple": lambda v, depth: tuple(_decoded(v, depth)),
    "set": lambda v, depth: set(_spread(_decoded(v, depth))),
    "frozenset": lambda v, depth: frozenset(_spread(_decoded(v, depth))),
    "dict": lambda v, depth: _dict_of(_pairs(v, depth)),
    "bytes": lambda v, _: bytes.fromhex(v),
    "bytearray": lambda v, _: bytearray.fromhex(v),
    "complex": lambda v, _: complex(float(v[0]), float(v[1])),
}

_MAX_BRACKETS = 3 * MAX_DEPTH + 3
"""A dict with keys that are no text is written with three at a time."""
_NO_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[^"\[\]{}]++', re.DOTALL)


def _check_nesting(data: bytes) -> None:
    """Before it is parsed: a parser would go as deep as this process allows, and there may be no stack for it."""
    if data.count(b"[") + data.count(b"{") <= _MAX_BRACKETS:
        return
    depth = 0
    for bracket in _NO_BRACKETS.sub(b"", data):
        depth += 1 if bracket in b"[{" else -1
        if depth > _MAX_BRACKETS:
            raise ValueError("nested too deeply")


_write = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """`encode`, as bytes."""
    return _write(encode(value)).encode()


def loads(data: bytes) -> Any:
    """`decode` of bytes; ValueError for all that is no such value."""
    _check_nesting(data)
    try:
        return decode(json.loads(data.decode()))  # no other encoding of JSON, as bytes might have
    except RecursionError:
        raise ValueError("nested too deeply") from None
