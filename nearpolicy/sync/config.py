"""How often generators get new weights."""

from __future__ import annotations

from pydantic import PositiveInt

from nearpolicy.settings import ConfigModel, Seconds


class SyncConfig(ConfigModel):
    """Section `sync`: weights on their way from learner to generators."""

    weight_sync_steps: PositiveInt = 1
    """Steps between publications; `weight_sync_steps - 1` may not exceed `queue.max_staleness`."""
    timeout_s: Seconds = 120.0
    """Bound on each phase of a publication: running sequences get so long to end, then the load gets so long again.
    A generator that has not shown the new weights after both stops the run."""
