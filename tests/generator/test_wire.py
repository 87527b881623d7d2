"""Messages between fleet and members come out as they went in."""

from __future__ import annotations

import numpy as np
from driving import make_request

from nearpolicy.generator.wire import pack_placed, pack_told, unpack_placed, unpack_told
from nearpolicy.records import Finish
from nearpolicy.roles import Begun, Completion, Load, Placed, Request, Told


def completion(sample: int, count: int, finish: Finish, reason: str = "", **extras: np.ndarray) -> Completion:
    return Completion(
        request=f"r{sample}",
        sample=sample,
        token_ids=np.arange(count, dtype=np.int32) + sample,
        logprobs=-np.arange(count, dtype=np.float32) / 3,
        versions=np.full(count, sample, np.int32),
        finish=finish,
        reason=reason,
        extras=extras,
    )


def test_what_members_tell_comes_back_bit_for_bit_and_cannot_be_written_to():
    told = Told(
        completions=[
            (7, completion(0, 5, Finish.STOP)),
            (7, completion(1, 0, Finish.FAILED, "no memory")),
            (9, completion(2, 3, Finish.LENGTH, support_sizes=np.array([1, 2, 3]))),
        ],
        loads={3: Load(slots=4, running=2, sampled=10)},
        events=[(1, "finish", {"tokens": 5})],
    )
    found = unpack_told(pack_told(told))
    assert [ticket for ticket, _ in found.completions] == [7, 7, 9]
    for (_, now), (_, before) in zip(found.completions, told.completions, strict=True):
        assert (now.request, now.sample, now.finish, now.reason) == (
            *(before.request, before.sample, before.finish, before.reason),
        )
        for name in ("token_ids", "logprobs", "versions"):
            array = getattr(now, name)
            assert array.dtype == getattr(before, name).dtype and not array.flags.writeable
            np.testing.assert_array_equal(array, getattr(before, name))
    np.testing.assert_array_equal(found.completions[2][1].extras["support_sizes"], [1, 2, 3])
    assert (found.loads, list(found.events)) == (told.loads, list(told.events))


def test_an_answer_without_completions_is_one_too():
    assert unpack_told(pack_told(Told())) == Told(completions=[], events=[])


def test_requests_keep_what_they_had_begun_with():
    begun = Begun(token_ids=np.array([4, 5]), logprobs=np.array([-1.0, -2.0]), versions=np.array([0, 1]))
    request = make_request([1, 2, 3], n=2, stop_token_ids=(2,))
    fields = {name: getattr(request, name) for name in Request.__slots__}
    [found] = unpack_placed(
        pack_placed([Placed(ticket=3, replica=1, request=Request(**{**fields, "begun": {1: begun}}))])
    )
    assert (found.ticket, found.replica, found.request.sampling) == (3, 1, request.sampling)
    np.testing.assert_array_equal(found.request.token_ids, [1, 2, 3])
    np.testing.assert_array_equal(found.request.begun[1].logprobs, begun.logprobs)
