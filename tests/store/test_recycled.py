"""Attempts that go on from an earlier one: told by their tokens, wherever these lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nearpolicy.distant import Distant, Loading
from nearpolicy.records import Finish, Rollout, Segment
from nearpolicy.store.recycled import goes_on


class Kept:
    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)

    def read(self) -> np.ndarray:
        return self.data


def rollout(length: int) -> Rollout:
    segment = Segment(
        context_ids=np.array([7, 8]),
        token_ids=np.arange(length),
        mask=np.ones(length, bool),
        behavior_logprobs=-np.arange(length) / 3,
        versions=np.full(length, 3),
        finish=Finish.LENGTH,
    )
    return Rollout(sample=0, segments=(segment,), text="", numerics="fast")


def elsewhere(there: Rollout, **changed: np.ndarray) -> Rollout:
    """Its tokens and log-probabilities in a parcel, as those of a generator in another process are."""
    [segment] = there.segments
    loading = Loading()
    near = {"token_ids": segment.token_ids, "behavior_logprobs": segment.behavior_logprobs} | changed
    places = {name: loading.add([values]) for name, values in near.items()}
    parcel = Kept(loading.data())
    arrays = {name: Distant(parcel, places[name], values.shape, values.dtype) for name, values in near.items()}
    return replace(there, segments=(replace(segment, **arrays),))


@pytest.mark.parametrize("place", [lambda it: it, elsewhere], ids=["here", "elsewhere"])
def test_a_rollout_goes_on_from_one_whose_tokens_it_begins_with(place):
    assert goes_on(rollout(4), place(rollout(6)))
    assert not goes_on(rollout(6), place(rollout(4)))


def test_a_rollout_elsewhere_with_other_log_probabilities_was_sampled_anew():
    other = rollout(6).segments[0].behavior_logprobs.copy()
    other[0] = -0.0 if not np.signbit(other[0]) else 0.0  # the same number, and other bits
    assert not goes_on(rollout(4), elsewhere(rollout(6), behavior_logprobs=other))
