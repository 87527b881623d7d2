"""User reward functions: which shape they have, what they receive, and what their answers mean."""

from __future__ import annotations

import asyncio
import inspect
import threading

import numpy as np
import pytest

from nearpolicy.records import Outcome, Rollout
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.sources import Row, make_prompt
from nearpolicy.verifier.config import FunctionReward, NumberReward
from nearpolicy.verifier.functions import (
    RewardFunctionError,
    Shape,
    failure,
    number_verdict,
    packed,
    prepare,
    required_columns,
)
from nearpolicy.verifier.rewards import Sample


def prepared(function, **fields):
    reward = FunctionReward(path="here:f", name="mine", **fields)
    return prepare(reward, {"here:f": function})


def samples(*texts, prompt="q", **columns):
    return [Sample(text=t, columns=columns, prompt=prompt, completion_ids=[1, 2], task="sums") for t in texts]


def verdicts(function, given, **fields):
    user = prepared(function, **fields)
    results = [asyncio.run(_awaited(r)) if inspect.isawaitable(r) else r for r in user.begin(given)]
    return user.verdicts(results, len(given))


async def _awaited(result):
    return await result


def test_trl_function_receives_lists_of_what_it_names_and_nothing_else():
    seen = {}

    def reward(completions, answer, prompts, completion_ids):
        seen.update(completions=completions, answer=answer, prompts=prompts, ids=completion_ids)
        return [1.0, None]

    one, none = verdicts(reward, samples("a", "b", answer=7, unused="x"))
    assert seen == {"completions": ["a", "b"], "answer": [7, 7], "prompts": ["q", "q"], "ids": [[1, 2], [1, 2]]}
    assert one.value == 1.0
    assert none.outcome is Outcome.ABSTAINED


def test_trl_function_with_kwargs_receives_every_column():
    seen = {}

    def reward(completions, **columns):
        seen.update(columns)
        return [0.0]

    verdicts(reward, samples("a", answer=7, level=2), kwargs={"level": 9})
    assert seen == {"prompts": ["q"], "completion_ids": [[1, 2]], "answer": [7], "level": 9}


def test_chat_prompts_reach_trl_functions_as_messages():
    chat = [{"role": "user", "content": "q"}]

    def reward(prompts, completions):
        return [float(prompts[0] == chat and completions[0] == [{"role": "assistant", "content": "a"}])]

    assert verdicts(reward, samples("a", prompt=chat))[0].value == 1.0


@pytest.mark.parametrize("question", ["Say hi.", [{"role": "user", "content": "Say hi."}]])
def test_a_function_gets_the_prompt_in_the_form_of_the_row_whatever_the_chat_template_needs(question):
    task = TaskConfig.model_validate(
        {
            "name": "t",
            "source": {"kind": "jsonl", "path": "x"},
            "system": "Be kind.",
            "rewards": [{"kind": "number"}],
        }
    )
    prompt = make_prompt(task, Row(1, {"prompt": question}), chat=True)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    sample = Sample.of(prompt, Rollout(sample=0, segments=(), text="hi", numerics="exact"))
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0.0]

    verdicts(reward, [sample])
    if isinstance(question, str):
        assert seen == {"prompts": ["Say hi."], "completions": ["hi"]}
    else:
        assert seen["prompts"] == [[{"role": "system", "content": "Be kind."}, *question]]
        assert seen["completions"] == [[{"role": "assistant", "content": "hi"}]]


def test_verl_function_is_called_per_sample_and_its_mapping_holds_score_and_parts():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "sums" and extra_info == {"k": 1}
        return {"score": 0.5, "acc": solution_str == ground_truth, "note": "text", "bad": float("nan")}

    right, wrong = verdicts(compute_score, samples("7", "8", gold="7", extra_info={"k": 1}), answer_column="gold")
    assert (right.value, dict(right.parts)) == (0.5, {"acc": 1.0})
    assert (wrong.value, dict(wrong.parts)) == (0.5, {"acc": 0.0})


def test_verl_function_may_return_a_plain_number_or_abstain():
    def compute_score(solution_str, ground_truth):
        return None if solution_str == "?" else float(solution_str == ground_truth)

    right, unsure = verdicts(compute_score, samples("7", "?", answer="7"))
    assert right.value == 1.0 and unsure.outcome is Outcome.ABSTAINED


def test_async_functions_of_both_shapes_are_awaited():
    async def trl(completions):
        await asyncio.sleep(0)
        return [0.25] * len(completions)

    async def verl(solution_str):
        await asyncio.sleep(0)
        return 0.75

    assert [v.value for v in verdicts(trl, samples("a", "b"))] == [0.25, 0.25]
    assert [v.value for v in verdicts(verl, samples("a", "b"))] == [0.75, 0.75]


@pytest.mark.parametrize("scores", [[0.0, 0.1, 0.2], [0.0] * 5, 1.0, None, "1234", {0: 1.0}, (x for x in range(4))])
def test_scores_that_cannot_be_matched_to_samples_are_an_error_naming_the_scorer(scores):
    def reward(completions):
        return scores

    with pytest.raises(RewardFunctionError, match=r"'mine' returned .* for 4 samples"):
        verdicts(reward, samples("a", "b", "c", "d"))


def test_arrays_are_lists_of_scores():
    def reward(completions):
        return np.array([0.5, 1.0], dtype=np.float32)

    assert [v.value for v in verdicts(reward, samples("a", "b"))] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("result", "outcome", "expected"),
    [
        (0.5, Outcome.SCORED, 0.5),
        (3, Outcome.SCORED, 3.0),
        (True, Outcome.SCORED, 1.0),
        (np.float32(0.5), Outcome.SCORED, 0.5),
        (np.array(0.5), Outcome.SCORED, 0.5),
        (np.bool_(True), Outcome.SCORED, 1.0),
        (None, Outcome.ABSTAINED, None),
        (float("nan"), Outcome.FAILED, None),
        (np.float64("inf"), Outcome.FAILED, None),
        (10**400, Outcome.FAILED, None),
        (-1e308, Outcome.FAILED, None),
        ("0.5", Outcome.FAILED, None),
        ([0.5], Outcome.FAILED, None),
        (np.array([0.5]), Outcome.FAILED, None),
        (1j, Outcome.FAILED, None),
    ],
)
def test_only_finite_numbers_are_scores(result, outcome, expected):
    verdict = number_verdict(result)
    assert (verdict.outcome, verdict.value) == (outcome, expected)
    assert outcome is not Outcome.FAILED or "returned" in verdict.reason


def test_verl_mapping_without_a_score_is_a_failure():
    [verdict] = verdicts(lambda solution_str: {"acc": 1.0}, samples("a"))
    assert verdict.outcome is Outcome.FAILED and "'score'" in verdict.reason


def test_verl_mapping_may_name_its_parts_as_it_likes():
    result = {"score": 1, "value": 0.5, "cls": 2, "reason": 3, "outcome": 4, "result": 5}
    [verdict] = verdicts(lambda solution_str: result, samples("a"))
    assert (verdict.outcome, verdict.value) == (Outcome.SCORED, 1.0)
    assert dict(verdict.parts) == {"value": 0.5, "cls": 2.0, "reason": 3.0, "outcome": 4.0, "result": 5.0}


def test_shapes_are_told_apart_by_parameter_names():
    assert prepared(lambda completions: 0).shape is Shape.TRL
    assert prepared(lambda **kwargs: 0).shape is Shape.TRL
    assert prepared(lambda data_source, solution_str, ground_truth, extra_info=None: 0).shape is Shape.VERL
    assert prepared(lambda solution_str, **kwargs: 0).shape is Shape.VERL


@pytest.mark.parametrize(
    ("function", "fields", "says"),
    [
        (lambda text: 0, {}, r"takes \(text\), which fits neither shape"),
        (lambda: 0, {}, "fits neither shape"),
        (lambda completions, /: 0, {}, "fits neither shape"),
        (lambda completions: 0, {"kwargs": {"alpha": 1}}, "does not take alpha"),
        (lambda completions: 0, {"answer_column": "gold"}, "remove `answer_column`"),
        (lambda solution_str, level: 0, {}, "also requires level"),
    ],
)
def test_function_that_does_not_fit_is_refused_by_name(function, fields, says):
    with pytest.raises(RewardFunctionError, match=says) as caught:
        prepared(function, **fields)
    assert "'mine' (here:f)" in str(caught.value)


def test_required_columns_come_from_the_signature():
    def columns(function, **fields):
        return required_columns(FunctionReward(path="here:f", **fields), {"here:f": function})

    assert columns(lambda completions, answer, level=1, **kwargs: 0) == ("answer",)
    assert columns(lambda completions, answer, level: 0, kwargs={"level": 1}) == ("answer",)
    assert columns(lambda solution_str, ground_truth: 0) == ("answer",)
    assert columns(lambda solution_str, ground_truth: 0, answer_column="gold") == ("gold",)
    assert columns(lambda solution_str: 0) == ()
    assert required_columns(NumberReward(answer_column="sum")) == ("sum",)


def test_functions_are_loaded_from_modules_and_files(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text("class R:\n    @staticmethod\n    def half(completions):\n        return [0.5]\n\nNOT = 3\n")
    assert prepare(FunctionReward(path=f"{file}:R.half")).function(completions=["a"]) == [0.5]
    for path, says in [
        (f"{file}:missing", "has no 'missing'"),
        (f"{file}:NOT", "not a function"),
        (f"{tmp_path}/absent.py:f", "there is no file"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
    ]:
        with pytest.raises(RewardFunctionError, match=says):
            prepare(FunctionReward(path=path))


def test_function_that_cannot_travel_is_refused_and_told_the_way_out():
    lock = threading.Lock()

    def reward(completions):
        with lock:
            return [1.0]

    with pytest.raises(RewardFunctionError, match=r"'mine' cannot travel .*verifier\.in_process: true"):
        packed(prepared(reward))


def test_an_exception_whose_text_raises_is_a_failed_verdict_too():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    verdict = failure(Mute())
    assert (verdict.outcome, verdict.reason) == (Outcome.FAILED, "the function raised Mute: its text cannot be had")
    assert len(failure(ValueError("x" * 10_000_000)).reason) < 500
