"""What lies in a model's folder, and whether its weights can be read a piece at a time. Loads no torch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Those that transformers would read, in its order; empty where there are none of this format."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if not (folder / INDEX).is_file():
        return []
    return [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]


def why_whole(folder: Path) -> str | None:
    """What keeps the weights of a folder from being read in pieces, and what to do about it."""
    if not (folder / ONE_FILE).is_file() and not (folder / INDEX).is_file():
        return f"it has neither {ONE_FILE} nor {INDEX}; save it again in that format"
    if (folder / "adapter_config.json").is_file():
        return "an adapter lies beside its weights, which has to be merged; save the merged model"
    with contextlib.suppress(OSError, ValueError):  # said by whoever loads it
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key in ("quantization_config", "transformers_weights"):
            if isinstance(config, dict) and config.get(key) is not None:
                return f"its config.json has `{key}`; save it again with plain weights"
    return None
