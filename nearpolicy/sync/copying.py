"""Many tensors copied by several cores at once.

Threads of one interpreter hold each other up wherever they run Python: all of that is done before they begin, so that
what is left for them is one call per block, which lets the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor

from nearpolicy.models.weights import bytes_of

_BLOCK = 4 << 20
"""Bytes that one core copies before it takes the next piece of work."""

Block = tuple[np.ndarray, np.ndarray] | tuple[Tensor, Tensor]
"""Where to, where from."""


def blocks_of(target: Tensor, source: Tensor) -> list[Block]:
    """A copy in pieces that cores can take in turn."""
    if not (target.is_contiguous() and source.is_contiguous()):
        return [(target, source)]
    on_cpu = target.device.type == source.device.type == "cpu"
    if on_cpu and target.dtype == source.dtype:  # numpy: torch would begin a pool of more threads in each thread
        there, here = bytes_of(target).numpy(), bytes_of(source).numpy()
        if there.size <= _BLOCK:
            return [(there, here)]
        return [(there[at : at + _BLOCK], here[at : at + _BLOCK]) for at in range(0, there.size, _BLOCK)]
    size = _BLOCK // target.element_size()
    return list(zip(target.view(-1).split(size), source.view(-1).split(size), strict=True))


def copy_blocks(blocks: Iterable[Block], threads: int) -> None:
    """The caller is one of the threads."""
    left = deque(blocks)

    def work() -> None:
        while True:
            try:
                target, source = left.popleft()
            except IndexError:
                return
            if type(target) is np.ndarray:
                np.copyto(target, source)
            else:
                target.copy_(source)

    if threads <= 1:
        work()
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="weights") as cores:
        others = [cores.submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            other.result()
