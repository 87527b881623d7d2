"""Which layers a list of target modules means; the rule of PEFT, without torch."""

from __future__ import annotations

from collections.abc import Iterable

ALL_LINEAR = "all-linear"
"""Every linear layer but the output head."""


def is_named(module: str, name: str) -> bool:
    """Whether ``name`` means this module: it is its whole name or the end of it, dot by dot.

    ``q_proj`` and ``self_attn.q_proj`` mean ``model.layers.0.self_attn.q_proj``; ``proj`` does not.
    """
    return module == name or module.endswith(f".{name}")


def last_names(modules: Iterable[str]) -> list[str]:
    """What modules are called inside their parents, each name once."""
    return sorted({module.rpartition(".")[2] for module in modules})
