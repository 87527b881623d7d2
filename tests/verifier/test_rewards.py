"""Built-in scores, as pure functions: what is right, what is merely wrong, and what is the row's fault."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal

import pytest
import reasoning_gym
from pydantic import TypeAdapter, ValidationError

from nearpolicy.bounded import Answer
from nearpolicy.records import Outcome
from nearpolicy.verifier import reading, rewards
from nearpolicy.verifier.config import (
    ExactMatchReward,
    FunctionReward,
    IfevalReward,
    MathVerifyReward,
    NumberReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
    Rewards,
    VerifierConfig,
)
from nearpolicy.verifier.reading import unfit
from nearpolicy.verifier.rewards import Sample, find_numbers, score


def sample(text, **columns):
    return Sample(text=text, columns=columns, completion_ids=[], task="t")


def value(reward, text, **columns):
    verdict = score(reward, sample(text, **columns))
    assert verdict.outcome is Outcome.SCORED, verdict.reason
    return verdict.value


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("12", "12"),
        ("so it is 1,234.", "1234"),
        ("1,234,567.50 dollars", "1234567.5"),
        ("98,76", "76"),
        ("1,2345", "2345"),
        ("+5", "5"),
        ("x = -4", "-4"),
        ("\u22124", "-4"),
        ("10-4", "4"),
        ("(3)-4", "4"),
        ("from -3 to .5", "0.5"),
        ("5.", "5"),
        ("007", "7"),
        ("1.5e3", "1500"),
        ("42 then x2 and H2O", "42"),
        ("version 1.2.3", "1.2"),
        ("15%", "15"),
        ("$7 each", "7"),
        ("3/4", "4"),
    ],
)
def test_last_number_follows_the_documented_conventions(text, last):
    assert find_numbers(text)[-1][1] == Decimal(last)


def test_text_without_digits_holds_no_number():
    assert find_numbers("none, - + . e") == []


def test_number_reward_compares_exact_values_not_spellings():
    reward = NumberReward()
    assert value(reward, "the sum is 12,500.00", answer=12500) == 1.0
    assert value(reward, "0.50", answer=0.5) == 1.0
    assert value(reward, "\u22124", answer="-4") == 1.0
    assert value(reward, "0.3333", answer="0.33333") == 0.0
    assert value(reward, "98,76", answer="9876") == 0.0
    assert value(reward, "3 then 4", answer=3) == 0.0
    assert value(reward, "", answer=0) == 0.0


def test_partial_credit_pays_for_form_only_when_the_number_is_right():
    reward = NumberReward(partial=0.6)
    found = {text: score(reward, sample(text, answer=7)) for text in (" 7\n", "it is 7", "8", "it is 8", "?")}
    assert [v.value for v in found.values()] == [1.0, 0.6, 0.0, 0.0, 0.0]
    assert [dict(v.parts) for v in found.values()] == [
        {"correct": 1.0, "form": 1.0},
        {"correct": 1.0, "form": 0.0},
        {"correct": 0.0, "form": 1.0},
        {"correct": 0.0, "form": 0.0},
        {"correct": 0.0, "form": 0.0},
    ]


@pytest.mark.parametrize("answer", [None, "seven", "", True, float("nan"), "3/4"])
def test_number_reward_blames_the_row_for_an_answer_that_is_no_number(answer):
    verdict = score(NumberReward(answer_column="gold"), sample("7", gold=answer))
    assert verdict.outcome is Outcome.FAILED and "'gold'" in verdict.reason


@pytest.mark.parametrize("reward", [ExactMatchReward(), NumberReward(), MathVerifyReward(), ReasoningGymReward()])
def test_missing_column_is_a_failure_that_names_it_never_a_zero(reward):
    verdict = score(reward, sample("5"))
    assert verdict.outcome is Outcome.FAILED and verdict.value is None
    assert reward.columns[-1] in verdict.reason and "missing" in verdict.reason


def test_exact_match_options():
    assert value(ExactMatchReward(), " Paris\n", answer="Paris") == 1.0
    assert value(ExactMatchReward(strip=False), " Paris", answer="Paris") == 0.0
    assert value(ExactMatchReward(), "paris", answer="Paris") == 0.0
    assert value(ExactMatchReward(ignore_case=True), "paris", answer="Paris") == 1.0
    assert value(ExactMatchReward(), "5", answer=5) == 1.0


def test_regex_searches_or_must_match_the_whole_completion():
    assert value(RegexReward(pattern=r"\d+"), "a 12 b") == 1.0
    assert value(RegexReward(pattern=r"\d+", match="full"), "a 12 b") == 0.0
    assert value(RegexReward(pattern=r"\d+", match="full"), "12") == 1.0


# reasoning-gym


def test_reasoning_gym_scores_with_the_data_sets_own_function():
    data = reasoning_gym.create_dataset("countdown", seed=1, size=1)
    entry = data[0]
    columns = {"answer": entry["answer"], "metadata": entry["metadata"]}
    assert value(ReasoningGymReward(), entry["answer"], **columns) == 1.0
    other = data.score_answer("1 + 1", entry)
    assert value(ReasoningGymReward(), "1 + 1", **columns) == other != 1.0
    tagged = ReasoningGymReward(answer_tag="answer")
    assert value(tagged, f"<answer>1</answer> no, <answer> {entry['answer']} </answer>!", **columns) == 1.0
    assert value(tagged, entry["answer"], **columns) == data.score_answer(None, entry) != 1.0
    assert value(tagged, rewards.controls(tagged, columns)[0], **columns) == 1.0


def test_reasoning_gym_scores_by_the_settings_of_its_generator():
    entry = {"answer": "1.235", "metadata": '{"source_dataset": "decimal_arithmetic"}'}
    exact = ReasoningGymReward(params={"max_num_decimal_places": 3})
    rough = ReasoningGymReward(params={"max_num_decimal_places": 1, "min_num_decimal_places": 1})
    assert value(exact, "1.2", **entry) < 1.0
    assert value(rough, "1.2", **entry) == 1.0


def test_reasoning_gym_row_must_name_its_data_set():
    verdict = score(ReasoningGymReward(), sample("1", answer="1", metadata={}))
    assert verdict.outcome is Outcome.FAILED and "source_dataset" in verdict.reason


# Configuration

ONE = TypeAdapter(RewardConfig)
MANY = TypeAdapter(Rewards)


def test_reward_is_told_by_its_kind_and_strict_within_it():
    assert ONE.validate_python({"kind": "number", "partial": 0.5}) == NumberReward(partial=0.5)
    for bad, says in [
        ({"kind": "numbr"}, "'number'"),
        ({"kind": "number", "answer": "x"}, "number.answer"),
        ({"kind": "regex", "pattern": "("}, "not a regular expression"),
        ({"kind": "function", "path": "no_colon"}, "function.path"),
        ({"kind": "number", "weight": float("nan")}, "number.weight"),
        ({"answer_column": "a"}, "kind"),
    ]:
        with pytest.raises(ValidationError) as caught:
            ONE.validate_python(bad)
        assert says in str(caught.value)


def test_two_sources_may_not_share_a_name():
    with pytest.raises(ValidationError, match="two reward sources are named 'number'"):
        MANY.validate_python([{"kind": "number"}, {"kind": "regex", "pattern": "a", "name": "number"}])
    several = MANY.validate_python([{"kind": "number"}, {"kind": "number", "name": "second", "weight": -0.5}])
    assert [(reward.source, reward.weight) for reward in several] == [("number", 1.0), ("second", -0.5)]


def test_every_field_is_documented():
    kinds = [ExactMatchReward, RegexReward, NumberReward, MathVerifyReward, ReasoningGymReward, IfevalReward]
    for model in [*kinds, FunctionReward, VerifierConfig]:
        undocumented = [name for name, field in model.model_fields.items() if not field.description]
        assert not undocumented, (model.__name__, undocumented)


def test_scoring_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from nearpolicy.verifier import service, worker_main; "
        "print([m for m in ('torch', 'transformers', 'math_verify', 'reasoning_gym', 'py3langid') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# Rows at fault are found before a run


@pytest.mark.parametrize("answer", ["word", "", "3/4", "1e9999", "nan", "1.2.3", True, [1], {}, "5 apples"])
def test_an_answer_that_is_no_number_is_found_before_a_run(answer):
    [(place, column, wrong)] = unfit(NumberReward(answer_column="gold"), [{"gold": "5"}, {"gold": answer}])
    assert (place, column) == (1, "gold")
    assert "which is not a number" in wrong
    assert score(NumberReward(answer_column="gold"), sample("5", gold=answer)).outcome is Outcome.FAILED


def test_an_answer_that_is_a_number_in_any_spelling_is_none():
    answers = ["5", " 5 ", "-1,234.50", ".5", 5, 5.0, "1.5e3", "\u22127", "+5", "007"]
    assert list(unfit(NumberReward(), [{"answer": answer} for answer in answers])) == []


@pytest.mark.parametrize(
    ("metadata", "wrong"),
    [
        ("word", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "where the metadata of an entry should be"),
        (7, "where the metadata of an entry should be"),
        ({}, "does not name its data set"),
        ({"source_dataset": 3}, "does not name its data set"),
        ({"source_dataset": "chain_sums"}, "no data set 'chain_sums'; did you mean 'chain_sum'"),
    ],
)
def test_metadata_that_name_no_data_set_are_found_before_a_run(metadata, wrong):
    rows = [{"metadata": {"source_dataset": "chain_sum"}}, {"metadata": metadata}]
    [(place, column, found)] = unfit(ReasoningGymReward(), rows)
    assert (place, column) == (1, "metadata") and wrong in found


def test_params_that_the_data_set_refuses_are_found_before_a_run():
    rows = [{"metadata": json.dumps({"source_dataset": "chain_sum"})}]
    [(_, _, found)] = unfit(ReasoningGymReward(params={"min_termz": 3}), rows)
    assert "refuses the reward's params" in found


def test_answers_that_cannot_be_compared_are_found_before_a_run_each_once():
    answers = ["5", r"\frac{1}{2}", "", "1/2", "9" * 5000, "-3.5", "", "x^2", r"\frac{9", "Navin", r"\int_0^1 x\,dx"]
    found = list(unfit(MathVerifyReward(), [{"answer": answer} for answer in answers]))
    assert [(place, column) for place, column, _ in found] == [(2, "answer"), (8, "answer")]
    assert found[0][2] == "is empty" and "which cannot be compared" in found[1][2]


def test_of_very_many_expressions_some_are_looked_at_evenly_unless_every_row_is_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(reading, "MOST_EXPRESSIONS", 10)
    monkeypatch.setattr(reading, "bounded", lambda _, __, texts, **___: [seen.append(t) or Answer() for t in texts])
    rows = [{"answer": rf"\int_0^{{{n}}} x"} for n in range(95)] + [{"answer": str(n)} for n in range(1000)]
    assert list(unfit(MathVerifyReward(), rows)) == []
    assert seen == [rf"\int_0^{{{n}}} x" for n in range(0, 95, 10)]
    seen.clear()
    assert list(unfit(MathVerifyReward(), rows, every_row=True)) == []
    assert len(seen) == 95
