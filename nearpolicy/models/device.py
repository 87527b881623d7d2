"""The one place that picks the device of engine and learner, and what moves tensors between processes."""

from __future__ import annotations

import torch


def pick_device() -> torch.device:
    """The first accelerator torch can use, else the CPU.

    Exact numerics exist on the CPU only, and so do this project's tests: no run on an accelerator has been exercised.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def pick_backend(device: torch.device) -> str:
    """What carries collective operations: gloo between CPUs; between CUDA devices nccl, with gloo beside it for what
    lies in host memory.

    Only gloo has been run: there is no CUDA device where this project is developed.
    """
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
