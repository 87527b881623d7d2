"""How often generators get new weights."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from nearpolicy.settings import ConfigModel, Seconds


class SyncConfig(ConfigModel):
    """Section `sync`: weights on their way from learner to generators."""

    weight_sync_steps: PositiveInt = 1
    """Steps between publications; `weight_sync_steps - 1` may not exceed `queue.max_staleness`."""
    timeout_s: Seconds = 120.0
    """Bound on each phase of a publication: running sequences get so long to end, then the load gets so long again.
    A generator that has not shown the new weights after both stops the run."""
    adapters: Literal["merged", "adapter_only"] = "merged"
    """With `learner.lora`. `merged`: generators get all weights, the adapter in them. `adapter_only`: they get A and B
    and add them to the model they were loaded with, of whose changed matrices they keep a second copy: far fewer bytes
    to send, more memory. Either way they show the same weights."""
