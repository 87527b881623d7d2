r"""The verdict on a completion: its answer extracted, compared with the right one, and the reason in words.

verify(MathVerifyReward(), "1/2", "so it is \boxed{0.5}")  ->  1.0, '0.5' (the last box) is '1/2': exact numbers
"""

from __future__ import annotations

from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import MathVerifyReward
from nearpolicy.verifier.math import library
from nearpolicy.verifier.math.equivalence import Comparison, can_read, compare, is_empty
from nearpolicy.verifier.math.extraction import Extraction, extract, gold_answer


def verify(reward: MathVerifyReward, gold: str, completion: str) -> Verdict:
    """1.0 if the completion gives the right answer, else 0.0; failed if the right answer cannot be read.

    ``gold``: the right answer, or a worked solution that ends with it. The part `found` is 1 if an answer was found in
    the completion; the reason says which, by which rule, and which rule compared it. Formulas outside our notation go
    to math-verify, which may take for ever and may raise: call this where a limit can be enforced.
    """
    right = gold_answer(gold)
    if is_empty(right):
        return Verdict.failed("the right answer is empty")
    found = extract(completion, reward.extract)
    if found.answer is None:
        return _scored(False, found, found.how)
    try:
        comparison = compare(right, found.answer, tolerance=reward.tolerance) or library.compare(right, found.answer)
    except library.UnreadableGold as error:
        if not can_read(right):
            return Verdict.failed(f"the right answer {_brief(right)} cannot be compared: {error}")
        comparison = Comparison(False, "only math-verify may read the answer, and it does not read the right one")
    return _scored(comparison.equal, found, _reason(right, found, comparison))


def gold_problem(gold: str) -> str | None:
    """Why no completion can be compared with a right answer; None if it can be read. May ask math-verify."""
    right = gold_answer(gold)
    if is_empty(right):
        return "is empty"
    if can_read(right):
        return None
    try:
        library.golds_of(right)
    except library.UnreadableGold as error:
        return f"holds {_brief(right)}, which cannot be compared: {error}"
    return None


def read_without_library(gold: str) -> bool:
    """Whether a right answer needs no math-verify."""
    right = gold_answer(gold)
    return not is_empty(right) and can_read(right)


_CONTROL = {
    "tag": "<answer>{}</answer>",
    "final_answer": "The answer is {}",
    "hash": "#### {}",
    "last_number": "{}",
    "whole": "{}",
}


def as_completion(reward: MathVerifyReward, answer: str) -> str:
    """A completion that gives an answer in the form that the reward looks for."""
    return _CONTROL.get(reward.extract, "\\boxed{{{}}}").format(gold_answer(answer))


def _scored(right: bool, found: Extraction, reason: str) -> Verdict:
    parts = {"found": float(found.answer is not None)}
    return Verdict(outcome=Outcome.SCORED, value=float(right), parts=parts, reason=reason)


def _reason(right: str, found: Extraction, comparison: Comparison) -> str:
    if comparison.rule.startswith("time_limit"):
        return comparison.rule
    verb = "is" if comparison.equal else "is not"
    return f"{_brief(found.answer)} ({found.how}) {verb} {_brief(right)}: {comparison.rule}"


def _brief(text: str) -> str:
    return f"'{text}'" if len(text) <= 80 else f"'{text[:77]}...'"
