"""The rubric: what can be checked is checked, a judge answers the rest in one request, and each item is a part."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from fake_endpoint import KEY, blocks, fields_of, is_probe, serving
from pydantic import ValidationError
from scoring import score, verifying

from nearpolicy.records import Outcome
from nearpolicy.verifier.config import RubricReward
from nearpolicy.verifier.learned.rubric import Rubric, quotations
from nearpolicy.verifier.reading import unfit
from nearpolicy.verifier.rewards import Sample

SOURCE = "The melting point of gallium is 29.8 \u00b0C \u2013 it melts\nin the \u201chand\u201d. "
SOURCE += "Silver melts at 961 degrees."


def checked(item, text, **columns):
    """What one item says of a text."""
    sample = Sample(text=text, columns=columns, completion_ids=[], task="t")
    return asyncio.run(Rubric(RubricReward(items=(item,)), None).score(sample))


@pytest.mark.parametrize(
    ("text", "fulfilled"),
    [
        ("Gallium melts [1], silver too [2].", True),
        ("Gallium melts [3].", False),
        ("Gallium melts [1] and [7].", False),
        ("No citation.", False),
        ("See [0].", False),
    ],
)
def test_a_citation_must_name_a_source_that_is_there(text, fulfilled):
    for sources in (["a", "b"], '["a", "b"]', {"1": "a", "2": "b"}):
        assert checked({"kind": "cites"}, text, sources=sources).value == fulfilled


def test_a_citation_may_have_a_form_and_name_of_its_own():
    item = {"kind": "cites", "marker": r"\((\w+ \d{4})\)"}
    assert checked(item, "As shown (Smith 2020).", sources={"Smith 2020": "..."}).value == 1.0
    assert checked(item, "As shown (Smith 2021).", sources={"Smith 2020": "..."}).value == 0.0


@pytest.mark.parametrize(
    ("text", "fulfilled"),
    [
        ('It says "The melting point of gallium is 29.8 \u00b0C".', True),
        ("It says \u201cit melts in   the 'hand'\u201d", False),  # another kind of mark: quotes inside are single here
        ('He wrote "29.8 \u00b0C - it melts in the" palm.', True),
        ('It says "the melting point of gallium ... melts at 961 degrees."', True),
        ('It says "Silver melts at 961 ... the melting point of gallium"', False),
        ('It says "the ... of ... is ... melts ... degrees"', False),
        ('It says "gallium melts at 31 degrees".', False),
        ('It says "silver melts at 961 degrees" and "gold melts at 1064 degrees".', False),
        ('The "hand" is warm.', False),
        ("\u00abSilver melts at 961 degrees\u00bb", True),
        ("\u201eSilver melts at 961 degrees.\u201c", True),
    ],
)
def test_a_quotation_must_stand_in_the_source(text, fulfilled):
    assert checked({"kind": "quotes"}, text, source=SOURCE).value == fulfilled
    assert checked({"kind": "quotes"}, text, source=["another", SOURCE]).value == fulfilled


def test_hostile_quote_marks_take_no_time():
    begin = time.perf_counter()
    for mark in ('"', "\u201c", "\u201e", "\u00ab"):
        quotations((mark + "a ") * 5_000)
    assert time.perf_counter() - begin < 1.0


@pytest.mark.parametrize(
    ("item", "text", "fulfilled"),
    [
        ({}, "first 41, then 42.0", True),
        ({}, "42, then 41", False),
        ({"which": "any"}, "42, then 41", True),
        ({"tolerance": 0.5}, "41.5", True),
        ({"tolerance": 0.5}, "41.4", False),
        ({"relative": 0.1}, "46.2", True),
        ({"relative": 0.1}, "46.3", False),
        ({}, "none", False),
    ],
)
def test_a_number_matches_within_its_tolerance(item, text, fulfilled):
    assert checked({"kind": "number"} | item, text, answer="42").value == fulfilled


def test_texts_patterns_and_words():
    assert checked({"kind": "contains", "text": "Gallium"}, "gallium melts").value == 1.0
    assert checked({"kind": "contains", "text": "Gallium", "ignore_case": False}, "gallium melts").value == 0.0
    assert checked({"kind": "contains", "column": "all"}, "a b", all=["a", "c"]).value == 0.0
    assert checked({"kind": "regex", "pattern": r"^Answer: \d+$"}, "Answer: 4").value == 1.0
    assert checked({"kind": "max_words", "words": 3}, "one two  three").value == 1.0
    assert checked({"kind": "max_words", "words": 3}, "one two three four").value == 0.0


def test_a_pattern_without_end_is_failed_in_bounded_time():
    begin = time.perf_counter()
    found = checked({"kind": "regex", "pattern": r"(a|aa)+$"}, "a" * 200 + "b")
    assert found.outcome is Outcome.FAILED and "not done within 1 s" in found.reason
    assert time.perf_counter() - begin < 10


@pytest.mark.parametrize(
    ("item", "column", "value"),
    [("cites", "sources", None), ("quotes", "source", None), ("number", "answer", "forty"), ("number", "answer", None)],
)
def test_a_row_that_lacks_something_is_failed_and_not_0(item, column, value):
    found = checked({"kind": item}, "42 [1]", **({} if value is None else {column: value}))
    assert (found.outcome, found.value) == (Outcome.FAILED, None) and repr(column) in found.reason


@pytest.mark.parametrize("nothing", [[], "", ["gallium", ""]])
def test_a_row_that_names_nothing_to_contain_is_at_fault(nothing):
    """K47: every completion contains nothing."""
    item = {"kind": "contains", "column": "words"}
    verdict = checked(item, "Gallium melts", words=nothing)
    assert verdict.outcome is Outcome.FAILED and "'words' holds" in verdict.reason
    rows = [{"words": ["gallium"]}, {"words": nothing}]
    assert [(place, column) for place, column, _ in unfit(RubricReward(items=(item,)), rows)] == [(1, "words")]


@pytest.mark.parametrize("item", [{"kind": "regex", "pattern": "PATTERN"}, {"kind": "cites", "marker": "PATTERN"}])
def test_a_pattern_must_be_one_of_the_library_that_searches_with_it(item):
    def given(pattern):
        return RubricReward(items=({key: pattern if value == "PATTERN" else value for key, value in item.items()},))

    for only_there in (r"\p{Greek}", r"(?<=a+)b"):
        given(only_there)
    for no_pattern in ("[[:foo:]]", "a{s<=}", "("):  # `re` takes the first two
        with pytest.raises(ValidationError, match="is not a regular expression"):
            given(no_pattern)


# With a judge

ITEMS = (
    {"kind": "contains", "text": "gallium", "name": "topic", "weight": 2.0},
    {"kind": "judge", "question": "Is it polite?", "name": "polite"},
    {"kind": "max_words", "words": 5},
    {"kind": "judge", "question": "Is it true?", "name": "true"},
)


def judged(respond, monkeypatch, text="Gallium melts", **judge):
    monkeypatch.setenv("NEARPOLICY_TEST_JUDGE_KEY", KEY)

    async def run(url):
        endpoint = {"base_url": url, "api_key_env": "NEARPOLICY_TEST_JUDGE_KEY", "backoff_s": 0.01}
        reward = RubricReward(items=ITEMS, judge={"endpoint": endpoint, "models": ("m",)} | judge)
        async with verifying(reward) as service:
            return (await score(service, text, prompt="Which metal?"))["rubric"]

    with serving(respond) as fake:
        return asyncio.run(run(fake.url)), fake


def says(**points):
    return lambda request, _: json.dumps({"ok": True} if is_probe(request) else points)


def test_one_request_answers_what_cannot_be_checked(monkeypatch):
    found, fake = judged(says(polite=True, true=False), monkeypatch)
    assert dict(found.parts) == {"topic": 1.0, "polite": 1.0, "max_words": 1.0, "true": 0.0}
    assert found.value == (2 + 1 + 1 + 0) / 5 and found.reason == "not fulfilled: true"
    [request] = fake.judged
    assert fields_of(request) == {"polite": {"type": "boolean"}, "true": {"type": "boolean"}}
    assert blocks(request) == {"QUESTION": "Which metal?", "ANSWER": "Gallium melts"}
    assert "Is it polite?" in request["messages"][0]["content"]


def test_judges_that_disagree_make_parts_of_an_item_and_a_penalty(monkeypatch):
    def respond(request, _):
        return says(polite=True, true=request["model"] == "a")(request, 0)

    found, _ = judged(respond, monkeypatch, models=("a", "b"), penalty=1.0)
    assert found.parts["true"] == 0.5 and found.parts["deviation"] == pytest.approx(0.1)
    assert found.value == pytest.approx(4.5 / 5 - 0.1)


@pytest.mark.parametrize("points", [{"polite": True}, {"polite": True, "true": "yes"}, {"polite": 1, "true": 0}])
def test_without_an_answer_of_the_judge_there_is_no_number(monkeypatch, points):
    found, _ = judged(says(**points), monkeypatch)
    assert (found.outcome, found.value) == (Outcome.FAILED, None)


def test_a_rubric_that_contradicts_itself_is_refused():
    for settings, named in [
        ({"items": ({"kind": "judge", "question": "?"},)}, "need the section `judge`"),
        ({"items": ({"kind": "cites"},), "judge": {"models": ("m",)}}, "no item is of kind judge"),
        ({"items": ({"kind": "cites"}, {"kind": "cites"})}, "two items are named 'cites'"),
        ({"items": ({"kind": "contains"},)}, "set one of text and column"),
    ]:
        with pytest.raises(ValidationError, match=named):
            RubricReward(**settings)


def test_a_rubric_names_the_columns_it_reads():
    items = ({"kind": "cites"}, {"kind": "quotes"}, {"kind": "number"}, {"kind": "contains", "column": "c"})
    assert RubricReward(items=items).columns == ("sources", "source", "answer", "c")


def test_rows_whose_number_is_none_are_refused_before_the_run():
    from nearpolicy.verifier.reading import unfit

    reward = RubricReward(items=({"kind": "number"}, {"kind": "max_words", "words": 5}))
    found = list(unfit(reward, [{"answer": "42"}, {"answer": "forty"}]))
    assert found == [(1, "answer", "holds 'forty', which is not a number")]
