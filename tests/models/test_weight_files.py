"""What is read out of a folder in pieces is, to the bit, what transformers loads whole; and what is refused there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from nearpolicy.errors import ModelError
from nearpolicy.models import loading
from nearpolicy.models.numerics import probe_model
from nearpolicy.models.shapes import attention_shapes, linear_shapes


def require_same(folder: str | Path, dtype: torch.dtype = torch.float32, parts: int = 3) -> None:
    """By name: types, tied tensors, buffers; and all values, read in ``parts`` as ranks do."""
    whole, outline = loading.load_policy(folder, dtype, known_to_fit=True), loading.outline_policy(folder, dtype)
    ours, theirs = (dict(policy.model.named_parameters(remove_duplicate=False)) for policy in (outline, whole))
    assert list(ours) == list(theirs)
    assert all(p.is_meta for p in ours.values())
    assert [_same_as(ours, name) for name in ours] == [_same_as(theirs, name) for name in theirs]
    for name, right in theirs.items():
        assert _kind(ours[name]) == _kind(right), name
        if not right.dim():
            assert torch.equal(outline.files.rows(name), right), name
            continue
        step = -(-len(right) // parts)
        pieces = [outline.files.rows(name, i * step, min((i + 1) * step, len(right))) for i in range(parts)]
        assert torch.equal(torch.cat(pieces), right), name
        assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces), name
    buffers = dict(outline.model.named_buffers())
    for name, right in whole.model.named_buffers():
        found = outline.files.rows(name) if name in outline.files else buffers[name]
        assert found.dtype == right.dtype and torch.equal(found, right), name
    assert attention_shapes(outline) == attention_shapes(whole)
    assert linear_shapes(outline) == linear_shapes(whole)
    assert outline.model.generation_config.to_dict() == whole.model.generation_config.to_dict()
    assert outline.model.config._attn_implementation == whole.model.config._attn_implementation
    assert not outline.model.training


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.Size, bool]:
    return parameter.dtype, parameter.shape, parameter.requires_grad


def _same_as(parameters: dict[str, torch.nn.Parameter], name: str) -> list[str]:
    return [other for other, p in parameters.items() if p is parameters[name]]


@pytest.mark.parametrize("family", families.FIT)
def test_pieces_of_every_family_are_what_is_loaded_whole(family):
    require_same(families.folder(family))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_in_another_type_too(family):
    require_same(families.folder(family), torch.bfloat16)


def test_weights_that_are_not_tied_are_two():
    require_same(families.folder("llama", tie_word_embeddings=False))


def test_the_rule_of_numerics_is_found_without_weights():
    folder = families.folder("qwen3_moe")
    whole, outline = loading.load_policy(folder, known_to_fit=True), loading.outline_policy(folder)
    assert probe_model(outline, 1) == probe_model(whole, 1)


@pytest.fixture
def copy(tmp_path):
    """Of a tiny model's folder, to be changed."""
    return lambda family="llama", **options: Path(
        shutil.copytree(families.folder(family, **options), tmp_path / "model")
    )


def test_a_model_in_several_files(copy):
    folder = copy()
    tensors, where = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(tensors):
        file = f"model-{number % 3 + 1:05}-of-00003.safetensors"
        where[name] = file
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    require_same(folder)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_tied_weights_that_files_have_twice_are_one_if_they_are_equal(copy, change):
    folder = copy()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, 3] += change
    save_file(tensors, file, metadata={"format": "pt"})
    require_same(folder)
    policy = loading.outline_policy(folder)
    assert (policy.model.lm_head.weight is policy.model.model.embed_tokens.weight) == (change == 0.0)


def test_only_experts_that_are_asked_for_are_read(monkeypatch):
    """4 experts, of each three matrices of 64 x 64."""
    files = loading.outline_policy(families.folder("qwen3_moe")).files
    read = []
    plain = type(files)._read
    monkeypatch.setattr(type(files), "_read", lambda self, key, *rest: read.append(key) or plain(self, key, *rest))
    files.rows("model.layers.1.mlp.experts.gate_up_proj", 1, 3)
    assert read == [f"model.layers.1.mlp.experts.{i}.{part}_proj.weight" for part in ("gate", "up") for i in (1, 2)]
    read.clear()
    assert files.rows("model.layers.1.mlp.experts.gate_up_proj", 4, 4).shape == (0, 128, 64)
    assert read == []


def test_files_that_do_not_fit_the_config_are_refused_by_name_before_anything_is_read(copy):
    folder = copy()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.layers.0.input_layernorm.weight": norm[:32].clone(), "x": norm}, file)
    with pytest.raises(ModelError, match=r"without model\.norm\.weight") as refused:
        loading.outline_policy(folder)
    assert "no place for, x" in str(refused.value)
    assert "model.layers.0.input_layernorm.weight ([32] in the file, [64] by the config)" in str(refused.value)


def test_files_that_are_cut_off_are_refused_whenever_that_happens(copy):
    folder = copy()
    file, whole = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
    files = loading.outline_policy(folder).files
    with file.open("r+b") as opened:
        opened.truncate(len(whole) - 1000)
    with pytest.raises(ModelError, match=r"weights that cannot be read: model\.norm\.weight: .*make the folder whole"):
        files.rows("model.norm.weight", 0, 64)
    with pytest.raises(ModelError, match=str(folder)):
        loading.outline_policy(folder)


@pytest.mark.parametrize("reason", ["neither model.safetensors", "`quantization_config`", "an adapter lies beside"])
def test_a_folder_that_cannot_be_read_in_pieces_is_loaded_whole_and_that_is_said(copy, reason, monkeypatch):
    folder, said = copy(), []
    if "safetensors" in reason:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    elif "adapter" in reason:
        (folder / "adapter_config.json").write_text("{}")
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    loaded = []
    monkeypatch.setattr(loading, "load_policy", lambda *args, **options: loaded.append(args) or "a whole model")
    assert loading.outline_policy(folder, say=said.append) == "a whole model"
    assert len(loaded) == 1
    assert said and f"every rank loads {folder} whole before it is cut: " in said[0] and reason in said[0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (
            "sarvam_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2},
        ),
        ("hrm_text", {}),
    ],
)
def test_tensors_that_files_have_otherwise_are_put_together_whole(family, options):
    """Queries, keys and values in one; the model has three."""
    folder = loading.resolve(f"random:{family}", options)
    require_same(folder)


def test_a_model_of_which_transformers_makes_a_part_by_itself_is_loaded_whole(copy, monkeypatch):
    folder, said = copy(), []
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", ["model.norm.weight"])
    policy = loading.outline_policy(folder, known_to_fit=True, say=said.append)
    assert policy.files is None and not any(p.is_meta for p in policy.parameters())
    assert "its files are without model.norm.weight, which transformers makes by itself" in said[0]
