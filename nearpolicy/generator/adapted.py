"""Weights that arrive as an adapter alone: the engine adds it to the model that it was loaded with.

    sent: A, B  ->  held as sent?  ->  base + scaling * B A, in place of the last one  ->  the digests of all weights

Promise: whatever was applied before, the result is the base plus this adapter, once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nearpolicy.errors import SyncError
from nearpolicy.models.lora import merged
from nearpolicy.models.weights import digest, named_weights, require_held
from nearpolicy.roles import Adapter


class AdaptedModel:
    """A plain model that gets adapters one after another.

    Every result is made anew from a copy of the base, which is kept from when the first one comes: nothing is ever
    taken away again, so nothing drifts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._base: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return sum(tensor.nbytes for tensor in self._base.values())

    @torch.no_grad()
    def apply(self, adapter: Adapter, version: int) -> None:
        """Base plus adapter, exactly once. `SyncError` if it arrives otherwise than it was sent, or does not fit."""
        weights = named_weights(self._model)
        for name, (a, b) in adapter.factors.items():
            sent = dict(zip(("A", "B"), adapter.digests[name], strict=True))
            require_held(f"the adapter that arrived for {name!r}", version, sent, {"A": digest(a), "B": digest(b)})
            if name not in weights or weights[name].shape != (len(b), a.shape[1]):
                here = list(weights[name].shape) if name in weights else "nothing"
                raise SyncError(
                    f"an adapter for {name!r} [{len(b)}, {a.shape[1]}] does not fit what is here: {here}; load the "
                    "generator with the model that the run began with"
                )
        self._base = self._base or {name: weights[name].clone() for name in adapter.factors}
        for name, (a, b) in adapter.factors.items():
            weights[name].copy_(merged(self._base[name], a, b, adapter.scaling))
