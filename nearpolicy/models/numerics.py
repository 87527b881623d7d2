"""Whether exact numerics are to be had on this machine, measured in milliseconds at start.

Exact means: a row of a matrix product has the same bits whatever rows stand beside it and however many threads compute
it. Kernels keep that promise only above some number of rows per thread, which differs between processors, so the number
is measured on the shapes a model really uses rather than assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nearpolicy.models.attention import MIN_ROWS, PAGE
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.shapes import attention_shapes, linear_shapes

CANDIDATES = (4, 8, 16, 32)
_REFERENCE_ROWS = 160
_MAX_OUT = 2048
"""Columns probed of a wide matrix (a vocabulary head): kernels block columns far below this."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the probe found."""

    min_rows: int
    """Fewest rows per intra-op thread of any product."""
    max_threads: int
    """Most intra-op threads under which the bits stay."""

    def rows(self, needed: int, threads: int) -> int:
        """Rows to compute for ``needed`` ones: at least ``min_rows`` per thread, a multiple of 4, and no further."""
        return max(-(-needed // 4) * 4, self.min_rows * threads)


FAST = Numerics(min_rows=1, max_threads=1 << 16)
"""No promise and no padding."""


def probe_model(policy: PolicyModel, max_threads: int) -> Numerics | None:
    """`probe` on the products this model is made of."""
    heads = {(shape.key_size, shape.value_size) for shape in attention_shapes(policy).values()}
    return probe(linear_shapes(policy), heads, max_threads)


def probe(shapes: Iterable[tuple[int, int]], heads: Iterable[tuple[int, int]], max_threads: int) -> Numerics | None:
    """The weakest rule under which products of these shapes are exact, or None if there is none.

    shapes: (in, out) of linear layers. heads: (D of keys, D of values) of attention. Restores the thread count.
    """
    before = torch.get_num_threads()
    try:
        for threads in range(max_threads, 0, -1):
            for min_rows in CANDIDATES:
                if all(_linear_is_exact(i, min(o, _MAX_OUT), min_rows, threads) for i, o in set(shapes)) and all(
                    _attention_is_exact(d, dv, threads) for d, dv in set(heads)
                ):
                    return Numerics(min_rows=min_rows, max_threads=threads)
        return None
    finally:
        torch.set_num_threads(before)


def _row_counts(min_rows: int, threads: int) -> Sequence[int]:
    least = min_rows * threads
    counts = {least, least + 4, 2 * least, 2 * least + 4, 36, 64, 100, 128}
    return sorted(c for c in counts if least <= c < _REFERENCE_ROWS)


def _linear_is_exact(size_in: int, size_out: int, min_rows: int, max_threads: int) -> bool:
    generator = torch.Generator().manual_seed(size_in * 31 + size_out)
    weight = torch.randn(size_out, size_in, generator=generator)
    x = torch.randn(_REFERENCE_ROWS, size_in, generator=generator)
    torch.set_num_threads(1)
    reference = F.linear(x, weight)
    for threads in range(1, max_threads + 1):
        torch.set_num_threads(threads)
        for rows in _row_counts(min_rows, threads):
            for start in (0, _REFERENCE_ROWS - rows):
                if not torch.equal(F.linear(x[start : start + rows], weight), reference[start : start + rows]):
                    return False
    return True


def _attention_is_exact(key_size: int, value_size: int, max_threads: int) -> bool:
    generator = torch.Generator().manual_seed(key_size * 31 + value_size)
    q = torch.randn(12, 64, key_size, generator=generator)
    k = torch.randn(12, PAGE, key_size, generator=generator)
    v = torch.randn(12, PAGE, value_size + 1, generator=generator)

    def both(sequences: slice, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.bmm(q[sequences, rows].contiguous(), k[sequences].transpose(1, 2))
        return scores, torch.bmm(scores.exp(), v[sequences])

    torch.set_num_threads(1)
    reference = both(slice(None), slice(None))
    for threads in range(1, max_threads + 1):
        torch.set_num_threads(threads)
        for sequences in (slice(0, 1), slice(3, 6), slice(None)):
            for start, rows in ((0, MIN_ROWS), (1, 5), (8, 9), (0, 12), (16, 48), (0, 64)):
                part = slice(start, start + rows)
                for ours, theirs in zip(both(sequences, part), reference, strict=True):
                    if not torch.equal(ours, theirs[sequences, part]):
                        return False
    return True
