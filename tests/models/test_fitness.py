"""A model whose layers are plain attention is taken; every other kind is refused by name, before it does harm."""

from __future__ import annotations

import families
import pytest
import torch

from nearpolicy.errors import ModelError
from nearpolicy.models import fitness, loading
from nearpolicy.models.attention import NAME
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.rows import Node, RowContext
from nearpolicy.models.weights import digests, named_weights

TINY = 0.02
"""The standard deviation families start from: so small that the probe must amplify."""


@pytest.mark.parametrize("std", [TINY, families.LOUD])
@pytest.mark.parametrize("family", families.FIT)
def test_models_of_plain_attention_fit(family, std):
    policy = loading.load_policy(families.folder(family, std=std))
    assert fitness.check_fitness(policy, family) < 2e-5


@pytest.mark.parametrize("std", [TINY, families.LOUD])
@pytest.mark.parametrize("family", families.UNFIT)
def test_other_kinds_are_refused_with_model_class_and_reason(family, std):
    folder = families.folder(family, std=std)
    with pytest.raises(ModelError) as caught:
        loading.load_policy(folder)
    message = str(caught.value)
    assert folder in message
    assert "ForCausalLM)" in message
    assert "nats (at most 0.0001 is allowed)" in message or "packed attention failed inside it" in message
    assert "Choose a model whose layers are plain attention" in message


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_the_probe_leaves_every_bit_of_the_weights(family, monkeypatch):
    from transformers import AutoModelForCausalLM

    folder = families.folder(family, std=TINY)
    untouched = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    made_louder = []
    amplified = fitness._amplified
    monkeypatch.setattr(fitness, "_amplified", lambda policy: made_louder.append(policy) or amplified(policy))
    policy = loading.load_policy(folder)
    assert made_louder == [policy]
    assert digests(named_weights(policy.model)) == digests(named_weights(untouched))


def test_a_refused_model_has_its_weights_back_too():
    policy = loading.load_policy(families.folder("bloom", std=TINY), known_to_fit=True)
    before = digests(named_weights(policy.model))
    with pytest.raises(ModelError):
        fitness.check_fitness(policy, "bloom")
    assert digests(named_weights(policy.model)) == before


@pytest.mark.parametrize("family", families.FIT)
def test_transformers_builds_no_mask_for_packed_attention(family):
    """A mask would be quadratic in the packed row, and wrong for it; two rotary tables and windows included."""
    policy, seen = families.shared(family), []
    decoder = policy.model.get_decoder()
    layers = list(decoder.layers)

    def watch(_, arguments, keywords):
        seen.append(keywords.get("attention_mask", arguments[1] if len(arguments) > 1 else None))

    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        context = RowContext([Node(0, 9), Node(9, 4)], 13)
        with torch.no_grad():
            policy.hidden(families.random_ids(13, 0), context.positions, context)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == [None] * len(layers)


def test_a_mask_that_reaches_packed_attention_is_an_error():
    policy = families.shared()
    context = RowContext([Node(0, 6)], 6)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="built an attention mask for packed attention"):
        policy.model(
            input_ids=families.random_ids(6, 0)[None],
            position_ids=context.positions[None],
            attention_mask=mask,
            use_cache=False,
            packed=context,
        )


def test_packed_attention_without_a_context_is_an_error():
    with pytest.raises(RuntimeError, match="pass packed=<context>"):
        families.shared().model(input_ids=families.random_ids(6, 0)[None], use_cache=False)


def test_a_model_that_ignores_positions_is_refused():
    """The three comparisons see what no exception tells: here a model that takes positions from the row."""

    class RowPositions(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config

        def get_decoder(self):
            decoder = self.model.get_decoder()
            return lambda input_ids, position_ids, **more: decoder(
                input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **more
            )

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("model"), name)

        def forward(self, **inputs):
            return self.model(**inputs)

    model = families.fresh().model
    with pytest.raises(ModelError, match="differs from the model's own forward by"):
        fitness.check_fitness(PolicyModel(RowPositions(model)), "made-up")


def test_every_dropout_is_off_even_in_train_mode():
    """K14."""
    policy = families.fresh(attention_dropout=0.3).train()
    ids = families.random_ids(20, 0)

    def scores():
        context = RowContext([Node(0, 20)], 20)
        with torch.no_grad():
            return policy.logits(ids, context.positions, context, torch.arange(20))

    assert torch.equal(scores(), scores())
    assert {m.attention_dropout for m in policy.modules() if hasattr(m, "attention_dropout")} == {0.0}
    assert policy.model.config._attn_implementation == NAME


def test_a_check_that_fails_once_and_passes_when_repeated_is_told_and_not_blamed_on_the_model(caplog, monkeypatch):
    policy = loading.load_policy(families.folder("llama", std=families.LOUD), known_to_fit=True)
    measure, calls = fitness._measure, []

    def once_wrong(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise ModelError("two completions of one shared prompt differs by 0.004 nats")
        return measure(*arguments)

    monkeypatch.setattr(fitness, "_measure", once_wrong)
    with caplog.at_level("WARNING"):
        assert fitness.check_fitness(policy, "mine") < 1e-4
    assert "mine: the check passed when repeated" in caplog.text and "0.004 nats" in caplog.text
