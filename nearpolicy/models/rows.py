"""Attention over the packed row itself: what a forward pass without stored keys (learner, probes) hands to the model.

A packed row is a set of *nodes*, each a run of consecutive tokens that continues an earlier node or starts at position
0. Two completions of one prompt are two nodes with the same parent: the prompt goes through the model once.

    rows:   0 1 2 3 4 | 5 6 7 | 8 9        node 0: prompt    node 1, node 2: completions, parent 0
    keys of node 2:     0 1 2 3 4 8 9      gathered in the order of positions, whole pages at a time
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearpolicy.models.attention import PAGE, Queries, Rule, attend, with_ones


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
        buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, node in enumerate(nodes):
            buckets[_bucket(node.length), -(-len(paths[i]) // PAGE)].append(i)
        inverse = np.zeros(num_rows, dtype=np.int64)
        self._blocks: list[_Block] = []
        offset = 0
        for (width, pages), members in sorted(buckets.items()):
            width = max(nodes[i].length for i in members)
            own = [nodes[i] for i in members], [paths[i] for i in members]
            self._blocks.append(_Block.build(*own, width, pages, device))
            for place, i in enumerate(members):
                first = offset + place * width
                inverse[nodes[i].start : nodes[i].start + nodes[i].length] = np.arange(first, first + nodes[i].length)
            offset += len(members) * width
        self._inverse = torch.from_numpy(inverse).to(device)
        positions = np.zeros(num_rows, dtype=np.int64)
        for node, path in zip(nodes, paths, strict=True):
            positions[node.start : node.start + node.length] = np.arange(len(path) - node.length, len(path))
        self.positions = torch.from_numpy(positions).to(device)
        """[num_rows] position of every packed token in its sequence."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        v1 = with_ones(v)
        outs = [block.attend(q, k, v1, rule).flatten(0, 1) for block in self._blocks]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, self._inverse)


def _bucket(length: int) -> int:
    """Nodes of similar length share a block, so that padding stays below one half."""
    return 1 << max(3, (length - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Block:
    """Nodes of similar length with the same number of pages."""

    query_rows: Tensor
    """[n * R] packed rows."""
    queries: Queries
    key_rows: Tensor
    """[pages * n * PAGE] packed rows, page-major."""
    pages: int

    @classmethod
    def build(cls, nodes: list[Node], paths: list[np.ndarray], width: int, pages: int, device) -> _Block:
        n = len(nodes)
        query_rows = np.zeros((n, width), dtype=np.int64)
        positions = np.zeros((n, width), dtype=np.int64)
        key_rows = np.zeros((n, pages * PAGE), dtype=np.int64)
        for i, (node, path) in enumerate(zip(nodes, paths, strict=True)):
            query_rows[i] = node.start
            query_rows[i, : node.length] = path[-node.length :]
            positions[i] = len(path) - node.length
            positions[i, : node.length] = np.arange(len(path) - node.length, len(path))
            key_rows[i] = path[0]
            key_rows[i, : len(path)] = path
        by_page = np.ascontiguousarray(key_rows.reshape(n, pages, PAGE).transpose(1, 0, 2))
        return cls(
            query_rows=torch.from_numpy(query_rows.reshape(-1)).to(device),
            queries=Queries(torch.from_numpy(positions).to(device), positions.max(axis=0).tolist()),
            key_rows=torch.from_numpy(by_page.reshape(-1)).to(device),
            pages=pages,
        )

    def attend(self, q: Tensor, k: Tensor, v1: Tensor, rule: Rule) -> Tensor:
        n, width = self.queries.positions.shape

        def paged(x: Tensor) -> Tensor:
            shape = (self.pages, n, PAGE, *x.shape[1:])
            return x.index_select(0, self.key_rows).view(shape).transpose(2, 3).contiguous()

        keys, values = paged(k), paged(v1)
        queries = q.index_select(0, self.query_rows).unflatten(0, (n, width))
        return attend(queries, self.queries, lambda j: (keys[j], values[j]), rule)
