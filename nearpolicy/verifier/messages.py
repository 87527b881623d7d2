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
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from nearpolicy.machine import die_with
from nearpolicy.records import Outcome, Verdict

LENGTH = struct.Struct(">I")
NICENESS = 5
"""Enough to give way to training, not so much that a busy machine turns every call into a time limit."""


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


def serve(descriptor: int, parent: int, prepare: Callable[[bytes], tuple[Any, Callable[[bytes], Any] | None]]) -> None:
    """The life of a worker process: its setup, then an answer for each request, until the other side is gone.

    prepare: from the setup, what to say of it and what answers requests; None after a refusal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        setup = read_frame(stream)
        if setup is None:
            return
        said, answer = prepare(setup)
        _say(stream, said)
        if answer is None:
            return
        os.nice(NICENESS)  # after the slow imports: a replacement is waited for
        while (request := read_frame(stream)) is not None:
            _say(stream, answer(request))


def _say(stream: BinaryIO, answer: Any) -> None:
    stream.write(frame(json.dumps(answer).encode()))
    stream.flush()
