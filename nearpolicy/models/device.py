"""The one place that picks the device of engine and learner, and what moves tensors between processes."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

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


def identity(device: torch.device) -> str:
    """What two processes that compute on one device have in common. Of a GPU its UUID: numbers depend on what a process
    may see (`CUDA_VISIBLE_DEVICES`). Of the CPU the machine. Only the latter has been run."""
    if device.type == "cuda":
        return f"{device.type} {torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type} of {platform.node()}"


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was told, so that another process may be told of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextlib.contextmanager
def allocations_of_their_own() -> Iterator[None]:
    """Memory that is asked for inside is what another process can open by a CUDA IPC handle.

    With `expandable_segments:True` torch 2.13 makes segments of pieces whose handles are file descriptors, which the
    other process takes out of this one (`pidfd_getfd`): not allowed in many containers. Turned off for a moment, its
    allocator passes those segments over and asks CUDA for new memory (`get_free_block` in CUDACachingAllocator.cpp).
    The settings are given again as a whole, since torch resets what is not named."""
    before = torch._C._accelerator_getAllocatorSettings()
    expands = "expandable_segments:true" in before.lower().replace(" ", "")
    if expands:
        torch._C._accelerator_setAllocatorSettings(f"{before},expandable_segments:False")
    try:
        yield
    finally:
        if expands:
            torch._C._accelerator_setAllocatorSettings(before)
