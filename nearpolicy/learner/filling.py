"""A model that was cut before it had weights gets them: each rank its own pieces, out of the files, one after another.

At no time does a rank hold more than its pieces and what it reads of one tensor; of experts that are put together out
of several, that a few times over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nearpolicy.models.files import WeightFiles
from nearpolicy.models.pieces import in_pieces, local, piece

Rows = Callable[..., Tensor]
"""name, begin, end -> rows of a tensor; all of it without the last two (`nearpolicy.models.files.WeightFiles.rows`)."""


@torch.no_grad()
def fill_from_files(root: nn.Module, files: WeightFiles, *, pieces_on: torch.device) -> None:
    """Memory and values for everything in ``root`` that has none. ``pieces_on``: where what is cut lies; the rest lies
    where the model computes. `ModelError` if something cannot be read."""
    inside = {id(module) for module in root.modules()}  # the head of a model that became a critic is not
    holders: defaultdict[nn.Parameter, list[tuple[nn.Module, str, str]]] = defaultdict(list)
    for where, module in files.model.named_modules():
        if id(module) not in inside:
            continue
        for last, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                holders[parameter].append((module, last, f"{where}.{last}".lstrip(".")))
        for last, buffer in module._buffers.items():
            if (name := f"{where}.{last}".lstrip(".")) in files:
                buffer.copy_(files.rows(name))
    for parameter, places in holders.items():
        filled = _with_memory(parameter, pieces_on if in_pieces(parameter) else files.device)
        fill_rows(filled, places[0][2], files.rows)
        for module, last, _ in places:  # of tied weights there are several
            setattr(module, last, filled)
    files.close()


@torch.no_grad()
def fill_rows(own: Tensor, name: str, rows: Rows) -> None:
    """What this rank holds of a tensor, read from where it is called ``name``."""
    begin, memory = piece(own).start, local(own)
    memory.copy_(rows(name, begin[0], begin[0] + len(memory)) if begin else rows(name))


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    memory: Tensor = torch.empty(local(parameter).shape, dtype=parameter.dtype, device=device)
    if in_pieces(parameter):
        from torch.distributed.tensor import DTensor

        # As FSDP2 makes it: `from_local` would move it to where the mesh computes.
        memory = DTensor(memory, parameter._spec, requires_grad=False)
    return nn.Parameter(memory, requires_grad=parameter.requires_grad)
