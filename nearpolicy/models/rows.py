"""Attention over the packed row itself: what a forward pass without stored keys (learner, probes) hands to the model.

A packed row is a set of *nodes*, each a run of consecutive tokens that continues an earlier node or starts at position
0. Two completions of one prompt are two nodes with the same parent: the prompt goes through the model once.

    rows:   0 1 2 3 4 | 5 6 7 | 8 9        node 0: prompt    node 1, node 2: completions, parent 0
    keys of node 2:     0 1 2 3 4 8 9      gathered in the order of positions, whole pages at a time

Nodes of one parent read its full pages together: their queries are rows of one product, as those of decoding sequences
are in the engine. Only the page in which the parent ends is gathered for each of them.

Forward and backward are written by hand: one gather of queries, keys, values and results each for all blocks, and
scores that become weights in place. Backward reads the same layout: a packed row of queries has one place, so that
its gradient is one more gather; a key has many, and its gradients are added in the order of places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearpolicy.models.attention import (
    MIN_ROWS,
    PAGE,
    QUERY_CHUNK,
    Rule,
    exp,
    sees_all,
    soften,
    to_weights,
    with_ones,
)


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens ``start .. start + length - 1`` of the packed row."""

    start: int
    length: int
    parent: int | None = None
    """Index of the node it continues, at that node's end."""


class RowContext:
    """A `PackedContext` whose keys are those of the same forward pass."""

    def __init__(self, nodes: Sequence[Node], num_rows: int, device: torch.device | str = "cpu") -> None:
        """``num_rows`` may exceed the rows of the nodes: the rest is padding, whose output is arbitrary but finite."""
        paths: list[np.ndarray] = []
        for node in nodes:
            own = np.arange(node.start, node.start + node.length)
            paths.append(own if node.parent is None else np.concatenate([paths[node.parent], own]))
        positions = np.zeros(num_rows, dtype=np.int64)
        for node, path in zip(nodes, paths, strict=True):
            positions[node.start : node.start + node.length] = np.arange(len(path) - node.length, len(path))
        self.positions = torch.from_numpy(positions).to(device)
        """[num_rows] position of every packed token in its sequence."""
        self.num_rows = num_rows
        self.device = device
        self.padding = np.ones(num_rows, dtype=bool)
        """Rows of no node."""
        self.query_rows: list[np.ndarray] = []
        """Per block and chunk: [n, R] packed rows; -1 for padding."""
        self.key_rows: list[np.ndarray] = []
        """Per page that a block reads, for all its readers: [pages, PAGE] packed rows."""
        self.parts: list[_Part] = []
        self._layouts: dict[tuple[int, int], _Layout] = {}
        self._masks: dict[tuple[int, int, int, int | None, torch.dtype], Tensor | None] = {}
        for (_, pages, shared, siblings), members in sorted(_blocks(nodes, paths).items()):
            self._add([nodes[i] for i in members], [paths[i] for i in members], pages, shared, siblings)

    def _add(self, nodes: list[Node], paths: list[np.ndarray], pages: int, shared: int, siblings: int) -> None:
        """A block of nodes of similar length with the same number of pages; each ``siblings`` of them, side by side,
        share their first ``shared`` pages."""
        n, width = len(nodes), max(MIN_ROWS, *(node.length for node in nodes))
        query_rows = np.full((n, width), -1, dtype=np.int64)
        positions = np.zeros((n, width), dtype=np.int64)
        keys = np.zeros((n, pages * PAGE), dtype=np.int64)
        for i, (node, path) in enumerate(zip(nodes, paths, strict=True)):
            query_rows[i, : node.length] = path[-node.length :]
            self.padding[path[-node.length :]] = False
            positions[i] = len(path) - node.length
            positions[i, : node.length] = np.arange(len(path) - node.length, len(path))
            keys[i] = path[0]
            keys[i, : len(path)] = path
        first = len(self.key_rows)
        for page in range(pages):
            readers = slice(None, None, siblings if page < shared else 1)
            self.key_rows.append(keys[readers, page * PAGE : (page + 1) * PAGE])
        for start in range(0, width, QUERY_CHUNK):
            chunk = slice(start, start + QUERY_CHUNK)
            seen = int(positions[:, chunk].max()) // PAGE + 1
            rows, own = query_rows[:, chunk], positions[:, chunk]
            if rows.shape[1] < MIN_ROWS:
                rows = np.pad(rows, ((0, 0), (0, MIN_ROWS - rows.shape[1])), constant_values=-1)
                own = np.pad(own, ((0, 0), (0, MIN_ROWS - own.shape[1])), mode="edge")
            self.query_rows.append(rows)
            self.parts.append(_Part(own, range(first, first + seen), whole=width <= QUERY_CHUNK))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        sinks = None if rule.sinks is None else rule.sinks.to(q.dtype)
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        differentiate = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if differentiate:
            return _RowAttention.apply(q, k, v, sinks, self, rule)
        with torch.no_grad():
            return _forward(q, k, v, sinks, self, rule, None)[0]

    def layout(self, heads: int, kv_heads: int) -> _Layout:
        if (heads, kv_heads) not in self._layouts:
            self._layouts[heads, kv_heads] = _Layout(self, heads, kv_heads)
        return self._layouts[heads, kv_heads]

    def mask(self, part: int, page: int, per_kv: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[n * R * per_kv, PAGE]: -inf where the rows of a part do not see a key of its page, 0 elsewhere; None if they
        see all of them."""
        key = (part, page, per_kv, window, dtype)
        if key not in self._masks:
            rows, mask = self.parts[part].positions, None
            if not sees_all(int(rows.min()), int(rows.max()), page, window):
                rows = rows.reshape(-1).repeat(per_kv)[:, None]
                keys = np.arange(page * PAGE, (page + 1) * PAGE)
                hidden = keys > rows if window is None else (keys > rows) | (keys <= rows - window)
                mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))
                mask = mask.to(device=self.device, dtype=dtype)
            self._masks[key] = mask
        return self._masks[key]


def _blocks(nodes: Sequence[Node], paths: Sequence[np.ndarray]) -> dict[tuple[int, int, int, int], list[int]]:
    """(width, pages, pages shared, siblings that share them) -> nodes, siblings side by side."""
    families: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        families[_bucket(node.length), -(-len(paths[i]) // PAGE), -1 if node.parent is None else node.parent].append(i)
    blocks: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for (width, pages, parent), members in families.items():
        shared = 0 if parent < 0 or len(members) == 1 else len(paths[parent]) // PAGE
        blocks[width, pages, shared, len(members) if shared else 1] += members
    return blocks


def _bucket(length: int) -> int:
    """Nodes of similar length share a block, so that padding stays below one half; up to 16 tokens, fewer blocks are
    worth more."""
    return 1 << max(4, (length - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Part:
    """The queries of a block that are scored at once."""

    positions: np.ndarray
    """[n, R]"""
    pages: range
    """Into the context's `key_rows`: pages 0, 1, ... of their sequences."""
    whole: bool
    """All queries of the block: their weights are kept for backward. Of a part of them they are computed again."""


class _Layout:
    """Where every number of a context lies, for so many heads. Heads that share keys are rows of one product:

    queries and results    per part: [KV, n, R, heads per KV]
    keys and values        per page: [KV, readers, PAGE]
    """

    def __init__(self, context: RowContext, heads: int, kv_heads: int) -> None:
        t, per_kv = context.num_rows, heads // kv_heads
        self.kv_heads, self.per_kv, self.device = kv_heads, per_kv, context.device
        head = np.arange(heads).reshape(kv_heads, 1, per_kv)
        inverse = np.zeros((t, heads), dtype=np.int64)
        queries, grads, self.parts, offset = [], [], [], 0
        for rows in context.query_rows:
            rows = rows.reshape(1, -1, 1)
            there = np.broadcast_to(rows >= 0, (kv_heads, rows.size, per_kv))
            of_row = np.broadcast_to(rows, there.shape)
            of_head = np.broadcast_to(head, there.shape)
            places = offset + np.arange(there.size).reshape(there.shape)
            inverse[of_row[there], of_head[there]] = places[there]
            queries.append(np.where(there, of_head * t + of_row, 0).reshape(-1))
            grads.append(np.where(there, of_row * heads + of_head, t * heads).reshape(-1))
            self.parts.append(slice(offset, offset + there.size))
            offset += there.size
        keys, self.pages, offset = [], [], 0
        for rows in context.key_rows:
            flat = (np.arange(kv_heads)[:, None] * t + rows.reshape(1, -1)).reshape(-1)
            keys.append(flat)
            self.pages.append(slice(offset, offset + len(flat)))
            offset += len(flat)
        self.queries = self._index(queries)
        """Into [H * T]: where the query of each place is."""
        self.grads = self._index(grads)
        """Into [T * H + 1]: where the gradient of each place is; the last for padding."""
        self.inverse = self._index([inverse.reshape(-1)])
        """[T * H]: the place of each result."""
        self.keys = self._index(keys)
        """Into [KV * T]: where each key is."""
        self.padding = torch.from_numpy(np.flatnonzero(context.padding)).to(context.device)

    def _index(self, parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def queries_of(self, x: Tensor, part: int) -> Tensor:
        """[KV, n * R * heads per KV, width] of all places."""
        return x[self.parts[part]].view(self.kv_heads, -1, x.shape[-1])

    def page_of(self, x: Tensor, page: int) -> Tensor:
        """[KV * readers, PAGE, width] of all pages."""
        return x[self.pages[page]].view(-1, PAGE, x.shape[-1])


def _by_reader(x: Tensor, page: Tensor) -> Tensor:
    """[KV, rows, width] -> [KV * readers, rows of a reader, width]"""
    return x.view(len(page), -1, x.shape[-1])


def _by_head(x: Tensor) -> Tensor:
    """[T, heads, width] -> [heads * T, width]"""
    return x.transpose(0, 1).reshape(-1, x.shape[-1])


def _weights(
    context: RowContext, layout: _Layout, part: int, q: Tensor, keys: Tensor, sinks: Tensor | None, rule: Rule
) -> tuple[list[Tensor], Tensor]:
    """Exponentials of a part, [KV, rows, PAGE] for each of its pages, and what was taken off the scores before."""
    queries, scores = layout.queries_of(q, part), []
    for number, page in enumerate(context.parts[part].pages):
        k = layout.page_of(keys, page)
        s = soften(torch.bmm(_by_reader(queries, k), k.transpose(1, 2)), rule.softcap)
        s = s.view(layout.kv_heads, -1, PAGE)
        mask = context.mask(part, number, layout.per_kv, rule.window, s.dtype)
        scores.append(s if mask is None else s.add_(mask))
    return scores, to_weights(scores, None if sinks is None else _sinks(sinks, layout, queries))


def _sinks(sinks: Tensor, layout: _Layout, queries: Tensor) -> Tensor:
    """[H] -> [KV, rows, 1]"""
    return (
        sinks.view(layout.kv_heads, 1, -1)
        .expand(-1, queries.shape[1] // layout.per_kv, -1)
        .reshape(layout.kv_heads, -1, 1)
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: RowContext, rule: Rule, kept: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Results [T, H, Dv] and denominators [T * H, 1]. To ``kept``, for backward: queries, keys and values as gathered,
    and the weights of whole blocks."""
    t, heads = q.shape[:2]
    layout = context.layout(heads, k.shape[1])
    queries = _by_head(q).index_select(0, layout.queries)
    keys = _by_head(k).index_select(0, layout.keys)
    values = with_ones(_by_head(v)).index_select(0, layout.keys)
    if kept is not None:
        kept += [queries, keys, values]
    sums = queries.new_empty(len(queries), values.shape[-1])
    for part, of_part in enumerate(context.parts):
        weights, top = _weights(context, layout, part, queries, keys, sinks, rule)
        out = layout.queries_of(sums, part)
        for number, (w, page) in enumerate(zip(weights, of_part.pages, strict=True)):
            x = layout.page_of(values, page)
            if number == 0:
                torch.bmm(_by_reader(w, x), x, out=_by_reader(out, x))
            else:
                out += torch.bmm(_by_reader(w, x), x).view_as(out)
        if sinks is not None:
            out[..., -1:] += exp(_sinks(sinks, layout, out) - top)
        if kept is not None and of_part.whole:
            kept += weights
            kept += [top] if sinks is not None else []
    found = sums.index_select(0, layout.inverse)
    denominators = found[:, -1:]
    return (found[:, :-1] / denominators).view(t, heads, -1), denominators


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """In place; ``first``: whatever stands there is replaced. For gradients, whose bits no other role repeats."""
    if first:
        torch.bmm(a, b, out=total)
    else:
        total.baddbmm_(a, b)


class _RowAttention(torch.autograd.Function):
    """With w the exponentials, d their sum, o the result and g its gradient,

    a = g / d        gradient of the sum of values       b = -(a . o)     gradient of d
    gradient of v = w^T a      gradient of s = w (a v^T + b) = w ([a | b] [v | 1]^T)
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, context, rule):
        kept: list[Tensor] = []
        out, denominators = _forward(q, k, v, sinks, context, rule, kept)
        ctx.save_for_backward(sinks, out, denominators, *kept)
        ctx.context, ctx.rule, ctx.heads = context, rule, (q.shape[1], k.shape[1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        sinks, out, denominators, queries, keys, values, *kept = ctx.saved_tensors
        context, rule = ctx.context, ctx.rule
        (heads, kv_heads), t, width = ctx.heads, out.shape[0], out.shape[-1]
        layout, kept = context.layout(heads, kv_heads), iter(kept)
        flat = grad.new_zeros(t * heads + 1, width + 1)
        torch.div(grad.reshape(t * heads, -1), denominators, out=flat[:-1, :-1])
        flat[:-1, -1] = (flat[:-1, :-1] * out.reshape(t * heads, -1)).sum(-1).neg_()
        above = flat.index_select(0, layout.grads)
        of_queries, of_keys = torch.empty_like(queries), torch.empty_like(keys)
        of_values = grad.new_empty(len(values), width)
        begun: set[int] = set()
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        for part, of_part in enumerate(context.parts):
            if of_part.whole:
                weights = [next(kept) for _ in of_part.pages]
                top = None if sinks is None else next(kept)
            else:
                weights, top = _weights(context, layout, part, queries, keys, sinks, rule)
            own, a, dq = (layout.queries_of(x, part) for x in (queries, above, of_queries))
            if sinks is not None:
                of_sinks += (
                    (exp(_sinks(sinks, layout, a) - top) * a[..., -1:])
                    .view(kv_heads, -1, layout.per_kv)
                    .sum(1)
                    .view(-1)
                )
            for number, (w, page) in enumerate(zip(weights, of_part.pages, strict=True)):
                x, y = layout.page_of(keys, page), layout.page_of(values, page)
                w, a_x, q_x, dq_x = (_by_reader(z, x) for z in (w, a, own, dq))
                first = page not in begun
                begun.add(page)
                _add_product(layout.page_of(of_values, page), w.transpose(1, 2), a_x[..., :-1], first=first)
                s = torch.bmm(a_x, y.transpose(1, 2)).mul_(w)
                if rule.softcap is not None:
                    raw = torch.bmm(q_x, x.transpose(1, 2)).div_(rule.softcap).tanh_()
                    s.mul_(raw.square_().neg_().add_(1.0))
                _add_product(dq_x, s, x, first=number == 0)
                _add_product(layout.page_of(of_keys, page), s.transpose(1, 2), q_x, first=first)
        dq = of_queries.index_select(0, layout.inverse).view(t, heads, -1)
        if len(layout.padding):
            dq[layout.padding] = 0.0
        dk = keys.new_zeros(kv_heads * t, keys.shape[-1]).index_add_(0, layout.keys, of_keys)
        dv = values.new_zeros(kv_heads * t, width).index_add_(0, layout.keys, of_values)
        return (
            dq,
            dk.view(kv_heads, t, -1).transpose(0, 1),
            dv.view(kv_heads, t, -1).transpose(0, 1),
            of_sinks,
            None,
            None,
        )
