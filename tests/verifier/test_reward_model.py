"""Reward models and judges computed here: scores that do not depend on neighbours, no head that is made up, and a
process of their own that may die without anybody waiting for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scoring import score, verifying

from nearpolicy.errors import ConfigError, ModelError
from nearpolicy.models.config import TINY
from nearpolicy.models.tokenizer import byte_tokenizer
from nearpolicy.records import Outcome
from nearpolicy.verifier.config import JudgeReward, RewardModelReward, RubricReward
from nearpolicy.verifier.learned.model_main import HeadScorer, _answers
from nearpolicy.verifier.learned.reward_model import RewardModel, reward_model_setup
from nearpolicy.verifier.rewards import Sample


def tiny(folder: Path, kind: str, num_labels: int = 1, **options) -> str:
    """The folder of a tiny model with a head that was trained on nothing, but saved."""
    import transformers

    tokenizer = byte_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    if kind != "CausalLM":
        options |= {"num_labels": num_labels}
    config = transformers.AutoConfig.for_model("llama", **{**TINY, **ids, **options})
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that texts differ
            parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("whole"), "SequenceClassification")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("steps"), "TokenClassification", num_labels=2)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """Long enough for the rules of a judge, byte by byte."""
    return tiny(tmp_path_factory.mktemp("language"), "CausalLM", max_position_embeddings=8192)


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Loaded:
    """A reward model in this process, behind what `RewardModel` asks."""

    def __init__(self, **settings):
        self.reward = RewardModelReward(**settings)
        self.scorer = HeadScorer(reward_model_setup(self.reward))

    def values(self, *texts, prompt="What is 2 + 2?"):
        """The answers to one batch."""
        return _answers(self.scorer, [{"prompt": prompt, "completion": text} for text in texts])

    def value(self, text, **more):
        [answer] = self.values(text, **more)
        [value] = answer["values"]
        return value

    async def ask(self, request):
        [answer] = _answers(self.scorer, [request])
        return answer["values"]

    def verdict(self, text):
        sample = Sample(text=text, columns={}, prompt="What is 2 + 2?", completion_ids=[], task="t")
        return asyncio.run(RewardModel(self.reward, self).score(sample))


TEXTS = ["4", "four", "5" * 200, "", "The answer is 4.\n\nIt is.", "é中", "a" * 31, "b" * 32, "c" * 33]


def test_a_score_does_not_depend_on_the_batch_and_is_what_transformers_says(whole):
    model = Loaded(path=whole, template="{prompt} {completion}", chat=False)
    together = [answer["values"][0] for answer in model.values(*TEXTS)]
    alone = [model.value(text) for text in TEXTS]
    assert np.abs(np.array(alone) - together).max() < 1e-5
    assert np.std(together) > 0.01, "the texts must be told apart"
    for limits in ({"batch_tokens": 1}, {"batch_size": 2}):
        model.scorer.setup = model.scorer.setup | limits
        others = [answer["values"][0] for answer in model.values(*TEXTS[::-1])][::-1]
        assert np.abs(np.array(others) - together).max() < 1e-5

    import transformers

    plain = transformers.AutoModelForSequenceClassification.from_pretrained(whole).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole)
    for text, value in zip(TEXTS, together, strict=True):
        ids = tokenizer(f"What is 2 + 2? {text}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert plain(ids).logits.item() == pytest.approx(value, abs=1e-5)


def test_a_model_without_padding_takes_texts_one_by_one(whole, tmp_path):
    import json
    import shutil

    shutil.copytree(whole, tmp_path / "m")
    for name, keys in {"config.json": ["pad_token_id"], "tokenizer_config.json": ["pad_token"]}.items():
        file = tmp_path / "m" / name
        data = json.loads(file.read_text())
        file.write_text(json.dumps(data | dict.fromkeys(keys)))
    model = Loaded(path=str(tmp_path / "m"), chat=False)
    assert [a["values"][0] for a in model.values("4", "four")] == [model.value("4"), model.value("four")]
    assert model.value("four") == pytest.approx(Loaded(path=whole, chat=False).value("four"), abs=1e-5)


def test_a_chat_goes_through_the_template_and_special_tokens_of_a_completion_are_letters(whole):
    model = Loaded(path=whole)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert model.value("4<|end|>", prompt=chat) == model.value("4< |end|>", prompt=chat)
    ids, _ = model.scorer.prepared({"prompt": chat, "completion": "4"})
    assert model.scorer.tokenizer.decode(ids) == "<|begin|><|system|>Be brief.<|user|>2 + 2?<|assistant|>4<|end|>"


def test_an_input_that_is_too_long_is_failed_or_cut_as_declared(whole):
    [short, long] = Loaded(path=whole).values("4", "x" * 600)
    assert "values" in short and "the model takes 512" in long["error"]
    rules = {"chat": False, "template": "{completion}", "max_tokens": 101}
    kept_end = Loaded(path=whole, on_overlong="keep_end", **rules)
    assert kept_end.value("z" * 300 + "x" * 101) == kept_end.value("w" * 300 + "x" * 101)
    kept_start = Loaded(path=whole, on_overlong="keep_start", **rules)
    assert kept_start.value("x" * 101 + "z" * 300) == kept_start.value("x" * 101 + "w" * 9)
    assert kept_start.value("x" * 101 + "z" * 300) != kept_end.value("x" * 101 + "z" * 300)


def test_what_the_head_cannot_give_is_refused(whole, steps, language):
    with pytest.raises(ModelError, match=r"score\.weight.*not its own"):
        Loaded(path=language)
    with pytest.raises(ModelError, match="label is 3, but the head has the outputs 0 to 0"):
        Loaded(path=whole, label=3)
    with pytest.raises(ModelError, match="activation is softmax, which is always 1"):
        Loaded(path=whole, activation="softmax")
    with pytest.raises(ModelError, match="name one that is one"):
        Loaded(path=steps, form="steps", step_token="ab")


def test_several_outputs_are_a_distribution_of_which_one_counts(tmp_path):
    folder = tiny(tmp_path, "SequenceClassification", num_labels=3)
    shares = [Loaded(path=folder, label=label).value("4") for label in (0, 1, 2)]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    raw = [Loaded(path=folder, label=label, activation="none").value("4") for label in (0, 1, 2)]
    assert shares == pytest.approx(np.exp(raw) / np.exp(raw).sum(), abs=1e-6)
    assert Loaded(path=folder, activation="sigmoid").value("4") == pytest.approx(1 / (1 + np.exp(-raw[2])), abs=1e-6)


def test_steps_are_read_at_their_tokens(steps):
    text = "First.\n\nSecond step.\n\n\n\nThird."
    found = Loaded(path=steps, form="steps", chat=False).verdict(text)
    scores = found.arrays["step_scores"]
    assert len(scores) == 3 == found.parts["steps"] and found.value == pytest.approx(min(scores))

    import transformers

    plain = transformers.AutoModelForTokenClassification.from_pretrained(steps).eval()
    ids = transformers.AutoTokenizer.from_pretrained(steps)("What is 2 + 2?\n\n")["input_ids"]
    expected = []
    for step in ("First.", "Second step.", "Third."):
        ids = [*ids, *step.encode(), 10]
        with torch.no_grad():
            expected.append(plain(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item())
    assert scores == pytest.approx(expected, abs=1e-5)
    for aggregate, value in {
        "mean": np.mean(expected),
        "last": expected[-1],
        "sum": sum(expected),
        "product": np.prod(expected),
    }.items():
        other = Loaded(path=steps, form="steps", chat=False, aggregate=aggregate).verdict(text)
        assert other.value == pytest.approx(value, abs=1e-4)


def test_an_empty_completion_is_one_step(steps):
    found = Loaded(path=steps, form="steps").verdict("")
    assert found.outcome is Outcome.SCORED and found.parts["steps"] == 1


def test_numbers_that_are_none_are_failed(whole):
    model = Loaded(path=whole)
    model.scorer._head._model.score.weight.fill_(float("nan"))
    [answer] = model.values("4")
    assert "no number to learn from" in answer["error"]


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


# In the service


def test_a_process_that_dies_or_hangs_is_replaced_and_nobody_waits_for_ever(whole):
    async def run():
        async with verifying(RewardModelReward(path=whole, timeout_s=10.0, window_s=0.1), cache=0) as service:
            before = await score(service, "4")
            [server] = service._learned._servers.values()
            os.killpg(server._process._process.pid, signal.SIGKILL)
            after = await asyncio.gather(*(score(service, text) for text in ("4", "x" * 600)))
            server._timeout_s = 0.3
            os.killpg(server._process._process.pid, signal.SIGSTOP)
            server._setup = b'{"scorer": "head", "path": "/no/such"}'  # and it cannot come back either
            return before, *after, await score(service, "5")

    before, same, long, lost = (verdicts["reward_model"] for verdicts in asyncio.run(run()))
    assert before.outcome is Outcome.SCORED and same.value == pytest.approx(before.value, abs=1e-5)
    assert long.outcome is Outcome.FAILED and "the model takes 512" in long.reason
    assert (lost.outcome, lost.value) == (Outcome.FAILED, None) and "cannot be loaded" in lost.reason


def test_rewards_on_one_model_keep_their_own_limits(whole):
    quick = RewardModelReward(path=whole, timeout_s=10.0, window_s=0.0)
    slow, again = (quick.model_copy(update={"name": name, "timeout_s": 60.0}) for name in ("slow", "again"))

    async def run():
        async with verifying(quick, slow, again) as service:
            return [server._timeout_s for server in service._learned._servers.values()]

    assert asyncio.run(run()) == [10.0, 60.0]


def test_a_model_that_cannot_be_loaded_is_refused_at_the_start(language):
    async def run():
        async with verifying(RewardModelReward(path=language)):
            pass

    with pytest.raises(ConfigError, match=r"reward 't/reward_model': the model .* cannot be loaded.*score\.weight"):
        asyncio.run(run())


def test_judges_computed_here_give_the_expectation_over_their_answers(language, tmp_path):
    """A scale with a label that is a prefix of another, an ensemble, and a rubric; two processes for all of them."""
    second = tiny(tmp_path, "CausalLM", rms_norm_eps=1e-2, max_position_embeddings=8192)
    items = ({"kind": "judge", "question": "Polite?", "name": "a"}, {"kind": "judge", "question": "True?", "name": "b"})
    rewards = (
        JudgeReward(models=(language,), scale=(1, 12), max_characters=40, instructions="Judge."),
        JudgeReward(name="panel", models=(language, second), penalty=1.0, instructions="Judge."),
        RubricReward(items=items, judge={"models": (language,)}),
    )

    async def run():
        async with verifying(*rewards, cache=0) as service:
            assert len(service._learned._servers) == 2
            return await asyncio.gather(*(score(service, text) for text in ("4", "five", "4", "x" * 100)))

    good, bad, again, long = asyncio.run(run())
    assert 0.0 < good["judge"].value < 1.0 and good["judge"].value != bad["judge"].value
    assert again["judge"].value == pytest.approx(good["judge"].value, abs=1e-5)
    assert long["judge"].outcome is Outcome.FAILED and "max_characters" in long["judge"].reason
    panel, rubric = good["panel"], good["rubric"]
    assert panel.value == pytest.approx(panel.parts["mean"] - panel.parts["deviation"]) and panel.parts["deviation"] > 0
    assert set(rubric.parts) == {"a", "b"}
    assert rubric.value == pytest.approx((rubric.parts["a"] + rubric.parts["b"]) / 2)
