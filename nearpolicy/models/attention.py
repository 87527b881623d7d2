"""One attention function for engine and learner, whose result for a token depends on its sequence alone.

Registered with transformers under `NAME`, and in no mask registry, so that no mask is ever built: this module owns
masking. A caller passes packed tokens ``[1, T]``, explicit positions, and a *context* as the keyword ``packed``; the
context knows which rows are queries of which sequence and where the keys of that sequence lie (the engine's pages, or
the packed row itself). Being an argument, it survives activation checkpointing and threads.

Exactness. Keys are taken in pages of `PAGE` positions counted from position 0 of the sequence; a page is padded only
behind. Every page is one product of fixed inner size; the running sum adds pages in order; one maximum over all pages
is used; the denominator comes out of the same product, from a column of ones beside V. What another sequence does, how
many rows are queried at once, and how many empty pages follow then change nothing: an empty page adds exact zeros.

    scores_j = q k_j^T        [rows, PAGE]   one product per page
    m        = max_j max(scores_j)
    out      = sum_j exp(scores_j - m) [v_j | 1]
    result   = out[:, :-1] / out[:, -1]

Masks are numbers to add, 0 or -inf, and exponentials are powers of two: `masked_fill` with a broadcast mask and MKL's
`exp` at -inf are ten to twenty times slower than these on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "nearpolicy"
PAGE = 64
MIN_ROWS = 4
"""Fewest rows of a product inside attention; fewer would take another kernel."""
LOG2_E = math.log2(math.e)
QUERY_CHUNK = 256
"""Query positions scored at once; longer blocks go in chunks, whose weights backward computes again."""

PageOf = Callable[[int], tuple[Tensor, Tensor]]
"""Page number -> keys [n, KV, PAGE, D] and values with a column of ones [n, KV, PAGE, Dv + 1]."""


class PackedContext(Protocol):
    """Finds the keys of every packed token; one object serves all layers of one forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """q [T, H, D] (scaled), k [T, KV, D], v [T, KV, Dv] -> [T, H, Dv]."""
        ...


class Rule:
    """How a layer weighs keys, besides causality."""

    __slots__ = ("sinks", "softcap", "window")

    def __init__(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> None:
        self.window = window
        """A query at position p sees positions p - window + 1 .. p."""
        self.softcap = softcap
        """Scores become softcap * tanh(scores / softcap)."""
        self.sinks = sinks
        """[H] extra logits that only enlarge the denominator."""


def with_ones(v: Tensor) -> Tensor:
    """[..., Dv] -> [..., Dv + 1]: the column whose product is the denominator."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def sees_all(first: int, last: int, page: int, window: int | None) -> bool:
    """Whether queries at positions ``first`` .. ``last`` see every key of a page."""
    return first >= (page + 1) * PAGE - 1 and (window is None or last - page * PAGE < window)


class Queries:
    """The queries of ``n`` sequences, ``R`` each: their positions, and the masks that follow, made once per forward."""

    def __init__(self, positions: Tensor, last_positions: Sequence[int]) -> None:
        """positions: [n, R] in their sequences; a padding query may repeat any. last_positions: [R] their maxima."""
        self.positions = positions
        self.chunk_pages = [
            max(last_positions[start : start + QUERY_CHUNK]) // PAGE + 1
            for start in range(0, len(last_positions), QUERY_CHUNK)
        ]
        """Pages that each chunk of queries can see at all."""
        self._masks: dict[tuple[int, int, int, int | None, torch.dtype], Tensor | None] = {}

    def mask(self, chunk: int, page: int, per_kv: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, rows, PAGE]: -inf where the folded rows of the chunk do not see a key of the page, 0 elsewhere; None
        if they see all of them."""
        key = (chunk, page, per_kv, window, dtype)
        if key not in self._masks:
            rows = self.positions[:, chunk * QUERY_CHUNK : (chunk + 1) * QUERY_CHUNK]
            if sees_all(int(rows.min()), int(rows.max()), page, window):
                self._masks[key] = None
                return None
            rows = rows.repeat_interleave(per_kv, dim=1)
            rows = F.pad(rows, (0, max(0, MIN_ROWS - rows.shape[1])))[..., None]
            keys = torch.arange(page * PAGE, (page + 1) * PAGE, device=rows.device)
            hidden = keys > rows
            if window is not None:
                hidden = hidden | (keys <= rows - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = zeros.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[key]


def attend(q: Tensor, queries: Queries, page_of: PageOf, rule: Rule) -> Tensor:
    """Attention of n sequences over their own keys. q: [n, R, H, D], scaled. Returns [n, R, H, Dv]. No gradient."""
    outs = [
        _attend_chunk(q[:, c * QUERY_CHUNK : (c + 1) * QUERY_CHUNK], c, queries, page_of, rule)
        for c in range(len(queries.chunk_pages))
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _attend_chunk(q: Tensor, chunk: int, queries: Queries, page_of: PageOf, rule: Rule) -> Tensor:
    num_queries, heads = q.shape[1:3]
    keys, values = zip(*(page_of(j) for j in range(queries.chunk_pages[chunk])), strict=True)
    kv_heads = keys[0].shape[1]
    per_kv = heads // kv_heads
    rows = num_queries * per_kv
    folded = fold(q, kv_heads, per_kv)
    if rows < MIN_ROWS:
        folded = F.pad(folded, (0, 0, 0, MIN_ROWS - rows))
    scores = []
    for page, k in enumerate(keys):
        s = soften(product(folded, k.transpose(-1, -2)), rule.softcap)
        mask = queries.mask(chunk, page, per_kv, rule.window, s.dtype)
        scores.append(s if mask is None else s.add_(mask))
    sinks = None
    if rule.sinks is not None:
        sinks = _fold_sinks(rule.sinks.to(folded.dtype), kv_heads, per_kv, num_queries, folded.shape[2])
    top = to_weights(scores, sinks)
    out = product(scores[0], values[0])
    for w, v in zip(scores[1:], values[1:], strict=True):
        out += product(w, v)
    denominator = out[..., -1:]
    if sinks is not None:
        denominator = denominator + exp(sinks - top)
    return _unfold((out[..., :-1] / denominator)[:, :, :rows], num_queries, per_kv)


def soften(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores with a layer's soft-cap, in place."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def to_weights(scores: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """Turn the scores of all pages, [..., rows, PAGE], into exponentials in place; what was taken off them before."""
    top = scores[0].amax(dim=-1, keepdim=True)
    for s in scores[1:]:
        torch.maximum(top, s.amax(dim=-1, keepdim=True), out=top)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    for s in scores:
        exp(s.sub_(top), in_place=True)
    return top


def exp(x: Tensor, *, in_place: bool = False) -> Tensor:
    """The exponential of scores, the same bits either way."""
    return x.mul_(LOG2_E).exp2_() if in_place else torch.exp2(x * LOG2_E)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product over the first two dimensions, always through the same kernel."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def fold(q: Tensor, kv_heads: int, per_kv: int) -> Tensor:
    """[n, R, H, D] -> [n, KV, R * per_kv, D]: the heads that share keys become rows of one product."""
    n, r, _, d = q.shape
    return q.reshape(n, r, kv_heads, per_kv, d).permute(0, 2, 1, 3, 4).reshape(n, kv_heads, r * per_kv, d)


def _unfold(o: Tensor, num_queries: int, per_kv: int) -> Tensor:
    n, kv_heads, _, d = o.shape
    return o.reshape(n, kv_heads, num_queries, per_kv, d).permute(0, 2, 1, 3, 4).reshape(n, num_queries, -1, d)


def _fold_sinks(sinks: Tensor, kv_heads: int, per_kv: int, num_queries: int, rows: int) -> Tensor:
    folded = sinks.reshape(kv_heads, 1, per_kv).expand(kv_heads, num_queries, per_kv).reshape(1, kv_heads, -1, 1)
    return F.pad(folded, (0, 0, 0, rows - folded.shape[2]))


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: PackedContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls. query [1, H, T, D], key [1, KV, T, D], value [1, KV, T, Dv]."""
    if packed is None:
        raise RuntimeError("this model computes packed attention only; pass packed=<context>, or load it plainly")
    if attention_mask is not None:
        raise RuntimeError("transformers built an attention mask for packed attention; masking belongs to this module")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(sliding_window, softcap, s_aux)
    out = packed.attend(
        module.layer_idx, query[0].transpose(0, 1) * scale, key[0].transpose(0, 1), value[0].transpose(0, 1), rule
    )
    return out[None], None


def register() -> None:
    """Make `NAME` known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _packed_attention)
