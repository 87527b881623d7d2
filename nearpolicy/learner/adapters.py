"""An adapter as a folder of PEFT's: what `peft.PeftModel.from_pretrained(base, folder)` puts on the base model."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.targets import is_named, last_names

FOLDER = "adapter"
"""Inside a checkpoint. Not beside its weights, which contain the adapter: transformers would find it there and apply it
once more."""


def save_adapter(policy: LoraPolicy, folder: Path) -> None:
    """Write ``adapter_config.json``, by the installed PEFT itself, and ``adapter_model.safetensors``."""
    from peft import LoraConfig  # most of a second

    folder.mkdir()
    config = LoraConfig(
        r=policy.rank,
        lora_alpha=policy.alpha,
        target_modules=_targets(policy),
        task_type="CAUSAL_LM",
        base_model_name_or_path=policy.model.name_or_path,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    tensors = {f"base_model.model.{name}.weight": factor.contiguous() for name, factor in policy.factors().items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _targets(policy: LoraPolicy) -> list[str]:
    """Last names if they mean the layers that have an adapter and no other module, else whole names."""
    layers = policy.layers
    short = last_names(layers)
    meant = {name for name, _ in policy.model.named_modules() if any(is_named(name, last) for last in short)}
    return short if meant == set(layers) else sorted(layers)
