"""Messages between fleet and members: heads for whoever directs, tokens in a parcel."""

from __future__ import annotations

import numpy as np

from nearpolicy.distant import Distant
from nearpolicy.generator.wire import pack_told, unpack_told
from nearpolicy.records import Finish
from nearpolicy.roles import Completion, Load, Told


class Kept:
    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)

    def read(self) -> np.ndarray:
        return self._data


def completion(sample: int, count: int, finish: Finish, reason: str = "", **extras: np.ndarray) -> Completion:
    return Completion(
        request=f"r{sample}",
        sample=sample,
        token_ids=np.arange(count, dtype=np.int32) + sample,
        logprobs=-np.arange(count, dtype=np.float32) / 3,
        versions=np.array([sample] * (count // 2) + [sample + 1] * (count - count // 2), np.int32),
        finish=finish,
        reason=reason,
        extras=extras,
    )


def words(ids) -> str:
    return " ".join(map(str, ids))


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
    head, tokens = pack_told(told, words)
    found = unpack_told(head, Kept(tokens))
    assert [ticket for ticket, _ in found.completions] == [7, 7, 9]
    assert [c.text for _, c in found.completions] == ["0 1 2 3 4", "", "2 3 4"]
    for (_, now), (_, before) in zip(found.completions, told.completions, strict=True):
        assert (now.request, now.sample, now.finish, now.reason) == (
            *(before.request, before.sample, before.finish, before.reason),
        )
        here = now.fetched()
        for name in ("token_ids", "logprobs", "versions"):
            array = getattr(here, name)
            assert array.dtype == getattr(before, name).dtype and not array.flags.writeable
            np.testing.assert_array_equal(array, getattr(before, name))
    np.testing.assert_array_equal(found.completions[2][1].fetched().extras["support_sizes"], [1, 2, 3])
    assert (found.loads, list(found.events)) == (told.loads, list(told.events))


def test_tokens_and_logprobs_stay_in_the_parcel_and_a_head_does_not_grow_with_them():
    def told(count: int) -> Told:
        return Told(completions=[(1, completion(0, count, Finish.STOP, support_ids=np.arange(count)))])

    short, long = (pack_told(told(count), lambda ids: "four") for count in (10, 10_000))
    assert len(long[0]) < len(short[0]) + 20
    assert len(long[1]) == 10_000 * (4 + 4 + 8)
    [(_, found)] = unpack_told(long[0], Kept(long[1])).completions
    assert {type(found.token_ids), type(found.logprobs), type(found.extras["support_ids"])} == {Distant}
    assert found.versions[0] == 0 and found.versions[-1] == 1


def test_an_answer_without_completions_is_one_too():
    head, tokens = pack_told(Told(), words)
    assert tokens == b"" and unpack_told(head, None) == Told(completions=[], events=[])
