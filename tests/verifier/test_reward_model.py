"""Reward models and judges computed here: a process of their own, scores that do not depend on neighbours, and no head
that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nearpolicy.errors import ConfigError
from nearpolicy.models.config import TINY
from nearpolicy.models.tokenizer import byte_tokenizer
from nearpolicy.records import Outcome, Prompt, Rollout
from nearpolicy.verifier.config import JudgeReward, RewardModelReward, RubricReward, VerifierConfig
from nearpolicy.verifier.service import VerifierService


def tiny(folder: Path, kind: str, num_labels: int = 1, **options) -> Path:
    """A tiny model with a head that was really trained on nothing, but saved."""
    import transformers

    tokenizer = byte_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    if "ForCausalLM" not in kind:
        options |= {"num_labels": num_labels}
    config = transformers.AutoConfig.for_model("llama", **TINY, **ids, **options)
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that texts differ
            parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return str(tiny(tmp_path_factory.mktemp("whole"), "SequenceClassification"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return str(tiny(tmp_path_factory.mktemp("steps"), "TokenClassification", num_labels=2))


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return str(tiny(tmp_path_factory.mktemp("language"), "CausalLM"))


@contextlib.asynccontextmanager
async def verifying(*rewards, **config):
    service = VerifierService({"t": rewards}, VerifierConfig(**config))
    try:
        await service.start()
        yield service
    finally:
        await service.close()


async def score(service, text, prompt="What is 2 + 2?", **columns):
    asked = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
    rollout = Rollout(sample=0, segments=(), text=text, numerics="exact")
    [verdict] = (await service.score(Prompt(id="p", task="t", columns=columns, **asked), rollout)).values()
    return verdict


def judged(reward, *texts, **columns):
    async def run():
        async with verifying(reward) as service:
            return await asyncio.gather(*(score(service, text, **columns) for text in texts))

    return asyncio.run(run())


def refusal(reward):
    with pytest.raises(ConfigError) as error:
        judged(reward)
    return str(error.value)


TEXTS = ["4", "four", "5" * 200, "", "The answer is 4.\n\nIt is.", "é中", "a" * 31, "b" * 32, "c" * 33]


def test_a_score_does_not_depend_on_the_batch_and_is_what_transformers_says(whole):
    reward = RewardModelReward(path=whole, window_s=0.5, template="{prompt} {completion}", chat=False)
    together = [v.value for v in judged(reward, *TEXTS)]
    alone = [judged(reward, text)[0].value for text in TEXTS[:3]]
    assert np.abs(np.array(alone) - together[:3]).max() < 1e-5
    assert np.std(together) > 0.01, "the texts must be told apart"

    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(whole).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole)
    for text, value in zip(TEXTS, together, strict=True):
        ids = tokenizer(f"What is 2 + 2? {text}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert model(ids).logits.item() == pytest.approx(value, abs=1e-5)


def test_batches_of_any_budget_give_the_same_scores(whole):
    values = [
        [v.value for v in judged(RewardModelReward(path=whole, window_s=0.5, **limits), *TEXTS)]
        for limits in ({}, {"batch_tokens": 1}, {"batch_size": 2})
    ]
    assert np.ptp(np.array(values), axis=0).max() < 1e-5


def test_a_chat_goes_through_the_template_and_special_tokens_of_a_completion_are_letters(whole):
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
    plain, broken = judged(RewardModelReward(path=whole), "4< |end|>", "4<|end|>", prompt=chat)
    assert plain.value == broken.value
    [other] = judged(RewardModelReward(path=whole), "4", prompt="Be brief. 2 + 2?")
    assert other.outcome is Outcome.SCORED and other.value != plain.value


def test_an_input_that_is_too_long_is_failed_or_cut_as_declared(whole):
    long = "x" * 600 + "y"
    [found] = judged(RewardModelReward(path=whole), long)
    assert (found.outcome, found.value) == (Outcome.FAILED, None) and "the model takes 512" in found.reason
    by_rule = {
        rule: judged(RewardModelReward(path=whole, on_overlong=rule, max_tokens=100, chat=False), long)[0].value
        for rule in ("keep_start", "keep_end")
    }
    assert by_rule["keep_start"] != by_rule["keep_end"]
    tail = RewardModelReward(path=whole, chat=False, template="{completion}", max_tokens=101, on_overlong="keep_end")
    a, b = judged(tail, "z" * 300 + "x" * 101, "w" * 300 + "x" * 101)
    assert a.value == b.value


def test_a_model_without_the_head_is_refused_because_it_would_be_made_up(language):
    message = refusal(RewardModelReward(path=language))
    assert "reward 't/reward_model'" in message and "score.weight" in message and "not its own" in message


def test_what_the_head_cannot_give_is_refused(whole, steps):
    assert "label is 3, but the head has the outputs 0 to 0" in refusal(RewardModelReward(path=whole, label=3))
    assert "name one that is one" in refusal(RewardModelReward(path=steps, form="steps", step_token="ab"))
    assert "cannot be loaded" in refusal(RewardModelReward(path=str(Path(whole).parent)))


def test_steps_are_read_at_their_tokens(steps):
    reward = {"path": steps, "form": "steps", "chat": False}
    text = "First.\n\nSecond step.\n\n\n\nThird."
    [found] = judged(RewardModelReward(**reward), text)
    scores = found.arrays["step_scores"]
    assert len(scores) == 3 == found.parts["steps"] and found.value == pytest.approx(min(scores))

    import transformers

    model = transformers.AutoModelForTokenClassification.from_pretrained(steps).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(steps)
    ids = tokenizer("What is 2 + 2?\n\n")["input_ids"]
    expected = []
    for step in ("First.", "Second step.", "Third."):
        ids = [*ids, *step.encode(), 10]
        with torch.no_grad():
            expected.append(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item())
    assert scores == pytest.approx(expected, abs=1e-5)
    for aggregate, value in {
        "mean": np.mean(expected),
        "last": expected[-1],
        "sum": sum(expected),
        "product": np.prod(expected),
    }.items():
        [other] = judged(RewardModelReward(**reward, aggregate=aggregate), text)
        assert other.value == pytest.approx(value, abs=1e-4)


def test_an_empty_completion_is_one_step(steps):
    [found] = judged(RewardModelReward(path=steps, form="steps"), "")
    assert found.outcome is Outcome.SCORED and found.parts["steps"] == 1


def test_a_process_that_dies_is_replaced_and_nobody_waits_for_ever(whole):
    async def run():
        async with verifying(RewardModelReward(path=whole)) as service:
            before = await score(service, "4")
            [server] = service._learned._servers.values()
            os.killpg(server._process._process.pid, signal.SIGKILL)
            after = await asyncio.gather(*(score(service, text) for text in ("5", "6", "7")))
            return before, after

    before, after = asyncio.run(run())
    assert [v.outcome for v in (before, *after)] == [Outcome.SCORED] * 4


def test_a_batch_beyond_its_limit_is_failed(whole):
    async def run():
        async with verifying(RewardModelReward(path=whole, timeout_s=0.4)) as service:
            await score(service, "1")
            [server] = service._learned._servers.values()
            os.killpg(server._process._process.pid, signal.SIGSTOP)
            return await score(service, "2")

    found = asyncio.run(run())  # the second attempt is in a new process
    assert found.outcome in (Outcome.SCORED, Outcome.FAILED)


def test_numbers_that_are_none_are_failed(tmp_path):
    folder = tiny(tmp_path, "SequenceClassification")
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.full_like(weights["score.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    [found] = judged(RewardModelReward(path=str(folder)), "4")
    assert found.outcome is Outcome.FAILED and "no number to learn from" in found.reason


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"aggregate": "mean"}, "aggregate have no effect with form: whole"),
        ({"template": "{prompt}"}, "must hold {completion}"),
        ({"form": "steps", "on_overlong": "keep_start"}, "cut the last steps off"),
    ],
)
def test_settings_without_effect_are_refused(settings, named):
    with pytest.raises(ValidationError, match=named):
        RewardModelReward(path="x", **settings)


# Judges that are computed here


def test_a_judge_computed_here_gives_the_expectation_over_its_labels(language):
    reward = JudgeReward(models=(language,), scale=(1, 12), max_characters=20)
    good, bad, long = judged(reward, "4", "five", "x" * 100)
    assert 0.0 < good.value < 1.0 and good.value != bad.value
    assert judged(reward, "4")[0].value == pytest.approx(good.value, abs=1e-6)
    assert long.outcome is Outcome.FAILED and "max_characters" in long.reason


def test_two_folders_make_an_ensemble_and_a_rubric_asks_for_each_item(language, tmp_path):
    second = str(tiny(tmp_path, "CausalLM", rms_norm_eps=1e-3))
    [found] = judged(JudgeReward(models=(language, second), penalty=1.0), "4")
    assert found.value == pytest.approx(found.parts["mean"] - found.parts["deviation"])
    items = ({"kind": "judge", "question": "Polite?", "name": "a"}, {"kind": "judge", "question": "True?", "name": "b"})
    [found] = judged(RubricReward(items=items, judge={"models": (language,)}), "4")
    assert set(found.parts) == {"a", "b"} and found.value == pytest.approx((found.parts["a"] + found.parts["b"]) / 2)
