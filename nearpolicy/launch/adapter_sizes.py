"""How large an adapter is, worked out from the recipe and the names and shapes of a model's matrices, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearpolicy.models.targets import ALL_LINEAR, is_named, last_names

if TYPE_CHECKING:
    from nearpolicy.launch.sizes import ModelShape
    from nearpolicy.learner.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Counts of numbers."""

    layers: int
    trained: int
    """In A and B of all layers: rank * (in + out) each."""
    changed: int
    """In the matrices that they change."""


def adapter_size(lora: LoraConfig, shape: ModelShape) -> AdapterSize:
    """Nothing for names that the shape does not hold."""
    chosen = [
        size
        for name, size in shape.matrices.items()
        if any(_means(target, name, size, shape.vocabulary) for target in lora.target_modules)
    ]
    return AdapterSize(
        layers=len(chosen),
        trained=sum(lora.rank * (out + into) for out, into in chosen),
        changed=sum(out * into for out, into in chosen),
    )


def unknown_targets(lora: LoraConfig, shape: ModelShape) -> str | None:
    """A sentence if the model's files have no matrix of such a name; None too where only the model itself can tell."""
    names = [target for target in lora.target_modules if target != ALL_LINEAR]
    missing = [target for target in names if not any(is_named(name, target) for name in shape.matrices)]
    if not missing or not shape.names_from_file:
        return None
    return (
        f"learner.lora.target_modules: the model has no matrix `{'`, `'.join(missing)}`; it has "
        f"{', '.join(last_names(shape.matrices))}"
    )


def llama_matrices(
    *, hidden: int, intermediate: int, layers: int, query_width: int, kv_width: int, mixture: bool
) -> Mapping[str, tuple[int, int]]:
    """Module name -> (out, in) of the linear layers of a Llama; the experts of a mixture are none."""
    attention = {
        "q_proj": (query_width, hidden),
        "k_proj": (kv_width // 2, hidden),
        "v_proj": (kv_width - kv_width // 2, hidden),
        "o_proj": (hidden, query_width),
    }
    mlp = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate)}
    parts = {"self_attn": attention, "mlp": {} if mixture else mlp}
    return {
        f"model.layers.{i}.{part}.{name}": size
        for i in range(layers)
        for part, matrices in parts.items()
        for name, size in matrices.items()
    }


def _means(target: str, name: str, size: tuple[int, int], vocabulary: int) -> bool:
    """Matrices with a row per word are the embedding and the output head."""
    return size[0] != vocabulary if target == ALL_LINEAR else is_named(name, target)
