"""How hard the run's record is pressed onto the disk."""

from __future__ import annotations

import re
from typing import Literal

from nearpolicy.settings import ConfigModel

RUN_NAME = re.compile(r"[\w+-][\w.+-]*")
LONGEST_RUN_NAME = 200
RUN_NAME_RULE = f"use letters, digits, '-', '_', '+', '.', not '.' first, {LONGEST_RUN_NAME} bytes (it names a folder)"
"""What a run may be called."""


class StoreConfig(ConfigModel):
    """Section `store`: the SQLite record of a run."""

    sync: Literal["normal", "full"] = "normal"
    """`normal`: nothing committed is lost when a process is killed; a power failure may cost the last 100 ms.
    `full`: not even those, and each commit waits for the disk."""
