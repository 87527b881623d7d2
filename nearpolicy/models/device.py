"""The one place that picks the device of engine and learner."""

from __future__ import annotations

import torch


def pick_device() -> torch.device:
    """The first accelerator torch can use, else the CPU.

    Exact numerics exist on the CPU only, and so do this project's tests: no run on an accelerator has been exercised.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")
