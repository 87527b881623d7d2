"""What members and a fleet say to each other, as bytes: one message for many groups, their tokens in one piece.

Thousands of small arrays cost an object store more than their bytes. Here the tokens of a whole message lie end to end,
and what is read back are views of it that nobody can write to, so that records take them without a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nearpolicy.records import Finish
from nearpolicy.roles import Completion, Placed, Told

_FINISHES = tuple(Finish)
_NO_EXTRAS: Mapping[str, Any] = {}


def pack_placed(placed: Sequence[Placed]) -> bytes:
    return pickle.dumps(list(placed), protocol=5)


def unpack_placed(data: bytes) -> list[Placed]:
    return pickle.loads(data)


def pack_told(told: Told) -> bytes:
    completions = [completion for _, completion in told.completions]
    columns = (
        [ticket for ticket, _ in told.completions],
        [c.request for c in completions],
        [c.sample for c in completions],
        [len(c.token_ids) for c in completions],
        [_FINISHES.index(c.finish) for c in completions],
    )
    rare = {place: (c.reason, dict(c.extras)) for place, c in enumerate(completions) if c.reason or c.extras}
    arrays = (
        b"".join([c.token_ids.tobytes() for c in completions]),
        b"".join([c.logprobs.tobytes() for c in completions]),
        b"".join([c.versions.tobytes() for c in completions]),
    )
    return pickle.dumps((columns, rare, arrays, dict(told.loads), list(told.events)), protocol=5)


def unpack_told(data: bytes) -> Told:
    columns, rare, arrays, loads, events = pickle.loads(data)
    tokens, logprobs, versions = (
        np.frombuffer(part, kind) for part, kind in zip(arrays, (np.int32, np.float32, np.int32), strict=True)
    )
    completions, begin = [], 0
    for place, (ticket, request, sample, length, finish) in enumerate(zip(*columns, strict=True)):
        end = begin + length
        reason, extras = rare.get(place, ("", _NO_EXTRAS))
        completion = Completion(
            request=request,
            sample=sample,
            token_ids=tokens[begin:end],
            logprobs=logprobs[begin:end],
            versions=versions[begin:end],
            finish=_FINISHES[finish],
            extras=extras,
            reason=reason,
        )
        completions.append((ticket, completion))
        begin = end
    return Told(completions=completions, loads=loads, events=events)
