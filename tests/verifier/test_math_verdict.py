r"""The math reward as a whole: extraction and comparison together, its reasons, its limits, and how far it agrees with
labelled data."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nearpolicy.records import Outcome
from nearpolicy.verifier import rewards
from nearpolicy.verifier.config import MathVerifyReward, VerifierConfig
from nearpolicy.verifier.math import library
from nearpolicy.verifier.math.verdict import gold_problem, verify
from nearpolicy.verifier.rewards import Sample, score
from nearpolicy.verifier.service import judged_once

FORMS = ["auto", "boxed", "tag", "final_answer", "hash", "last_number", "whole"]
TOWER = r"\boxed{9^{9^{9^{9}}}}"
ENDLESS = r"\boxed{\sum_{k=1}^{2} 9^{9^{9^{9}}}}"
"""Not in our notation, so math-verify is asked, and computes it."""


def value(text, gold, **settings):
    verdict = verify(MathVerifyReward(**settings), gold, text)
    assert verdict.outcome is Outcome.SCORED, verdict.reason
    return verdict.value


# Reasons


def test_the_reason_says_what_was_found_how_and_by_which_rule_it_was_compared():
    verdict = verify(MathVerifyReward(), "1/2", r"so it is \boxed{0.5}")
    assert (verdict.value, dict(verdict.parts)) == (1.0, {"found": 1.0})
    assert verdict.reason == "'0.5' (the last box) is '1/2': exact numbers"
    verdict = verify(MathVerifyReward(), r"\sqrt{2}", "The answer is 1.41.")
    assert verdict.value == 0.0
    assert verdict.reason == r"'1.41' (after 'answer is') is not '\sqrt{2}': values to 40 digits"


def test_a_completion_without_an_answer_scores_zero_and_is_counted():
    verdict = verify(MathVerifyReward(extract="boxed"), "8", "maybe 7, 8 or 9")
    assert (verdict.value, dict(verdict.parts)) == (0.0, {"found": 0.0})
    assert verdict.reason == "the completion holds no complete box"


def test_boxed_answers_may_be_required_and_listing_values_earns_nothing():
    """K36."""
    assert value("maybe 7, 8 or 9", "8", extract="boxed") == 0.0
    for gold in ("7", "8", "9"):
        for form in FORMS:
            assert value("maybe 7, 8 or 9", gold, extract=form) == 0.0
    assert value(r"\boxed{4} ... so \boxed{\frac{1}{\sqrt{3}}}", r"\frac{\sqrt3}{3}", extract="boxed") == 1.0
    assert value(r"\fbox{9}", "9", extract="boxed") == 1.0
    assert value(r"\boxed{7", "7", extract="boxed") == 0.0
    assert value(r"\boxed{7", "7") == 0.0


@pytest.mark.parametrize(
    "text", [r"\boxed{3} or \boxed{4}", r"\boxed{3 \text{ or } 4}", "#### 3 or 4", "<answer>3 or 4</answer>", "3 or 4"]
)
def test_offering_two_answers_never_scores(text):
    assert value(text, "3") == value(text, "4") == 0.0
    assert value(text, "3, 4") == 1.0


# Right answers


@pytest.mark.parametrize("gold", ["", "  ", "$$"])
def test_an_empty_right_answer_is_the_rows_fault(gold):
    verdict = verify(MathVerifyReward(), gold, "5")
    assert verdict.outcome is Outcome.FAILED and gold_problem(gold) is not None


@pytest.mark.parametrize("gold", [r"\frac{9", r"\int", r"3 + + + \sum"])
def test_a_right_answer_that_nobody_can_read_is_the_rows_fault(gold):
    assert "cannot be compared" in gold_problem(gold)


@pytest.mark.parametrize(
    "gold", ["5", "x^2", r"\text{October 30}", "Navin", r"\int_0^1 x\,dx", "2+2=4\n#### 4", "D, E"]
)
def test_a_right_answer_that_can_be_compared_is_no_fault(gold):
    assert gold_problem(gold) is None


def test_math_verify_compares_what_our_notation_does_not_read():
    assert value(r"\boxed{\int_0^1 2x\,dx}", "1") == 1.0
    assert value(r"\boxed{\frac12}", r"\int_0^1 x\,dx") == 1.0
    assert value(r"\boxed{\sum_{k=1}^{4} k}", "10") == 1.0
    assert value(r"\boxed{\sum_{k=1}^{4} k}", "11") == 0.0
    assert "math-verify" in verify(MathVerifyReward(), "11", r"\boxed{\sum_{k=1}^{4} k}").reason


def test_an_error_in_one_comparison_of_math_verify_counts_only_if_no_other_settles_it():
    def equal(gold, candidate):
        if candidate == "bad":
            raise TypeError("cannot compare")
        return gold == candidate

    assert library.any_equal([1], ["bad", 1], equal)
    with pytest.raises(TypeError, match="cannot compare"):
        library.any_equal([1], ["bad", 2], equal)


@pytest.mark.parametrize("form", FORMS)
def test_the_control_run_gives_the_right_answer_in_the_form_that_counts(form):
    reward = MathVerifyReward(extract=form)
    for gold in ("5", "-3.5", *([] if form == "hash" else [r"\frac{1}{7}", "3/4", r"$x^2$", "(1, 2]", "2\n#### 7"])):
        right, another = rewards.controls(reward, {"answer": gold})
        assert verify(reward, gold, right).value == 1.0, (form, gold, right)
        assert verify(reward, gold, another).value == 0.0


def test_training_and_evaluation_see_one_extraction():
    """K36: there is one reward object, and `score` is all that either of them calls."""
    sample = Sample(text=r"\boxed{1} \boxed{2}", columns={"answer": "2"}, completion_ids=[], task="t")
    assert score(MathVerifyReward(), sample) == verify(MathVerifyReward(), "2", sample.text)


# K37


def one_seventh():
    return value(r"\boxed{\frac{1}{7}}", "1/7"), value(r"\boxed{\sin 1}", r"\sin 1 + 0x"), value(r"\boxed{\pi}", "3.14")


def test_answers_are_compared_in_any_thread_task_and_process():
    """K37."""
    expected = (1.0, 1.0, 0.0)
    assert one_seventh() == expected
    found = []
    threads = [threading.Thread(target=lambda: found.append(one_seventh())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8

    async def task():
        return await asyncio.create_task(asyncio.to_thread(one_seventh)), one_seventh()

    assert asyncio.run(task()) == (expected, expected)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {Path(__file__).stem} as t; "
    child = subprocess.run([sys.executable, "-c", code + "print(t.one_seventh())"], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, f"{expected}\n"), child.stderr


def test_an_error_of_the_verifier_is_an_error_and_no_score(monkeypatch):
    """K37."""

    def broken(*_):
        raise TypeError("a fault of ours")

    monkeypatch.setattr(library, "parsed", broken)
    monkeypatch.setattr("nearpolicy.verifier.math.verdict.compare", broken)
    with pytest.raises(TypeError):
        verify(MathVerifyReward(), "5", "5")


# K38


def judged(text, gold, **config):
    return asyncio.run(judged_once(MathVerifyReward(), text, {"answer": gold}, VerifierConfig(**config)))


def test_a_power_tower_is_told_from_its_limits_at_once():
    """K38."""
    begin, held = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict = verify(MathVerifyReward(), "5", TOWER)
    assert (verdict.outcome, verdict.value) == (Outcome.SCORED, 0.0)
    assert verdict.reason.startswith("time_limit") and time.monotonic() - begin < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < held + 2**20  # KiB; other tests may have held more


def test_an_endless_computation_ends_at_its_limit_and_scores_zero():
    """K38: the right answer passed in the same place, so the submission is the cause."""
    verdict = judged(ENDLESS, "5", timeout_s=1.5)
    assert (verdict.outcome, verdict.value, verdict.reason) == (Outcome.SCORED, 0.0, "time_limit")


def test_an_endless_right_answer_is_not_held_against_the_completion():
    verdict = judged(r"\boxed{5}", TOWER, timeout_s=1.5)
    assert (verdict.outcome, verdict.value) == (Outcome.FAILED, None)
    assert "nor could the right answer be compared with another one (time_limit)" in verdict.reason


def test_a_text_is_never_run(tmp_path):
    trace = tmp_path / "trace"
    for text in (f"open({str(trace)!r},'w')", f"__import__('pathlib').Path({str(trace)!r}).touch()", "exit()", "quit"):
        for wrapped in (text, rf"\boxed{{{text}}}", rf"\boxed{{\mathrm{{{text}}}}}", rf"\boxed{{\foo {text}}}"):
            assert value(wrapped, "5") == 0.0
            assert verify(MathVerifyReward(), wrapped, "5").value in (0.0, None)
    assert not trace.exists()


# Labelled data, which are not part of this project


def shared(path):
    folder = Path(os.environ.get("NEARPOLICY_DATA", Path(__file__).parents[3] / "shared" / "data"))
    file = folder / path
    if not file.is_file():
        pytest.skip(f"no {file}; set NEARPOLICY_DATA to a folder that holds {path}")
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8")
    return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]


def disagreements(rows):
    """(name, gold, completion, label, settings) of rows -> those judged otherwise."""
    return [name for name, gold, text, label, settings in rows if value(text, gold, **settings) != float(label)]


def test_labelled_pairs_are_judged_as_labelled_where_graders_do_not_differ():
    rows = [r for r in shared("math-equivalence/pairs.jsonl") if not r["contested"]]
    wrong = disagreements((r["id"], r["gold"], r["prediction"], r["verdict"], {"extract": "whole"}) for r in rows)
    assert len(wrong) <= 0.03 * len(rows), wrong


def test_labelled_extractions_are_judged_as_labelled():
    forms = {"last_boxed": "boxed", "gsm8k_hash": "hash", "answer_tag": "tag", "the_answer_is": "final_answer"}
    rows = shared("math-equivalence/extraction.jsonl")
    settings = [{"extract": forms[r["convention"]]} for r in rows]
    assert not disagreements(
        (r["id"], r["gold"], r["response"], r["verdict"], s) for r, s in zip(rows, settings, strict=True)
    )


def test_worked_solutions_verify_themselves():
    rows = [(r["question"], r["answer"], r["answer"], True, {}) for r in shared("gsm8k/test.jsonl")]
    rows += [(r["unique_id"], r["answer"], r["solution"], True, {}) for r in shared("math500/test.jsonl")]
    for name in ("aime24.json", "aime25.jsonl", "amc.json"):
        for row in shared(f"aime-amc/{name}"):
            rows.append((row["problem"], str(row["answer"]), f"\\boxed{{{float(row['answer']):g}}}", True, {}))
    assert not disagreements(rows)


def test_model_solutions_are_judged_as_labelled():
    rows = [
        (f"{place} {model}", row["ground_truth"], answer["solution"], answer["is_correct"], {})
        for place, row in enumerate(shared("gsm8k/example_model_solutions.jsonl.gz"))
        for model, answer in row.items()
        if isinstance(answer, dict)
    ]
    assert len(rows) > 4000 and not disagreements(rows)
