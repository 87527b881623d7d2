"""How generators lay canonical tensors out: tensor parallel parts, fused matrices, experts in one tensor.

    q_proj, k_proj, v_proj  -> qkv_proj      each part: its query heads, then its key heads, then its value heads
    gate_proj, up_proj      -> gate_up_proj  each part: its share of gate, then its share of up
    experts (one by one, or [E, 2 I, H] and [E, H, I]) -> w13_weight [E, 2 I / P, H], w2_weight [E, H, I / P]

`split` says which dimension of a matrix [out, in] the parts share: ``rows`` or ``columns`` of every matrix, or
``roles``, the way of vLLM and Megatron: rows where the outputs are what goes on in parallel (q, k, v, gate, up,
embedding, head), columns where they are summed (o, down). Whatever has no rule here is held whole by every part. An
adapter's A is split as the columns of its matrix, its B as the rows, and neither is fused.

Not modelled: a vocabulary padded to a multiple, expert parallelism, weights packed for quantised kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nearpolicy.errors import SyncError
from nearpolicy.sync.plan import Box, Layout, Place, Shape

Split = Literal["roles", "rows", "columns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Of attention: rows of q, k and v are split between heads, never inside one."""

    queries: int
    keys: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Of a Hugging Face config."""
        text = config.get_text_config()
        keys = getattr(text, "num_key_value_heads", None)
        return cls(queries=text.num_attention_heads, keys=keys or text.num_attention_heads)


@dataclass(frozen=True, slots=True)
class _Share:
    """One canonical box on its way into a tensor of each part."""

    name: str
    tensor: str
    box: Box
    order: int
    """Among what is stacked in the tensor."""
    stacked: int
    """How many are."""
    rows: int | None
    """Dimension that is the rows of a matrix, None where there is none or where every part needs all of it."""
    columns: int | None
    role: Literal["rows", "columns"]
    units: int | None = None
    """Into how many indivisible parts rows fall; None if each row may go alone."""
    expert: int | None = None
    """Index in front of those of the canonical tensor."""


def generator_layout(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    heads: Heads,
    *,
    parallel: int = 1,
    split: Split = "roles",
    fused: bool = True,
) -> Layout:
    """Of ``parallel`` parts. ``shapes`` and ``dtypes``: by canonical name, tied tensors once."""
    shares = [share for name, shape in shapes.items() for share in _shares(name, tuple(shape), heads, fused)]
    tensors: dict[str, list[_Share]] = defaultdict(list)
    for share in shares:
        tensors[share.tensor].append(share)
    parts: list[dict[str, Shape]] = [{} for _ in range(parallel)]
    places: dict[str, list[Place]] = {name: [] for name in shapes}
    for tensor, members in tensors.items():
        _require_whole_stack(tensor, members)
        for part in range(parallel):
            parts[part][tensor] = _fill(part, parallel, split, members, places)
    return Layout(
        {name: tuple(shape) for name, shape in shapes.items()},
        dict(dtypes),
        tuple(parts),
        {name: tuple(found) for name, found in places.items()},
    )


def _fill(part: int, parallel: int, split: Split, members: list[_Share], places: dict[str, list[Place]]) -> Shape:
    """Add the places of one tensor of one part; its shape."""
    used: dict[int | None, int] = defaultdict(int)  # rows taken so far, of each expert
    shape: Shape = ()
    for share in sorted(members, key=lambda share: (share.expert or 0, share.order)):
        box = _cut(share, part, parallel, split)
        at = [0] * len(box)
        sizes = [high - low for low, high in box]
        if share.rows is not None:
            at[share.rows] = used[share.expert]
            used[share.expert] += sizes[share.rows]
            sizes[share.rows] = used[share.expert]
        lead = () if share.expert is None else (share.expert,)
        places[share.name].append(Place(part, share.tensor, box, (*lead, *at)))
        shape = (*(index + 1 for index in lead), *sizes)
    return shape


def _cut(share: _Share, part: int, parallel: int, split: Split) -> Box:
    """The box of one part: of ``parallel`` equal ones, or of fewer that several parts hold (key heads)."""
    by = share.role if split == "roles" else split
    axis = share.rows if by == "rows" else share.columns
    if axis is None or parallel == 1:
        return share.box
    low, high = share.box[axis]
    units = share.units if by == "rows" and share.units is not None else high - low
    if (high - low) % units:
        raise SyncError(f"{share.name!r} has {high - low} rows, which are not {units} heads of one size")
    if units % parallel == 0:
        each, first = units // parallel, part * (units // parallel)
    elif share.units is not None and by == "rows" and parallel % units == 0:
        each, first = 1, part * units // parallel
    else:
        what = "heads" if share.units is not None and by == "rows" else by
        raise SyncError(f"{share.name!r} has {units} {what}, which {parallel} parts cannot share; use another number")
    size = (high - low) // units
    cut = list(share.box)
    cut[axis] = (low + first * size, low + (first + each) * size)
    return tuple(cut)


def _require_whole_stack(tensor: str, members: list[_Share]) -> None:
    for expert in {share.expert for share in members}:
        have = sorted(share.order for share in members if share.expert == expert)
        if have != list(range(members[0].stacked)):
            names = ", ".join(repr(share.name) for share in members if share.expert == expert)
            raise SyncError(f"{tensor!r} is made of {members[0].stacked} tensors, and there is only {names}")


_QKV = re.compile(r"(?P<at>.*self_attn)\.(?P<which>[qkv])_proj\.(?P<kind>weight|bias)")
_GATE_UP = re.compile(r"(?P<at>.*mlp(?:\.shared_experts?)?)\.(?P<which>gate|up)_proj\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"(?P<at>.*experts)\.(?P<expert>\d+)\.(?P<which>gate|up|down)_proj\.weight")
_EXPERTS = re.compile(r"(?P<at>.*experts)\.(?P<which>gate_up|down)_proj")
_SUMMED = re.compile(r".*\.(o|down)_proj\.weight")
_VOCABULARY = re.compile(r".*(embed_tokens|lm_head)\.weight")
_FACTOR = re.compile(r"(?P<of>.*)\.lora_(?P<which>[AB])")


def _shares(name: str, shape: Shape, heads: Heads, fused: bool) -> list[_Share]:
    box = tuple((0, size) for size in shape)
    columns = 1 if len(shape) == 2 else None
    if found := _FACTOR.fullmatch(name):
        [of] = _shares(found["of"], (1, 1), heads, fused=False)  # of A and B, only the matrix's role matters
        if found["which"] == "A":
            return [_Share(name, name, box, 0, 1, None, of.columns, of.role)]
        return [_Share(name, name, box, 0, 1, of.rows, None, of.role, of.units)]
    if found := _QKV.fullmatch(name):
        units = heads.queries if found["which"] == "q" else heads.keys
        order, stacked, tensor = "qkv".index(found["which"]), 3, f"{found['at']}.qkv_proj.{found['kind']}"
        return [_alone_unless(fused, _Share(name, tensor, box, order, stacked, 0, columns, "rows", units))]
    if found := _GATE_UP.fullmatch(name):
        order, tensor = int(found["which"] == "up"), f"{found['at']}.gate_up_proj.{found['kind']}"
        return [_alone_unless(fused, _Share(name, tensor, box, order, 2, 0, columns, "rows"))]
    if found := _EXPERT.fullmatch(name):
        return [_expert(name, found["at"], found["which"], int(found["expert"]), box, fused)]
    if (found := _EXPERTS.fullmatch(name)) and len(shape) == 3:
        if found["which"] == "down":
            return [_Share(name, f"{found['at']}.w2_weight" if fused else name, box, 0, 1, 1, 2, "columns")]
        return _gate_and_up(name, found["at"], box, fused)
    if _VOCABULARY.fullmatch(name):
        return [_Share(name, name, box, 0, 1, 0, 1, "rows")]
    if _SUMMED.fullmatch(name):
        return [_Share(name, name, box, 0, 1, 0, 1, "columns")]
    return [_Share(name, name, box, 0, 1, None, None, "rows")]


def _alone_unless(fused: bool, share: _Share) -> _Share:
    if fused:
        return share
    return _Share(share.name, share.name, share.box, 0, 1, share.rows, share.columns, share.role, share.units)


def _expert(name: str, at: str, which: str, expert: int, box: Box, fused: bool) -> _Share:
    role = "columns" if which == "down" else "rows"
    if not fused:
        return _Share(name, name, box, 0, 1, 0, 1, role)
    if which == "down":
        return _Share(name, f"{at}.w2_weight", box, 0, 1, 0, 1, role, expert=expert)
    return _Share(name, f"{at}.w13_weight", box, int(which == "up"), 2, 0, 1, role, expert=expert)


def _gate_and_up(name: str, at: str, box: Box, fused: bool) -> list[_Share]:
    """[E, 2 I, H]: gate in the first half of the rows, up in the second; parts split each of them."""
    experts, (_, both), columns = box
    if both % 2:
        raise SyncError(f"{name!r} has {both} rows, which are not gate and up of one size")
    tensor = f"{at}.w13_weight" if fused else name
    halves = ((0, both // 2), (both // 2, both))
    return [_Share(name, tensor, (experts, half, columns), order, 2, 1, 2, "rows") for order, half in enumerate(halves)]
