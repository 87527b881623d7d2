"""What processes of a run with Ray hold, by hand: the figures that `nearpolicy check` prints and a start goes by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nearpolicy.config import RunConfig, config_from_dict, load_recipe
from nearpolicy.launch import cli, sizes
from nearpolicy.launch.explain_placement import warnings
from nearpolicy.launch.placement_sizes import (
    RoleMemory,
    gathered_mb,
    generator_memory,
    held_on_this_machine,
    published_mb,
    rank_memory,
    saved_by_turns,
    tokens_kept_mb,
)
from nearpolicy.launch.sizes import memory_refusal, model_shape, shape_of

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = {
    "run": {"steps": 1},
    "model": {"path": "random:llama", "dtype": "bfloat16"},
    "tasks": [
        {"name": "t", "source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "rewards": [{"kind": "number"}]}
    ],
    "learner": {"ranks": 4},
    "generator": {"kv_memory_mb": 300},
    "runtime": "ray",
}
SHAPE = shape_of(
    {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
    },
    parameters=2**28,
)
"""512 MB in bfloat16: 64 each for embeddings and head, 48 for each of 8 layers."""


def config(*settings: str) -> RunConfig:
    return config_from_dict(RECIPE, where="test", overrides=settings)


def rank(*settings: str) -> RoleMemory:
    return rank_memory(config(*settings), SHAPE)


def test_a_rank_holds_its_piece_of_everything_that_is_trained():
    memory = rank()
    assert memory.certain == {"weights": 128, "gradients": 128, "AdamW's moments": 512, "float32 weights": 256}
    assert memory.host == {}
    assert (memory.loading, memory.reading) == (128, 16)  # its piece; a quarter of the embedding, which is the largest
    assert memory.on_the_way == 16  # to a GPU
    assert memory.passing["unsummed gradients"] == 1024  # float32, of all weights
    assert memory.passing["gathered layers"] == 128 + 2 * 48
    assert memory.updating == {"float32 gradients": 256}
    assert memory.most == pytest.approx(1024 + 1024 + 224 + memory.passing["activations"])


def test_copies_of_the_weights_make_pieces_larger():
    assert rank("learner.replicas=2").certain["AdamW's moments"] == 1024
    whole = rank("learner.replicas=4")
    assert whole.certain["weights"] == 512
    assert "gathered layers" not in whole.passing


def test_one_rank_holds_what_a_learner_in_one_process_does():
    alone = rank("learner.ranks=1", "model.dtype=float32")
    inline = sizes.memory_by_owner(config("learner.ranks=1", "model.dtype=float32"), SHAPE)
    assert alone.certain == {
        "weights": inline["learner: weights"],
        "gradients": inline["learner: gradients"],
        "AdamW's moments": inline["learner: AdamW"],
    }
    assert alone.passing == {"activations": inline["learner: activations"]}
    assert (alone.loading, alone.reading, alone.on_the_way) == (1024, 0, 1024)  # whole


def test_what_is_offloaded_lies_in_main_memory():
    moments = rank("learner.offload=optimizer")
    assert moments.host == {"AdamW's moments": 512}
    assert sum(moments.certain.values()) == 512
    assert moments.updating == {"float32 gradients": 256, "moments, brought back": 512}
    everything = rank("learner.offload=parameters")
    assert (everything.certain, sum(everything.host.values())) == ({}, 1024)
    assert "unsummed gradients" not in everything.passing
    assert everything.needed(has_gpu=True) == 0
    assert (everything.loading, everything.on_the_way) == (0, 128 + 16)  # the pieces, and what is read of one tensor
    assert everything.needed(has_gpu=False) == 1024


def test_a_reference_and_a_critic_are_cut_too():
    with_reference = rank("objective.kl_coef=0.1", "objective.reference=initial")
    assert with_reference.certain["reference"] == 128
    assert with_reference.loading == 256
    with_critic = rank("objective.advantage=gae")
    assert with_critic.certain["critic: weights"] == 128
    assert with_critic.certain["critic: AdamW's moments"] == 512
    assert with_critic.certain["gradients"] == 128  # of one at a time


def test_experts_are_put_together_out_of_what_is_read():
    """Twice the piece of a layer, of which nearly all are experts: 2 x 48 / 4; an embedding would be 16."""
    memory = rank_memory(config(), replace(SHAPE, experts=8))
    assert (memory.loading, memory.reading) == (128, 24)


def test_a_model_that_cannot_be_read_in_pieces_is_loaded_whole_by_every_rank_and_pointed_out(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": {"quant_method": "fp8"}}))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    ours = config(f"model.path={folder}")
    shape = replace(SHAPE, why_whole=model_shape(ours.model).why_whole)
    memory = rank_memory(ours, shape)
    assert (memory.loading, memory.reading, memory.on_the_way) == (512, 0, 512)
    said = f"every rank loads {folder} whole before it is cut: its config.json has `quantization_config`"
    assert any(said in text for text in warnings(ours, shape))
    assert not any("whole before" in text for text in warnings(ours, SHAPE))
    assert not any("whole before" in text for text in warnings(config("learner.ranks=1"), shape))


def test_factors_of_an_adapter_are_not_cut_and_the_base_is():
    """16 * (in + out) numbers a matrix: q, o 1024 x 1024; k, v the same; three of 1024 x 4096."""
    trained = 8 * 16 * (4 * (1024 + 1024) + 3 * (1024 + 4096))
    memory = rank("learner.lora={}")
    factors = trained * 4 / 2**20
    assert memory.certain["weights"] == 128 + factors
    assert (memory.certain["gradients"], memory.certain["AdamW's moments"]) == (factors, 2 * factors)
    assert "unsummed gradients" not in memory.passing
    merged, alone = (
        published_mb(config("learner.lora={}", f"sync.adapters={how}"), SHAPE) for how in ("merged", "adapter_only")
    )
    assert (merged, alone) == (512, factors)


def test_a_generator_holds_all_weights_and_what_its_transport_keeps():
    plain = generator_memory(config(), SHAPE)
    assert plain.certain == {"weights": 512, "keys and values": 300}
    assert generator_memory(config(), SHAPE, "broadcast").certain["weights on arrival"] == 512
    files = ("sync.transport=files", "sync.path=weights")
    assert generator_memory(config(*files), SHAPE).host == {"weights before the next delta": 512}
    assert generator_memory(config(*files, "sync.delta=false"), SHAPE).host == {}


def test_roles_that_take_turns_save_the_smaller_of_gradients_and_keys_and_values():
    generator = generator_memory(config(), SHAPE)
    assert saved_by_turns(rank(), generator, on_gpu=True) == 128
    assert saved_by_turns(rank("learner.ranks=1"), generator, on_gpu=True) == 300
    assert saved_by_turns(rank("learner.offload=parameters"), generator, on_gpu=True) == 0


def test_a_ray_of_this_machine_is_judged_by_its_memory_and_a_cluster_is_not(monkeypatch):
    """4 ranks of 1,024 MB; 2 generators of 812; 512 in /dev/shm."""
    ours = config("generator.replicas=2")
    assert held_on_this_machine(ours, SHAPE) == {
        "ranks of the learner": 4096,
        "generators": 1624,
        "weights on their way": 512,
    }
    monkeypatch.setattr(sizes, "ACCELERATORS", ())
    monkeypatch.setattr(sizes, "machine_memory_mb", lambda: 6232.0)
    assert memory_refusal(ours, SHAPE, trains=True) is None
    monkeypatch.setattr(sizes, "machine_memory_mb", lambda: 6231.0)
    assert "most of it is `ranks of the learner` with 4,096 MB" in memory_refusal(ours, SHAPE, trains=True)
    for elsewhere in ("runtime.address=head:6379", "runtime.gpus_per_learner=1"):
        assert memory_refusal(config("generator.replicas=2", elsewhere), SHAPE, trains=True) is None


def test_gathered_layers_of_a_large_model_are_its_root_and_two_layers():
    """Qwen3-8B: 2 x 151,936 x 4,096 in root and head, 192,946,432 in each of 36 layers."""
    shape = model_shape(config("model={path: Qwen/Qwen3-8B, dtype: bfloat16}").model)
    assert gathered_mb(shape, 2) * 2**20 / 2 == pytest.approx(2 * 151_936 * 4096 + 2 * 192_946_432, rel=1e-4)


def told(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.run(["check", *arguments])
    captured = capsys.readouterr()
    assert not end.value.code, captured.err
    return captured.out


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("cluster_*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_clusters_are_explained_on_a_machine_without_the_model(recipe, capsys):
    out = told(capsys, str(recipe), "runtime.address=auto")
    for part in (
        "from the table that is shipped",
        "the cluster at auto",
        "memory of a rank of the learner",
        "memory of a generator",
        "one version",
    ):
        assert part in out
    assert "some will have nothing to do" not in out


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("cluster_*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_clusters_fit_gpus_of_80_gb(recipe):
    """81,559 MiB is what such a GPU shows; 2,000 for what CUDA and its libraries take there."""
    found = load_recipe(recipe)
    shape = model_shape(found.model)
    rank, generator = rank_memory(found, shape), generator_memory(found, shape)
    together = [rank.most, generator.most]
    if found.runtime.placement == "colocated":
        resting = generator.held - generator.certain["keys and values"]
        together = [rank.most + resting, rank.held + generator.most, rank.loading + generator.loading]
    assert max(together) < 81_559 - 2_000


def test_check_of_a_local_run_with_ray_says_who_lives_where(capsys):
    generators = ("generator.replicas=2", "generator.most_replicas=3")
    settings = ("runtime=ray", "learner.ranks=2", "runtime.verifiers=2", *generators)
    out = told(capsys, str(RECIPES / "tiny.yaml"), *settings)
    for part in (
        "disaggregated, a Ray of its own on this machine",
        "2 ranks, each 1 CPU; 1 x the weights in 2 parts",
        "0.6 MB: its pieces, and 0.3 MB that are read at a time",
        "2, each 1 CPU, all weights in each, and up to 3 as there is room",
        "2, each 1 CPU and 1 worker",
        "6 places: 6 CPU; one node must have 1 CPU",
        "a generator 1, a rank of the learner 1",
        "shared_memory: 1.3 MB of /dev/shm",
        "in the object store of the record's node until a step has used them",
    ):
        assert part in out
    assert "\nmemory\n" not in out


def test_check_says_what_else_a_run_of_this_machine_needs(capsys):
    alone = "without 8 GPU a run is refused (runtime.address: join a cluster)"
    assert alone in told(capsys, str(RECIPES / "cluster_8gpu.yaml"))
    assert alone not in told(capsys, str(RECIPES / "cluster_8gpu.yaml"), "runtime.address=auto")
    assert "GPU" not in told(capsys, str(RECIPES / "tiny.yaml"), "runtime=ray")


def test_check_says_where_the_controller_lives(capsys):
    assert "the process that is started" in told(capsys, str(RECIPES / "tiny.yaml"), "runtime=ray")
    out = told(capsys, str(RECIPES / "tiny.yaml"), "runtime={kind: ray, controller: actor}")
    assert "an actor, 1 CPU on any node, which must see the run folder" in out


def test_check_without_the_model_says_where_roles_live_all_the_same(capsys):
    out = told(capsys, str(RECIPES / "tiny.yaml"), "runtime=ray", "model={path: someone/some-model}")
    assert "placement\n" in out and "unknown until the model is fetched from the hub" in out


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("generator.replicas=4", "generator.max_running=64"), "some will have nothing to do"),
        (("runtime.cpus_per_learner=400",), "the roles ask for 1602 CPU"),
        (
            (
                "runtime.placement=colocated", "learner.ranks=1", "learner.streaming=false",
                "runtime.gpus_per_learner=1", "runtime.gpus_per_generator=1",
            ),
            "with 0.5 each they share one",
        ),
    ],
)  # fmt: skip
def test_what_works_but_hardly_as_it_is_meant_is_pointed_out(settings, says):
    assert any(says in text for text in warnings(config(*settings), SHAPE))
    assert not any(says in text for text in warnings(config("learner.ranks=1"), SHAPE))


def test_tokens_under_way_take_eight_bytes_each_and_more_than_the_object_store_is_pointed_out():
    settings = "queue.prompts_per_step=32", "queue.max_staleness=3", "sampling.num_generations=8"
    few = config(*settings, "sampling.max_completion_length=1024")
    assert tokens_kept_mb(few) == 32 * 4 * 8 * 1024 * 8 / 2**20 == 8
    long = "sampling.max_completion_length=524288", "sampling.max_prompt_length=16"
    many = config(*settings, *long, "learner.max_tokens_per_microbatch=600000")
    assert any("4,096 MB, more than the object store" in text for text in warnings(many, SHAPE))
    assert not any("object store" in text for text in warnings(few, SHAPE))


COLOCATED = ("runtime.placement=colocated", "generator.replicas=4")
HALVES = ("runtime.gpus_per_learner=0.5", "runtime.gpus_per_generator=0.5")


@pytest.mark.parametrize(
    ("settings", "mb"),
    [
        ((*COLOCATED, "sync.transport=device_handles"), 64),
        ((*COLOCATED, "sync.transport=device_handles", "sync.bucket_mb=100"), 200),
        ((*COLOCATED, "sync.transport=device_handles", "sync.bucket_mb=400"), 512),  # there is no more to hand over
        ((*COLOCATED, *HALVES), 64),
        (COLOCATED, None),
        ((*COLOCATED, *HALVES, "sync.transport=shared_memory"), None),
        ((*COLOCATED, "runtime.gpus_per_learner=1", "runtime.gpus_per_generator=1"), None),
    ],
)
def test_a_rank_keeps_two_buckets_where_it_hands_weights_over_and_its_generator_nothing_more(settings, mb):
    assert rank(*settings).certain.get("weights handed over") == mb
    assert generator_memory(config(*settings), SHAPE).certain == generator_memory(config(*COLOCATED), SHAPE).certain


def test_check_says_that_a_rank_hands_weights_to_the_generator_beside_it(capsys):
    out = told(capsys, str(RECIPES / "cluster_colocated.yaml"), "runtime.address=auto")
    assert "auto: each rank hands all of it to the generator beside it, out of 64 MB of its own" in " ".join(
        out.split()
    )


def test_a_version_larger_than_the_object_store_of_a_local_ray_is_pointed_out():
    large = replace(SHAPE, parameters=2**31)
    of = config("sync.transport=object_store", "learner.ranks=1")
    assert any("4,096 MB is larger than the object store" in text for text in warnings(of, large))
    assert not any("object store" in text for text in warnings(of, SHAPE))
