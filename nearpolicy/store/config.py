"""How hard the run's record is pressed onto the disk, and how long all of it stays in the database."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import NonNegativeInt, model_validator

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
    retention: Literal["keep", "parquet", "drop"] = "keep"
    """What becomes of the tokens, log-probabilities and advantages of groups that ended `retention_steps` ago and that
    no resume can ask for again, as their step is in every checkpoint that is kept. `keep`: they stay in the database.
    `parquet`: moved to `payloads/` in the run folder, from where every tool reads them. `drop`: gone; texts, rewards,
    verdicts, fates and metrics stay, but the run cannot be replayed."""
    retention_steps: NonNegativeInt | None = None
    """Steps that payloads stay in the database at least; for `parquet` and `drop`."""

    @model_validator(mode="after")
    def _steps_go_with_a_retention(self) -> Self:
        if self.retention == "keep" and self.retention_steps is not None:
            raise ValueError(
                f"store.retention_steps={self.retention_steps} has no effect with store.retention: keep; leave it out, "
                "or set store.retention to parquet or drop"
            )
        if self.retention != "keep" and self.retention_steps is None:
            raise ValueError(
                f"store.retention: {self.retention} needs store.retention_steps: for how many steps payloads stay in "
                "the database"
            )
        return self
