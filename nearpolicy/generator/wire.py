"""What members and a fleet say to each other: one message for many groups, whose tokens stay out of it.

    member                                               fleet
    completions -> head (bytes), parcel (bytes)          head + where the parcel is kept -> completions whose tokens
                                                         and log-probabilities are distant

Thousands of small arrays cost an object store more than their bytes, so that the tokens of a whole message lie end to
end in one parcel. A completion's text comes with the head: verifiers read that. Requests take tokens that a sample has
begun with back by reference.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nearpolicy.distant import Loading, Parcel, placed
from nearpolicy.messages import from_runs, runs
from nearpolicy.records import Finish
from nearpolicy.roles import Completion, Told

_FINISHES = tuple(Finish)
_NO_EXTRAS: Mapping[str, Any] = {}
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

Decode = Callable[[Sequence[int]], str]


def pack_told(told: Told, decode: Decode) -> tuple[bytes, bytes]:
    """A head and the parcel of its tokens, which is empty if there are none. ``decode``: token ids -> text."""
    completions = [completion for _, completion in told.completions]
    loading = Loading()
    places = (
        loading.add([c.token_ids for c in completions]),
        loading.add([c.logprobs for c in completions]),
    )
    columns = (
        [ticket for ticket, _ in told.completions],
        [c.request for c in completions],
        [c.sample for c in completions],
        [len(c.token_ids) for c in completions],
        [runs(c.versions) for c in completions],
        [_FINISHES.index(c.finish) for c in completions],
        [decode(c.token_ids) for c in completions],
    )
    rare = {
        place: (c.reason, {name: _loaded(loading, values) for name, values in c.extras.items()})
        for place, c in enumerate(completions)
        if c.reason or c.extras
    }
    head = pickle.dumps((columns, rare, places, dict(told.loads), list(told.events)), protocol=5)
    return head, loading.data()


def _loaded(loading: Loading, values: np.ndarray) -> tuple[int, tuple[int, ...], str]:
    return loading.add([values]), values.shape, values.dtype.str


def unpack_told(head: bytes, parcel: Parcel | None) -> Told:
    """``parcel``: where the tokens are kept; None if there are none."""
    columns, rare, (tokens, logprobs), loads, events = pickle.loads(head)
    completions, begin = [], 0
    for place, (ticket, request, sample, length, versions, finish, text) in enumerate(zip(*columns, strict=True)):
        reason, extras = rare.get(place, ("", _NO_EXTRAS))
        completion = Completion(
            request=request,
            sample=sample,
            token_ids=placed(parcel, tokens + 4 * begin, (length,), _INT32),
            logprobs=placed(parcel, logprobs + 4 * begin, (length,), _FLOAT32),
            versions=from_runs(versions),
            finish=_FINISHES[finish],
            extras={name: placed(parcel, at, shape, np.dtype(kind)) for name, (at, shape, kind) in extras.items()},
            reason=reason,
            text=text,
        )
        completions.append((ticket, completion))
        begin += length
    return Told(completions=completions, loads=loads, events=events)
