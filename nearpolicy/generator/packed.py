"""A second form of the engine's weights, for products that are faster and less exact (`generator.weights`).

    learner's tensors -> float32 memory of the modules -> digests shown and compared -> packed copies -> products

What is proved: that the float32 memory which the copies are made of has the digests the learner sent. What is not: the
copies themselves, which are made from that memory right behind, and whose bytes have no counterpart at the learner.
The embedding, norms, biases and whatever is no `nn.Linear` (stacked experts) compute from the float32 memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nearpolicy.errors import ConfigError
from nearpolicy.generator.config import NO_BFLOAT16
from nearpolicy.machine import bfloat16_products

_ROWS = 64
"""The number of rows the layout is chosen for; others are right as well."""


class BFloat16Weights:
    """Has every linear layer of a model compute from a packed bfloat16 copy of its weight."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._copies: list[Tensor] = []
        self.num_bytes = sum(2 * layer.weight.numel() for layer in self._layers)
        self.pack()
        for place, layer in enumerate(self._layers):
            layer.forward = self._forward_of(place, layer)

    @torch.inference_mode()
    def pack(self) -> None:
        """Make the copies from the weights of now; the old ones are given up one by one."""
        self._copies = self._copies or [torch.empty(0)] * len(self._layers)
        for place, layer in enumerate(self._layers):
            self._copies[place] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.bfloat16(), _ROWS)

    def _forward_of(self, place: int, layer: nn.Linear):
        copies, product = self._copies, torch.ops.mkldnn._linear_pointwise

        def forward(x: Tensor) -> Tensor:
            out = product(x.bfloat16(), copies[place], None, "none", [], "").to(x.dtype)
            return out if layer.bias is None else out.add_(layer.bias)

        return forward


def packed_weights(kind: str, model: nn.Module, *, has_products: bool | None = None) -> BFloat16Weights | None:
    """What `generator.weights` says; `ConfigError` where it would be slower than float32."""
    if kind == "same":
        return None
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ConfigError(f"generator.weights={kind} is made for a CPU and the model is on {device.type}; leave it out")
    if not (bfloat16_products() if has_products is None else has_products):
        raise ConfigError(NO_BFLOAT16)
    return BFloat16Weights(model)
