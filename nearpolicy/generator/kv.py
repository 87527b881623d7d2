"""Memory for keys and values: pages of fixed size, counted, shared by reference, and the attention over them.

`PagePool` is accounting and knows no tensors; `KeyValueStore` holds the tensors; `PagedContext` is what one forward
pass hands to the model. Page 0 is never written and stays zero: tables point there behind a sequence's end. A page is
cleared when its first position is written, so that nothing of its last holder, a NaN least of all, is multiplied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearpolicy.models.attention import PAGE, Queries, Rule, attend, with_ones
from nearpolicy.models.shapes import AttentionShape

EMPTY = 0


class PagePool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, num_pages: int) -> None:
        """``num_pages`` usable pages, numbered from 1."""
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._holders = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        if not self.can_allocate(count):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more holder of pages that stay as they are."""
        for page in pages:
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


class KeyValueStore:
    """Per layer: keys [pages, KV, PAGE, D] and values with the column of ones [pages, KV, PAGE, Dv + 1]."""

    def __init__(
        self, layers: dict[int, AttentionShape], num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def zeros(shape: AttentionShape, width: int) -> Tensor:
            return torch.zeros(num_pages + 1, shape.kv_heads, PAGE, width, dtype=dtype, device=device)

        self.device = device
        self.keys = {layer: zeros(shape, shape.key_size) for layer, shape in layers.items()}
        self.values = {layer: zeros(shape, shape.value_size + 1) for layer, shape in layers.items()}

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for store in (self.keys, self.values) for t in store.values())

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages in every layer: how a shared prompt's last, unfinished page becomes a sequence's own."""
        if not sources:
            return
        source, target = (torch.tensor(pages, device=self.device) for pages in (sources, targets))
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target] = tensor[source]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence in a forward pass."""

    start: int
    """Position of the first one in the sequence."""
    length: int
    pages: Sequence[int]
    """The sequence's page table, long enough for the new tokens."""


class PagedContext:
    """A `PackedContext` that stores keys and values in pages and attends over them."""

    def __init__(self, store: KeyValueStore, spans: Sequence[Span], num_rows: int) -> None:
        """Rows are packed in the order of ``spans``; rows behind them are padding. Decoding spans have length 1."""
        self._store = store
        device = store.device
        positions = np.concatenate([np.arange(s.start, s.start + s.length) for s in spans])
        pages = np.concatenate([np.asarray(s.pages)[np.arange(s.start, s.start + s.length) // PAGE] for s in spans])
        padding = num_rows - len(positions)
        self.positions = torch.from_numpy(np.pad(positions, (0, padding))).to(device)
        """[num_rows] position of every packed row in its sequence."""
        self._page = torch.from_numpy(pages).to(device)
        self._offset = torch.from_numpy(positions % PAGE).to(device)
        self._new_pages = self._page[self._offset == 0]
        starts = np.cumsum([0, *(s.length for s in spans)])
        decoding = [i for i, s in enumerate(spans) if s.length == 1]
        chunks = [i for i, s in enumerate(spans) if s.length > 1]
        parts = [part for part in (decoding, chunks) if part]
        self._blocks = [_Block.build([spans[i] for i in part], starts[part], device) for part in parts]
        order = np.concatenate([b.packed_rows for b in self._blocks])
        inverse = np.zeros(num_rows, dtype=np.int64)
        inverse[order[order >= 0]] = np.flatnonzero(order >= 0)
        in_order = len(order) == num_rows and np.array_equal(order, np.arange(num_rows))
        self._inverse = None if in_order else torch.from_numpy(inverse).to(device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        if len(self._new_pages):
            keys[self._new_pages] = 0.0
            values[self._new_pages] = 0.0
        keys[self._page, :, self._offset] = k[: len(self._page)]
        values[self._page, :, self._offset] = with_ones(v[: len(self._page)])
        outs = [block.attend(q, keys, values, rule).flatten(0, 1) for block in self._blocks]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._inverse is None else out.index_select(0, self._inverse)


class _Block:
    """Spans padded to one length."""

    def __init__(
        self, query_rows: Tensor | slice, packed_rows: np.ndarray, queries: Queries, table: np.ndarray
    ) -> None:
        device = queries.positions.device
        self._query_rows = query_rows
        self.packed_rows = packed_rows
        """[n * R] packed row of each query, -1 for padding."""
        self._queries = queries
        self._pages = [_page_selector(column, device) for column in table.T]

    @classmethod
    def build(cls, spans: Sequence[Span], starts: np.ndarray, device: torch.device) -> _Block:
        n, width = len(spans), max(s.length for s in spans)
        steps = np.arange(width)
        lengths = np.array([s.length for s in spans])[:, None]
        clipped = np.minimum(steps, lengths - 1)  # padding repeats the span's last query
        rows = starts[:, None] + clipped
        positions = np.array([s.start for s in spans])[:, None] + clipped
        table = np.full((n, int(positions.max()) // PAGE + 1), EMPTY, dtype=np.int64)
        for i, span in enumerate(spans):
            used = list(span.pages[: (span.start + span.length - 1) // PAGE + 1])
            table[i, : len(used)] = used
        flat = rows.reshape(-1)
        contiguous = np.array_equal(flat, np.arange(flat[0], flat[0] + len(flat)))
        query_rows = slice(int(flat[0]), int(flat[0]) + len(flat)) if contiguous else torch.from_numpy(flat).to(device)
        packed = np.where(steps < lengths, rows, -1).reshape(-1)
        queries = Queries(torch.from_numpy(positions).to(device), positions.max(axis=0).tolist())
        return cls(query_rows, packed, queries, table)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        queries = q[self._query_rows].unflatten(0, self._queries.positions.shape)
        return attend(queries, self._queries, lambda j: (self._page(keys, j), self._page(values, j)), rule)

    def _page(self, store: Tensor, j: int) -> Tensor:
        """[n, KV, PAGE, width]: page ``j`` of every span."""
        which = self._pages[j]
        return store[which] if isinstance(which, slice) else store.index_select(0, which)


def _page_selector(pages: np.ndarray, device: torch.device) -> slice | Tensor:
    """A view where the pages lie side by side, a gather elsewhere."""
    if len(pages) and np.array_equal(pages, np.arange(pages[0], pages[0] + len(pages))):
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return torch.from_numpy(np.ascontiguousarray(pages)).to(device)
