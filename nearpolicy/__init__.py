"""Nearpolicy: asynchronous RL post-training of language models that you can trust and take apart.

Importing this module loads nothing heavy; names are resolved when they are first used.
"""

from __future__ import annotations

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "Trainer":
        from nearpolicy.launch.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'nearpolicy' has no attribute {name!r}")
