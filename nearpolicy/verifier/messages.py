"""What the verifier and its worker processes say to each other, over a socket that nothing else is written to.

A message is its length (4 bytes, big-endian) and its bytes. Requests are pickles; answers are JSON, so that what a
worker says, whatever became of it, cannot run code in the process that trains.

    setup                      -> {"status": "ready"} | {"status": "refused", "message"}
    (scorer, sample) as pickle -> {"status": "verdict", "outcome", "value", "parts", "reason", "seconds"}
                                | {"status": "limit", "limit", "seconds"}          the scorer ran into a resource limit
                                | {"status": "contract", "message"}                a user function broke its contract
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from nearpolicy.records import Outcome, Verdict

LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker needs before its first call."""

    sys_path: tuple[str, ...]
    scorers: Mapping[str, bytes]
    """Key -> pickled `UserFunction` or built-in reward."""


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message, or None if the other side is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    [length] = LENGTH.unpack(head)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def verdict_answer(verdict: Verdict, seconds: float) -> dict[str, Any]:
    return {
        "status": "verdict",
        "outcome": verdict.outcome.value,
        "value": verdict.value,
        "parts": dict(verdict.parts),
        "reason": verdict.reason,
        "seconds": seconds,
    }


def verdict_of(answer: Mapping[str, Any]) -> Verdict:
    return Verdict(
        outcome=Outcome(answer["outcome"]),
        value=answer["value"],
        parts=answer["parts"],
        reason=answer["reason"],
        seconds=answer["seconds"],
    )


def encoded(answer: Mapping[str, Any]) -> bytes:
    return frame(json.dumps(answer).encode())
