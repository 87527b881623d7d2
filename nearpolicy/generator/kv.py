"""Keys and values in pages, and attention over them: what one forward pass of the engine hands to the model.

Decoding sequences come first, one row each. Attention takes their keys part by part: the full pages of shared prefixes,
each once for all sequences that read it, and then their own pages level by level, in place
(`nearpolicy.generator.pages`). Chunks of prefixes come behind. For every row the pages are added in the order of
positions, as everywhere (`nearpolicy.models.attention`), so that all of this changes no bit.

A page is cleared when its first position is written: nothing of its last holder, a NaN least of all, is multiplied
again.
"""

from __future__ import annotations

import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nearpolicy.generator.pages import EMPTY
from nearpolicy.generator.scheduler import Plan, Scheduler
from nearpolicy.models.attention import MIN_ROWS, PAGE, Queries, Rule, attend, exp, product
from nearpolicy.models.shapes import AttentionShape

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
"""Room for pages is no promise of memory: all of them are never used at once."""


class KeyValueStore:
    """Per layer: keys [pages, KV, PAGE, D] and values with a column of ones [pages, KV, PAGE, Dv + 1].

    Room is made for every page that may ever be used, and memory is taken when one is first written.
    """

    def __init__(
        self, layers: dict[int, AttentionShape], num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``num_pages``: how far numbers of pages go, the empty one included."""

        self._memory: list[tuple[mmap.mmap, int]] = []
        """On a CPU: the memory of each tensor, and the bytes of one of its pages."""

        def zeros(shape: AttentionShape, width: int) -> Tensor:
            sizes = (num_pages, shape.kv_heads, PAGE, width)
            if device.type != "cpu":
                return torch.zeros(sizes, dtype=dtype, device=device)
            num_bytes = num_pages * shape.kv_heads * PAGE * width * dtype.itemsize
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            self._memory.append((memory, num_bytes // num_pages))
            return torch.frombuffer(memory, dtype=dtype).view(sizes)

        self.device = device
        self.touched = np.zeros(num_pages, dtype=bool)
        """Pages that take memory."""
        self.page_bytes = sum(shape.page_bytes(dtype) for shape in layers.values())
        self.keys = {layer: zeros(shape, shape.key_size) for layer, shape in layers.items()}
        self.values = {layer: zeros(shape, shape.value_size + 1) for layer, shape in layers.items()}

    def copy_pages(self, copies: Mapping[int, int]) -> None:
        """{to: from} in every layer; every page is read before any is written."""
        if not copies:
            return
        self.touched[list(copies)] = True
        targets = torch.tensor(list(copies), device=self.device)
        sources = torch.tensor(list(copies.values()), device=self.device)
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def release(self) -> None:
        """Give back all memory; what was stored is forgotten. `restore` before the next page is written."""
        if self.device.type == "cpu":
            self.give_memory_back(())
        for tensor in self._on_device():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take what `release` gave back."""
        for tensor in self._on_device():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()
        self.touched[:] = False

    def _on_device(self) -> list[Tensor]:
        """Tensors that hold memory whether it is used or not."""
        return [] if self.device.type == "cpu" else [*self.keys.values(), *self.values.values()]

    def give_memory_back(self, kept: Iterable[int]) -> None:
        """Of all pages but the ``kept`` ones; they read as zeros then."""
        unused = self.touched.copy()
        unused[list(kept)] = False
        self.touched[unused] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[False], unused, [False]]).astype(np.int8)))
        for first, end in edges.reshape(-1, 2).tolist():
            for memory, size in self._memory:
                start = -(-first * size // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = end * size // mmap.PAGESIZE * mmap.PAGESIZE
                if start < stop:
                    memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class PagedContext:
    """A `PackedContext` that stores keys and values in pages and attends over them."""

    def __init__(self, store: KeyValueStore, plan: Plan, layout: DecodeLayout | None, num_rows: int) -> None:
        """``layout``: of the decoding sequences, if there are any. Rows beyond those of the plan are padding."""
        self._store = store
        device = store.device
        n = len(plan.decoding)
        starts = np.cumsum([n, *(chunk.length for chunk in plan.chunks)])
        positions = np.zeros(num_rows, dtype=np.int64)
        pages = np.empty(starts[-1], dtype=np.int64)
        if layout is not None:
            positions[:n] = layout.positions
            pages[:n] = layout.last_pages
        for start, chunk in zip(starts, plan.chunks, strict=False):
            own = np.arange(chunk.start, chunk.start + chunk.length)
            positions[start : start + chunk.length] = own
            pages[start : start + chunk.length] = np.asarray(chunk.prefix.pages)[own // PAGE]
        offsets = positions[: len(pages)] % PAGE
        self.positions = torch.from_numpy(positions).to(device)
        """[num_rows] position of every packed row in its sequence."""
        self._written = pages, offsets
        self._flat: dict[int, Tensor] = {}
        """By number of key-value heads: [rows * KV] where keys of the new tokens go in the flattened store."""
        self._device = device
        new = pages[offsets == 0]
        store.touched[new] = True
        self._new_pages = torch.from_numpy(new).to(device) if len(new) else None
        self._decoding = None if layout is None else _Decoding(layout, device)
        self._chunks = _Chunks(plan, starts, num_rows, device) if plan.chunks else None
        self._num_decoding, self._num_rows = n, num_rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        if self._new_pages is not None:
            keys.index_fill_(0, self._new_pages, 0.0)
            values.index_fill_(0, self._new_pages, 0.0)
            values.select(-1, -1).index_fill_(0, self._new_pages, 1.0)
        where, count = self._places(keys.shape[1]), len(self._written[0])
        keys.view(-1, keys.shape[-1]).index_copy_(0, where, k[:count].reshape(len(where), -1))
        values.view(-1, values.shape[-1])[:, :-1].index_copy_(0, where, v[:count].reshape(len(where), -1))
        outs = []
        if self._decoding is not None:
            outs.append(self._decoding.attend(q[: self._num_decoding], keys, values, rule))
        if self._chunks is not None:
            outs.append(self._chunks.attend(q, keys, values, rule))
        elif self._num_rows > self._num_decoding:
            outs.append(outs[0].new_zeros(self._num_rows - self._num_decoding, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _places(self, kv_heads: int) -> Tensor:
        if kv_heads not in self._flat:
            pages, offsets = self._written
            flat = (pages[:, None] * kv_heads + np.arange(kv_heads)) * PAGE + offsets[:, None]
            self._flat[kv_heads] = torch.from_numpy(flat.reshape(-1)).to(self._device)
        return self._flat[kv_heads]


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages read by the decoding sequences, each page by ``members`` of them; which, may repeat to fill up."""

    rows: np.ndarray | None
    """[pages * members] decoding rows; None for all of them in order."""
    members: int
    pages: slice | Tensor
    starts: np.ndarray
    """[pages * members] position of the page's first key in each reader."""
    index: Tensor | None


class DecodeLayout:
    """How decoding sequences read their pages. What changes only when sequences come and go is kept between passes."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self._scheduler = scheduler
        self._device = device
        self._changes = -1
        self.parts: list[_Part] = []
        self.positions = np.zeros(0, dtype=np.int64)
        self.last_pages = np.zeros(0, dtype=np.int64)

    def update(self) -> DecodeLayout:
        """As it is now; ``positions`` [n] is where each row's new token goes, in page ``last_pages`` [n]."""
        rows = self._scheduler.rows
        sequences = rows.levels[0]
        if rows.changes != self._changes:
            self._changes = rows.changes
            self.parts = [*self._shared(sequences), *self._own(sequences)]
            self.last_pages = np.array([rows.page(len(s.rows) - 1, s.rows[-1]) for s in sequences], dtype=np.int64)
        self.positions = np.array([s.stored for s in sequences], dtype=np.int64)
        return self

    def _shared(self, sequences: Sequence) -> list[_Part]:
        """Pages of one place in their prefixes, and of a similar number of readers, are one part."""
        parts = []
        for j in range(max((len(s.shared) for s in sequences), default=0)):
            readers: dict[int, list[int]] = defaultdict(list)
            for row, sequence in enumerate(sequences):
                if j < len(sequence.shared):
                    readers[sequence.shared[j]].append(row)
            by_size: dict[int, list[int]] = defaultdict(list)
            for page, of_page in readers.items():
                by_size[1 << (len(of_page) - 1).bit_length()].append(page)
            for size, pages in sorted(by_size.items()):
                filled = [(readers[page] * size)[:size] for page in pages]
                parts.append(self._part(np.concatenate(filled), size, pages, np.full(len(pages) * size, j * PAGE)))
        return parts

    def _own(self, sequences: Sequence) -> list[_Part]:
        first = np.array([len(s.shared) for s in sequences], dtype=np.int64) * PAGE
        parts = []
        for level, held in enumerate(self._scheduler.rows.levels):
            if not held:
                break
            base = self._scheduler.rows.page(level, 0)
            rows = None if level == 0 else np.array([s.rows[0] for s in held])
            starts = (first if rows is None else first[rows]) + level * PAGE
            parts.append(self._part(rows, 1, range(base, base + len(held)), starts))
        return parts

    def _part(self, rows: np.ndarray | None, members: int, pages: Sequence[int], starts: np.ndarray) -> _Part:
        side_by_side = isinstance(pages, range) or list(pages) == list(range(pages[0], pages[0] + len(pages)))
        where = slice(pages[0], pages[0] + len(pages)) if side_by_side else torch.tensor(pages, device=self._device)
        index = None if rows is None else torch.from_numpy(rows).to(self._device)
        return _Part(rows, members, where, starts, index)


class _Decoding:
    """One query per sequence over all its pages."""

    def __init__(self, layout: DecodeLayout, device: torch.device) -> None:
        self._parts = layout.parts
        self._positions = layout.positions
        self._device = device
        self._masks: dict[tuple[int | None, torch.dtype, int], list[Tensor | None]] = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """q [n, H, D], scaled; keys, values: pages of one layer -> [n, H, Dv]."""
        n, kv_heads = q.shape[0], keys.shape[1]
        per_kv = q.shape[1] // kv_heads
        width = max(per_kv, MIN_ROWS)  # queries of one reader: fewer would take another kernel
        q = q.reshape(n, kv_heads, per_kv, -1)
        if width > per_kv:
            q = F.pad(q, (0, 0, 0, width - per_kv))
        sinks = None if rule.sinks is None else rule.sinks.to(q.dtype).view(1, kv_heads, per_kv, 1)
        top = None if sinks is None else F.pad(sinks, (0, 0, 0, width - per_kv)).expand(n, -1, -1, -1).clone()
        scores = []
        for part, mask in zip(self._parts, self._masked(rule.window, q.dtype, width), strict=True):
            queries = _by_page(q if part.index is None else q.index_select(0, part.index), part.members)
            s = product(queries, _pages(keys, part.pages).transpose(-1, -2))
            if rule.softcap is not None:
                s = torch.tanh(s / rule.softcap) * rule.softcap
            if mask is not None:
                s += mask
            scores.append(s)
            largest = _by_reader(s.amax(dim=-1, keepdim=True), part.members)
            top = _combine(torch.maximum, top, largest, part.index, n, float("-inf"))
        out = None
        for part, s in zip(self._parts, scores, strict=True):
            below = _by_page(top if part.index is None else top.index_select(0, part.index), part.members)
            weights = exp(s.sub_(below), in_place=True)
            added = _by_reader(product(weights, _pages(values, part.pages)), part.members)
            out = _combine(torch.add, out, added, part.index, n, 0.0)
        denominator = out[:, :, :per_kv, -1:]
        if sinks is not None:
            denominator = denominator + exp(sinks - top[:, :, :per_kv])
        return (out[:, :, :per_kv, :-1] / denominator).flatten(1, 2)

    def _masked(self, window: int | None, dtype: torch.dtype, width: int) -> list[Tensor | None]:
        """Per part what to add to its scores, [pages, 1, rows or 1, PAGE]; None if every key is seen."""
        key = (window, dtype, width)
        if key not in self._masks:
            self._masks[key] = [self._mask(part, window, dtype, width) for part in self._parts]
        return self._masks[key]

    def _mask(self, part: _Part, window: int | None, dtype: torch.dtype, width: int) -> Tensor | None:
        last = (self._positions if part.rows is None else self._positions[part.rows]) - part.starts
        """Of the page's keys, the last that each reader sees."""
        if last.min() >= PAGE - 1 and (window is None or last.max() < window):
            return None
        keys = np.arange(PAGE)
        hidden = keys > last[:, None]
        if window is not None:
            hidden |= keys <= last[:, None] - window
        mask = np.where(hidden, -np.inf, 0.0).astype(np.float32)
        mask = torch.from_numpy(mask).to(device=self._device, dtype=dtype)
        mask = mask.view(-1, 1, part.members, PAGE)
        return mask if part.members == 1 else mask.repeat_interleave(width, dim=2)


def _pages(store: Tensor, pages: slice | Tensor) -> Tensor:
    """[pages, KV, PAGE, width]: in place where they lie side by side."""
    return store[pages] if isinstance(pages, slice) else store.index_select(0, pages)


def _by_page(x: Tensor, members: int) -> Tensor:
    """[pages * members, KV, queries, width] -> [pages, KV, members * queries, width]."""
    if members == 1:
        return x
    readers, kv_heads, queries, width = x.shape
    x = x.view(readers // members, members, kv_heads, queries, width).transpose(1, 2)
    return x.reshape(readers // members, kv_heads, members * queries, width)


def _by_reader(x: Tensor, members: int) -> Tensor:
    """The way back."""
    if members == 1:
        return x
    pages, kv_heads, rows, width = x.shape
    x = x.view(pages, kv_heads, members, rows // members, width).transpose(1, 2)
    return x.reshape(pages * members, kv_heads, rows // members, width)


def _combine(
    how: Callable[..., Tensor], total: Tensor | None, part: Tensor, index: Tensor | None, n: int, start: float
) -> Tensor:
    """``how(total, part)`` where ``index`` says; None for all n rows in order. A row that stands twice in the index, to
    fill up, has the same part twice, and counts once."""
    if index is None:
        return part if total is None else how(total, part, out=total)
    if total is None:
        total = part.new_full((n, *part.shape[1:]), start)
    return total.index_copy_(0, index, how(total.index_select(0, index), part))


class _Chunks:
    """Chunks of prefixes, padded to one length."""

    def __init__(self, plan: Plan, starts: np.ndarray, num_rows: int, device: torch.device) -> None:
        chunks = plan.chunks
        n, width = len(chunks), max(chunk.length for chunk in chunks)
        steps = np.arange(width)
        lengths = np.array([chunk.length for chunk in chunks])[:, None]
        clipped = np.minimum(steps, lengths - 1)  # padding repeats the chunk's last query
        positions = np.array([chunk.start for chunk in chunks])[:, None] + clipped
        table = np.full((n, int(positions.max()) // PAGE + 1), EMPTY, dtype=np.int64)
        for i, chunk in enumerate(chunks):
            used = chunk.prefix.pages[: (chunk.start + chunk.length - 1) // PAGE + 1]
            table[i, : len(used)] = used
        self._query_rows = torch.from_numpy((starts[:-1, None] + clipped).reshape(-1)).to(device)
        behind = np.zeros(num_rows - starts[0], dtype=np.int64)  # rows of padding take any
        behind[: starts[-1] - starts[0]] = np.flatnonzero((steps < lengths).reshape(-1))
        self._back = torch.from_numpy(behind).to(device)
        self._queries = Queries(torch.from_numpy(positions).to(device), positions.max(axis=0).tolist())
        self._pages = [torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in table.T]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """[rows behind the decoding ones, H, Dv]."""
        queries = q.index_select(0, self._query_rows).unflatten(0, self._queries.positions.shape)
        pages = self._pages
        out = attend(
            queries,
            self._queries,
            lambda j: (keys.index_select(0, pages[j]), values.index_select(0, pages[j])),
            rule,
        )
        return out.flatten(0, 1).index_select(0, self._back)
