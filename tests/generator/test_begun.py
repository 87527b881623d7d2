"""Samples that have begun before go on as if they had never stopped; what is known of their tokens stays."""

from __future__ import annotations

from dataclasses import replace

import families
import numpy as np
import pytest
from driving import Outcome, assert_same_bits, make_engine, make_request, run

from nearpolicy.models.attention import PAGE
from nearpolicy.records import Finish
from nearpolicy.roles import Begun, Completion, Request

NEWER = 7
"""Version of the engine that goes on; the same weights."""


def requests(**sampling) -> list[Request]:
    settings = {"temperature": 0.8, "max_tokens": 40} | sampling
    return [make_request(n, id=f"g{n}", n=5, admission=n, **settings) for n in (5, PAGE - 3, PAGE + 9)]


def first(completion: Completion, count: int) -> Begun:
    extras = completion.extras
    if extras:
        sizes = extras["support_sizes"][:count]
        extras = {"support_sizes": sizes, "support_ids": extras["support_ids"][: sizes.sum()]}
    known = {name: getattr(completion, name)[:count] for name in ("token_ids", "logprobs", "versions")}
    return Begun(**known, extras=extras)


KEPT = {0: 0, 1: 0, 2: 1, 3: 33, 4: 39}
"""Sample -> tokens that it begins with: none; one; beyond a page; all but the last one."""


def begun(request: Request, whole: Outcome) -> Request:
    return replace(request, begun={s: first(whole[request.id, s], kept) for s, kept in KEPT.items() if s})


@pytest.mark.parametrize("sampling", [{}, {"top_k": 20, "record_support": True}], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("pages", [200, 6], ids=["room for all", "little room"])
def test_what_goes_on_has_the_bits_of_what_never_stopped(sampling, pages):
    policy = families.shared()
    numerics = families.exact_numerics(policy, 1)
    whole = run(make_engine(policy, numerics), requests(**sampling))
    engine = make_engine(policy, numerics, version=NEWER, num_pages=pages)
    again = run(engine, [begun(request, whole) for request in requests(**sampling)])
    assert_same_bits(again, whole)
    for key, completion in again.items():
        kept = KEPT[key[1]]
        assert completion.versions.tolist() == [0] * kept + [NEWER] * (40 - kept)
        assert completion.finish is whole[key].finish
        for name, values in whole[key].extras.items():
            assert np.array_equal(completion.extras[name], values)
        assert bool(completion.extras) == bool(sampling)


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("end", ["length", "stop token", "stop string"])
def test_what_had_ended_comes_back_at_once_and_is_not_gone_on_with(end):
    free = run(make_engine(families.shared()), [make_request(9, max_tokens=40)])["r", 0]
    last = free.token_ids.tolist().index(free.token_ids[12])
    sampling = {
        "length": {"max_tokens": 13},
        "stop token": {"stop_token_ids": (int(free.token_ids[12]),)},
        "stop string": {"stop": (letters(free.token_ids[10:13].tolist()),)},
    }[end]
    request = make_request(9, n=2, **{"max_tokens": 40} | sampling)
    engine = make_engine(families.shared(), version=NEWER, decode=letters)
    length = last + 1 if end == "stop token" else 13
    ended = replace(request, begun={0: first(free, length), 1: first(free, length)})
    completions = engine.submit(ended)
    assert [c.sample for c in completions] == [0, 1] and engine.scheduler.is_idle
    for completion in completions:
        assert completion.finish is (Finish.LENGTH if end == "length" else Finish.STOP)
        assert completion.token_ids.tolist() == free.token_ids[:length].tolist()
        assert completion.versions.tolist() == [0] * length


def test_what_is_aborted_before_it_went_on_is_what_it_had_been():
    whole = run(make_engine(families.shared()), requests())
    engine = make_engine(families.shared(), version=NEWER)
    [request, *_] = [begun(request, whole) for request in requests()]
    assert engine.submit(request) == []
    aborted = {c.sample: c for c in engine.abort([request.id])}
    assert sorted(aborted) == [0, 1, 2, 3, 4] and engine.scheduler.is_idle
    for sample, of in request.begun.items():
        assert aborted[sample].finish is Finish.ABORTED
        assert aborted[sample].token_ids.tolist() == of.token_ids.tolist()
        assert aborted[sample].logprobs.tobytes() == of.logprobs.tobytes()


@pytest.mark.parametrize(
    ("sample", "tokens", "version", "sampling", "words"),
    [
        (1, [5], 0, {}, "sample 1 has begun before, and 1 samples"),
        (0, [5, -1], 0, {}, "a token id outside"),
        (0, [5, 10**6], 0, {}, "a token id outside"),
        (0, [5], NEWER + 1, {}, "under version 8, but the engine holds 7"),
        (0, [5], 0, {"top_k": 3, "record_support": True}, "without a record of the tokens"),
    ],
)
def test_a_wrong_beginning_fails_its_request_and_says_why(sample, tokens, version, sampling, words):
    count = len(tokens)
    wrong = Begun(token_ids=np.array(tokens), logprobs=-np.ones(count), versions=np.full(count, version))
    engine = make_engine(families.shared(), version=NEWER)
    [completion] = engine.submit(replace(make_request(**sampling), begun={sample: wrong}))
    assert completion.finish is Finish.FAILED and words in completion.reason and engine.scheduler.is_idle


def test_a_beginning_of_several_lengths_is_refused():
    with pytest.raises(ValueError, match=r"must have one length, found \[1, 2\]"):
        Begun(token_ids=np.array([1, 2]), logprobs=np.array([-1.0]), versions=np.array([0, 0]))
