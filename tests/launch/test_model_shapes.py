"""The shipped table of model shapes: what `nearpolicy check` says of models that are not on this machine."""

from __future__ import annotations

import pytest

from nearpolicy.launch.sizes import model_shape, shape_of, shipped_configs
from nearpolicy.models.config import ModelConfig

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}
"""Parameters in the files of these models on the hub, tied embeddings counted once."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_shape_has_the_parameters_that_were_published(name):
    shape = model_shape(ModelConfig(path=name))
    assert shape.parameters == PUBLISHED[name]
    assert shape.exact or shape.shipped  # exact where somebody has fetched the model


def test_every_other_name_in_the_table_is_a_size_of_that_family():
    counts = {name: shape_of(config, parameters=None).parameters for name, config in shipped_configs().items()}
    assert set(PUBLISHED) < set(counts)
    assert set(counts.values()) == set(PUBLISHED.values())


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B"]
)
def test_a_shape_counts_what_transformers_would_build(name):
    """With two layers, so that building is quick: each family's matrices, biases, norms, experts and router."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**shipped_configs()[name], "num_hidden_layers": 2}
    family = values.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    shape = shape_of({**values, "model_type": family}, parameters=None)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_keys_and_values_of_a_token_are_those_of_its_heads_in_groups():
    """Qwen3-8B: 8 heads of 128 numbers, keys and values, 36 layers: 147,456 bytes in bfloat16."""
    shape = model_shape(ModelConfig(path="Qwen/Qwen3-8B"))
    assert shape.kv_width * shape.layers * 2 == 147_456


def test_a_name_that_is_not_in_the_table_has_no_shape_until_it_is_fetched():
    assert model_shape(ModelConfig(path="someone/some-model")) is None
