"""Every name of a model ends in one complete Hugging Face folder, or in a message that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from nearpolicy.errors import ModelError
from nearpolicy.models import loading
from nearpolicy.models.tokenizer import generation_stop_ids, load_tokenizer
from nearpolicy.models.weights import digests, named_weights


def weights(**options):
    return digests(named_weights(families.fresh(**options).model))


def test_random_weights_are_decided_by_their_seed_and_by_nothing_else(monkeypatch, tmp_path):
    first = weights(seed=3)
    monkeypatch.setenv("NEARPOLICY_CACHE", str(tmp_path))  # made again, elsewhere
    torch.manual_seed(99)
    assert weights(seed=3) == first
    assert weights(seed=4) != first


def test_making_a_random_model_leaves_the_default_random_generator_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARPOLICY_CACHE", str(tmp_path))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loading.resolve("random:llama", {}, 8)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_is_made_once_and_found_again():
    folder = loading.resolve("random:llama", {}, 0)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert loading.resolve("random:llama", {}, 0) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_an_unknown_family_and_a_wrong_option_are_named():
    with pytest.raises(ModelError, match=r"'random:lama' cannot be made: .* did you mean random:llama\?"):
        loading.resolve("random:lama")
    with pytest.raises(ModelError, match=r"model\.init\.vocab_size is 100; the byte tokenizer needs 272"):
        loading.resolve("random:llama", {"vocab_size": 100})


@pytest.mark.parametrize(
    ("init", "says"),
    [
        ({"hiden_size": 32}, r"model\.init\.hiden_size is not a value of the config of `llama`; .* `hidden_size`"),
        ({"return_dict": False}, r"model\.init\.return_dict is not a value"),
        ({"temperature": 0.5}, r"model\.init\.temperature is not a value"),
    ],
)
def test_a_key_that_the_family_does_not_know_is_refused_and_nothing_is_made(init, says, monkeypatch, tmp_path):
    monkeypatch.setenv("NEARPOLICY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=says):
        loading.resolve("random:llama", init)
    assert not (tmp_path / "cache").exists()


def test_a_key_in_its_old_or_its_own_spelling_has_an_effect():
    assert loading.load_policy(loading.resolve("random:gpt2", {"n_layer": 3})).config.num_hidden_layers == 3
    turned = loading.load_policy(loading.resolve("random:llama", {"rope_theta": 77.0})).config
    assert turned.rope_parameters["rope_theta"] == 77.0


@pytest.mark.parametrize(
    "init",
    [
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"hidden_size": 0},
        {"num_hidden_layers": -1},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": 1e30, "initializer_range": 1e30},
        {"hidden_size": "wide"},
        {"hidden_act": "foo"},
    ],
)
def test_options_that_make_no_model_are_refused_in_one_line_and_leave_nothing(init, monkeypatch, tmp_path):
    monkeypatch.setenv("NEARPOLICY_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"model\.init") as refused:
        loading.resolve("random:llama", init)
    assert "\n" not in str(refused.value)
    assert not any((tmp_path / "models").iterdir())


def test_a_family_whose_sizes_model_init_does_not_reach_is_refused_before_it_fills_the_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARPOLICY_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"several parts with sizes of their own.* random:llama4_text"):
        loading.resolve("random:llama4")
    with pytest.raises(ModelError, match=r"random:llama' would take [\d,]+ MB and this machine has"):
        loading.resolve("random:llama", {"vocab_size": 999_999_999})
    assert not any((tmp_path / "models").iterdir())


@pytest.fixture
def broken(tmp_path):
    """A copy of a tiny model's folder, to be damaged."""
    return Path(shutil.copytree(loading.resolve("random:llama"), tmp_path / "model"))


def change_weights(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {k: v for k, v in t.items() if ".layers.1." not in k}, r"comes without model\.layers\.1\..* 5 more"),
        (lambda t: {k: v for k, v in t.items() if "embed" not in k}, r"without .*model\.embed_tokens\.weight"),
        (lambda t: t | {"model.layers.7.x": torch.zeros(3)}, r"no place for, model\.layers\.7\.x;"),
        (
            lambda t: t | {"model.norm.weight": torch.zeros(3)},
            r"model\.norm\.weight \(\[3\] in the file, \[64\] by the",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(broken, change, says):
    """transformers would go on with random numbers."""
    change_weights(broken, change)
    with pytest.raises(ModelError, match=says):
        loading.load_policy(broken, known_to_fit=True)


def test_a_folder_that_lacks_only_tied_weights_is_whole(broken):
    assert not any("lm_head" in name for name in load_file(broken / "model.safetensors"))
    loading.load_policy(broken)


def test_weights_that_are_not_numbers_are_refused(broken):
    change_weights(broken, lambda t: t | {"model.norm.weight": torch.full((64,), float("nan"))})
    with pytest.raises(ModelError, match="not finite numbers: its weights or its config are broken"):
        loading.load_policy(broken)


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights,
        lambda folder: change_config(folder, vocab_size=99),
        lambda folder: change_config(folder, num_hidden_layers=5),
        lambda folder: change_config(folder, num_attention_heads=5),
        lambda folder: change_config(folder, model_type="nosuch"),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_a_damaged_folder_is_refused_by_name_whatever_the_libraries_raise(broken, damage):
    damage(broken)
    with pytest.raises(ModelError, match=str(broken)):
        loading.load_policy(broken)


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, true]}', "\ud800"])
def test_end_tokens_that_are_none_are_refused_with_their_file(broken, text):
    (broken / "generation_config.json").write_text(text, errors="surrogatepass")
    with pytest.raises(ModelError, match=r"generation_config\.json: .*mend the model folder"):
        generation_stop_ids(broken)


def test_a_broken_tokenizer_is_refused_with_its_path(broken):
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=f"no tokenizer at {broken}: "):
        load_tokenizer(str(broken))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json; name a Hugging Face model folder"):
        loading.resolve(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        loading.load_policy(loading.resolve(str(tmp_path)))


def test_a_package_that_is_not_installed_is_named_with_the_way_to_get_it():
    with pytest.raises(ModelError, match=r"needs the PyPI package no-such-model; run: pip install .*no-such-model"):
        loading.resolve("package:no-such-model")


def test_a_folder_is_complete_or_absent(tmp_path):
    def fail_half_way(out):
        (out / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        loading._once(tmp_path / "model", fail_half_way)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_whose_process_was_killed_is_removed_when_it_is_old(tmp_path):
    torn, running = tmp_path / ".model-draft-a", tmp_path / ".model-draft-b"
    for draft in (torn, running, tmp_path / "model-2"):
        draft.mkdir()
    os.utime(torn, (0, 0))
    loading._once(tmp_path / "model", lambda out: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model-draft-b", "model", "model-2"]


def test_a_hub_that_gives_no_answer_is_told_from_a_wrong_name(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not reach the hub"):
        loading.resolve("nobody/no-such-model")


def test_two_who_make_the_same_folder_at_once_both_get_a_complete_one(tmp_path):
    together = threading.Barrier(2)
    found = []

    def make(out):
        together.wait(30)
        (out / "a").write_text("a")
        (out / "b").write_text("b")

    threads = [threading.Thread(target=lambda: found.append(loading._once(tmp_path / "model", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "model"] * 2
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["a", "b"]
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
