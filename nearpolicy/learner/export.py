"""Weights that ranks hold in pieces, as ordinary files: put together a few at a time, and written by rank 0.

The others only take part in putting together. If rank 0 cannot write, it goes on with that too, and says so at the
end: nobody is left waiting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nearpolicy.learner.ranks import Together
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.weights import bytes_of

FILE_BYTES = 2 << 30
"""Weights collected for one file of a model."""


def save_model(policy: PolicyModel, folder: Path, ranks: Together, *, file_bytes: int = FILE_BYTES) -> None:
    """An ordinary Hugging Face folder; rank 0 holds one file's weights and one layer's at a time. Whatever fails on
    rank 0 is raised there, after the last tensor."""
    files = _Files(policy, folder, file_bytes) if ranks.rank == 0 else None
    problem: Exception | None = None
    for _, members in groupby(policy.whole_weights(), key=lambda pair: _layer(pair[0])):
        together = {}
        for name, tensor in members:  # everywhere: it takes all ranks
            if files is not None and problem is None:
                together[name] = tensor.detach().cpu()
        try:
            if together:
                files.add(together)
        except Exception as error:
            problem = error
    if files is not None and problem is None:
        files.close()
    if problem is not None:
        raise problem


def _layer(name: str) -> str:
    """What weights of one layer have in common: the name up to its number."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


class _Files:
    """Writes ``model-0000K-of-0000N.safetensors`` and their index, or one ``model.safetensors``."""

    def __init__(self, policy: PolicyModel, folder: Path, file_bytes: int) -> None:
        self._policy = policy
        self._folder = folder
        self._file_bytes = file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._drafts: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Weights of one layer, under their names in memory."""
        named = self._policy.on_disk(weights)
        size = sum(tensor.nbytes for tensor in named.values())
        if self._waiting and sum(t.nbytes for t in self._waiting.values()) + size > self._file_bytes:
            self._write()
        self._waiting |= named
        self._total += size

    def close(self) -> None:
        """The last file, their names, and the index if there are several."""
        self._write()
        where, count = {}, len(self._drafts)
        for number, (draft, names) in enumerate(self._drafts, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            draft.rename(self._folder / name)
            where |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": where}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        self._policy.save_config(self._folder)

    def _write(self) -> None:
        draft = self._folder / f"model-{len(self._drafts)}.tmp"
        tensors = {name: tensor.contiguous() for name, tensor in self._waiting.items()}
        save_file(tensors, draft, metadata={"format": "pt"})
        self._drafts.append((draft, list(tensors)))
        self._waiting = {}


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_one_file(
    path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """A safetensors file of tensors that come one by one, in the order of ``layout``. The format: the length of the
    header, the header with each tensor's place, the bytes."""
    header, end = {}, 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for _, tensor in tensors:
            file.write(memoryview(bytes_of(tensor.detach().cpu().contiguous()).numpy()))
