"""Ranks of a learner, beyond what `conformance` claims of every backend: other models and objectives, and failures."""

from __future__ import annotations

from pathlib import Path

import families
import numpy as np
import parallel_cases as cases
import pytest
import torch
from conformance import all_equal, close
from parallel_cases import CASES
from rank_pool import Raised
from safetensors.torch import load_file

from nearpolicy.errors import ConfigError
from nearpolicy.learner.sharding import require_offload_has_effect
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.weights import digests


def prepared(name: str) -> None:
    """The models on disk, before several processes want to make them."""
    cases.make(CASES[name])


def check_life(pool, name: str, folder: Path, ranks: int, replicas: int = 1) -> None:
    prepared(name)
    right = cases.life(None, name, str(folder / "alone"))
    found = pool.run(ranks, cases.life, name, str(folder / "together"), replicas)
    first = found[0]
    for other in found[1:]:
        assert (other.began, other.metrics, other.saved, other.ended) == (
            first.began,
            first.metrics,
            first.saved,
            first.ended,
        )
    assert first.began == right.began
    assert first.ended == first.resumed
    assert first.pieces == right.pieces
    wide = CASES[name].dtype == torch.float32
    for mine, theirs in zip(first.metrics, right.metrics, strict=True):
        if wide:
            close(mine, theirs, 1e-4)
        else:  # with 8 bits, only what is a mean over all tokens
            named = [name for name in ("policy/loss", "policy/grad_norm", "critic/loss") if name in theirs]
            close({name: mine[name] for name in named}, {name: theirs[name] for name in named}, 5e-2)
    # Adam turns a rounding of a gradient near 0 into up to one step of the rate; what has moved at all moved alike.
    change = (right.weights - first.weights).abs()
    assert change.max() <= (3e-3 if wide else 2e-2)
    assert change.norm() <= (1e-3 if wide else 5e-3) * right.weights.norm()
    if right.values is not None:
        assert torch.allclose(first.values, right.values, atol=1e-3 if wide else 5e-2)


USUAL = ["tied and checkpointed", "mixture of experts", "adapter", "full KL", "critic of a bfloat16 policy"]


@pytest.mark.parametrize("name", USUAL)
def test_two_ranks_live_as_one_process_does(name, rank_pool, tmp_path):
    check_life(rank_pool, name, tmp_path, 2)


@pytest.mark.large
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_ranks_live_as_one_process_does(name, ranks, replicas, rank_pool, tmp_path):
    check_life(rank_pool, name, tmp_path, ranks, replicas)


READ_IN_PIECES = [
    "tied and checkpointed",
    "untied, of uneven pieces",
    "mixture of experts",
    "adapter on bfloat16",
    "full KL",
    "critic",
    "bfloat16",
]


@pytest.mark.parametrize("name", READ_IN_PIECES)
def test_pieces_that_are_read_alone_are_those_of_a_whole_model_to_the_bit(name, rank_pool):
    prepared(name)
    assert rank_pool.run(2, cases.same_pieces, name, 1) == [[], []]


@pytest.mark.large
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_pieces_of_any_learner_are_those_of_a_whole_model_to_the_bit(name, ranks, replicas, rank_pool):
    prepared(name)
    assert rank_pool.run(ranks, cases.same_pieces, name, replicas) == [[]] * ranks


OF_80_MB = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096, "head_dim": 128}
EXPERTS_OF_40_MB = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
}


def check_memory(pool, ranks: int, family: str, init: dict, together: int) -> None:
    """``together``: copies of what is read at a time."""
    folder = resolve(f"random:{family}", init)
    size = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    found = pool.run(ranks, cases.memory_while_loading, str(folder), False)
    assert size <= sum(memory.held for memory in found) <= 1.001 * size
    assert sum(memory.read for memory in found) == size  # every byte by one rank, and once
    experts = 2 * init.get("num_experts", 0) * init.get("moe_intermediate_size", 0)  # gate and up in one
    tensor = max(init["vocab_size"], experts) * init["hidden_size"] * 4 / ranks
    for memory in found:
        assert memory.read <= 1.001 * size / ranks
        assert memory.largest <= tensor
        assert memory.peak <= memory.held + together * tensor


def test_a_rank_never_holds_more_than_its_pieces_and_what_it_reads_of_one_tensor(rank_pool):
    check_memory(rank_pool, 2, "llama", OF_80_MB, 1)
    check_memory(rank_pool, 2, "qwen3_moe", EXPERTS_OF_40_MB, 2)


@pytest.mark.large
def test_nor_does_one_of_four(rank_pool):
    check_memory(rank_pool, 4, "llama", OF_80_MB, 1)
    check_memory(rank_pool, 4, "qwen3_moe", EXPERTS_OF_40_MB, 2)


def test_what_is_counted_sees_a_whole_model(rank_pool):
    """That the test above can fail."""
    folder = resolve("random:llama", OF_80_MB)
    size = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    for memory in rank_pool.run(2, cases.memory_while_loading, str(folder), True):
        assert memory.peak >= size


RECIPE = {
    "run": {"steps": 1},
    "model": {"path": "random:llama"},
    "tasks": [
        {"name": "t", "source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "rewards": [{"kind": "number"}]}
    ],
    "learner": {"ranks": 2},
    "runtime": "ray",
}


@pytest.mark.parametrize("value_model", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_whether_a_model_fits_is_measured_without_anybody_holding_it_whole(family, value_model, rank_pool):
    said = all_equal(rank_pool.run(2, cases.fitness, families.folder(family), value_model))
    assert 0.0 <= float(said) < 2e-5


@pytest.mark.parametrize("value_model", [False, True])
def test_a_model_in_pieces_that_does_not_fit_is_refused(value_model, rank_pool):
    said = all_equal(rank_pool.run(2, cases.fitness, families.folder("qwen3_next"), value_model))
    assert "does not fit the embedded engine and learner" in said


def test_a_model_of_small_numbers_is_judged_by_louder_ones_and_kept(rank_pool):
    """Fresh weights of 0.002: no token feels another."""
    said = all_equal(rank_pool.run(2, cases.fitness, families.folder("llama4_text", std=0.002), False))
    assert "does not fit the embedded engine and learner" in said
    assert 0.0 <= float(all_equal(rank_pool.run(2, cases.fitness, families.folder("llama", std=0.002), False))) < 1e-4


@pytest.mark.parametrize("setting", ["objective.reference={}", "critic.path={}"])
def test_a_reference_or_critic_of_its_own_that_does_not_fit_ends_the_start_of_all_ranks(setting, rank_pool):
    folder, resolved = families.folder("qwen3_next"), families.folder("llama")
    more = ["objective.kl_coef=0.1"] if "reference" in setting else ["objective.advantage=gae"]
    arguments = (RECIPE, [f"model.path={resolved}", setting.format(folder), *more])
    said = all_equal(rank_pool.run(2, cases.refused_at_the_start, *arguments))
    assert said.startswith(f"ModelError: learner rank 0: model {folder!r} (") and "does not fit" in said
    arguments = (RECIPE, [f"model.path={resolved}", setting.format(families.folder("qwen3")), *more])
    assert all_equal(rank_pool.run(2, cases.refused_at_the_start, *arguments)) == ""


def test_an_offload_to_where_everything_is_already_is_refused():
    require_offload_has_effect("optimizer", torch.device("cuda"))
    require_offload_has_effect("none", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"learner\.offload=optimizer .* on the CPU"):
        require_offload_has_effect("optimizer", torch.device("cpu"))


def test_one_rank_has_the_bits_of_a_process_without_any(rank_pool):
    prepared("tied and checkpointed")
    assert rank_pool.run(1, cases.curve_fingerprint) == [cases.curve_fingerprint(None)]


def test_every_rank_has_the_bits_of_one_process_for_every_token(rank_pool):
    right = cases.annotations(None)
    for found in rank_pool.run(2, cases.annotations):
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, right, strict=True))


def test_gradients_by_group_are_those_of_one_process(rank_pool):
    right, losses = cases.gradients_by_group(None)
    for found, told in rank_pool.run(2, cases.gradients_by_group):
        assert np.linalg.norm(found - right) <= 1e-5 * np.linalg.norm(right)
        assert told == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", ["tied and checkpointed", "mixture of experts"])
def test_a_model_in_several_files_is_the_model(name, rank_pool, tmp_path):
    prepared(name)
    shown = all_equal(rank_pool.run(2, cases.exported, name, str(tmp_path / "model")))
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    assert digests(load_policy(tmp_path / "model", known_to_fit=True).weights()) == shown


# Failures. Every rank says the same, in a bounded time.


@pytest.mark.parametrize("failing", [0, 1])
def test_a_loss_that_fails_on_one_rank_fails_on_all_and_they_go_on(failing, rank_pool):
    said, stayed, version = all_equal(rank_pool.run(2, cases.a_loss_fails, failing))
    assert said == f"NearpolicyError: learner rank {failing}: ArithmeticError: no loss for these tokens"
    assert (stayed, version) == (True, 1)


def test_a_bad_number_on_one_rank_is_named_by_all_and_nothing_is_trained(rank_pool):
    said, stayed, version = all_equal(rank_pool.run(2, cases.a_bad_number_on_one_rank, 1))
    assert said.startswith("NearpolicyError: learner rank 1: group 1, sample 0, token 0: its advantages is nan")
    assert (stayed, version) == (True, 1)


def test_ranks_with_different_batches_say_so(rank_pool):
    assert "the ranks of the learner come with different batches" in all_equal(rank_pool.run(2, cases.another_batch))


def test_what_fails_on_one_rank_inside_a_pass_is_said_by_all_within_the_timeout(rank_pool):
    first, later = all_equal(rank_pool.run(2, cases.fails_alone, 1))
    assert first == "NearpolicyError: learner rank 1: MemoryError: no memory for the second layer"
    assert later.startswith(first) and "start the ranks anew" in later


def test_a_rank_that_does_not_come_is_named_after_the_timeout(rank_pool):
    said, _ = rank_pool.run(2, cases.does_not_come, 1)
    assert said.startswith("StandstillError: learner rank 0: waited in step 0, at most 2 s, for rank 1, last seen in")


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_rank_leaves_the_earlier_checkpoint(full, rank_pool, tmp_path):
    said, left, later = all_equal(rank_pool.run(2, cases.full_disk, str(tmp_path), full, 4096))
    assert said.startswith("RunFolderError: learner rank 0: checkpoint")
    assert f"{tmp_path / 'step-2'} cannot be written" in said and "free some space" in said
    assert full == 0 or "cannot be written: rank 1: " in said
    assert (left, later) == (["step-1"], "step-2")


def test_pieces_that_were_changed_are_not_loaded(rank_pool, tmp_path):
    said, stayed = all_equal(rank_pool.run(2, cases.torn_pieces, str(tmp_path)))
    assert "is not what was written" in said and "step-1" in said
    assert stayed


@pytest.mark.parametrize(
    ("how", "says"), [("changed", "was changed: its weights have the fingerprint"), ("cut off", "cannot be read")]
)
def test_weights_that_were_changed_are_not_loaded_into_any_rank(how, says, rank_pool, tmp_path):
    said, stayed = all_equal(rank_pool.run(2, cases.changed_weights, str(tmp_path), how))
    assert said.startswith(f"RunFolderError: learner rank 0: checkpoint {tmp_path / 'step-1'} ") and says in said
    assert stayed


def test_saved_weights_of_another_model_are_not_loaded_into_any_rank(rank_pool, tmp_path):
    prepared("critic")
    cases.make(cases.THREE_LAYERS)
    said, stayed = all_equal(rank_pool.run(2, cases.weights_of_another_model, str(tmp_path / "weights.safetensors")))
    assert (
        "0 tensors applied" in said and "model.layers.2.input_layernorm.weight' was sent, but is unknown here" in said
    )
    assert stayed


def test_a_rank_that_dies_is_named(rank_pool):
    said, gone = rank_pool.run_each(2, cases.dies, [(1,), (1,)])
    assert said.startswith("StandstillError: learner rank 0: waited in step 0") and "rank 1" in said
    assert gone == Raised("EOFError", "the process is gone")
