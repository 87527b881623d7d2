"""How often generators get new weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from nearpolicy.settings import ConfigModel, PathText, Seconds

Transport = Literal["direct", "shared_memory", "broadcast", "files", "object_store", "device_handles"]
_ONLY_OF = {
    "path": ("files",),
    "delta": ("files",),
    "anchor_every": ("files",),
    "bucket_mb": ("broadcast", "device_handles"),
}
BLOCK_MB = 32.0


class SyncConfig(ConfigModel):
    """Section `sync`: weights on their way from learner to generators."""

    weight_sync_steps: PositiveInt = 1
    """Steps between publications; `weight_sync_steps - 1` may not exceed `queue.max_staleness`."""
    timeout_s: Seconds = 120.0
    """Bound on each phase of a publication: running sequences get so long to end, then the load gets so long again.
    A generator that has not shown the new weights after both gets no new request until it has; if none has, the run
    stops."""
    transport: Literal["auto", "direct", "shared_memory", "broadcast", "files", "object_store", "device_handles"] = (
        "auto"
    )
    """`direct`: learner and generator are one process. `shared_memory`: they are on one host. `broadcast`: a collective
    to all generators at once, which need as much memory again for what arrives. `files`: through a folder that all see.
    `object_store`: through Ray, which brings one copy to every node. `device_handles`: with `runtime.placement:
    colocated`, from rank to generator in the memory of the device that they share, two buckets at a time.
    `auto`: direct in one process, else device handles where places are GPUs that a rank and a generator share, else
    shared memory on one host, else broadcast."""
    path: PathText | None = None
    """With `files`: folder, or any fsspec path of an object store. A folder named like the run is made in it."""
    delta: bool | None = None
    """With `files`: write only what has changed since the version before, without loss; on unless set to false. Learner
    and generators keep a copy of the weights for it."""
    anchor_every: PositiveInt | None = None
    """With `files` and delta: of so many versions one is written whole; 16 unless set."""
    bucket_mb: Annotated[float, Field(ge=1.0, le=4096.0)] | None = None
    """With `broadcast`: most that is sent at once, and the memory for small tensors that are sent together, twice; 64
    unless set. With `device_handles`: what a rank hands over at once, in two such blocks that it keeps; 32 unless
    set."""
    adapters: Literal["merged", "adapter_only"] = "merged"
    """With `learner.lora`. `merged`: generators get all weights, the adapter in them. `adapter_only`: they get A and B
    and add them to the model they were loaded with, of whose changed matrices they keep a second copy: far fewer bytes
    to send, more memory. Either way they show the same weights."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for name, transports in _ONLY_OF.items():
            if getattr(self, name) is not None and self.transport not in transports:
                raise ValueError(
                    f"sync.{name} has no effect with sync.transport={self.transport}; set "
                    f"{' or '.join(f'sync.transport={each}' for each in transports)}, or leave sync.{name} out"
                )
        if self.transport == "files" and self.path is None:
            raise ValueError("sync.transport=files needs sync.path: a folder that learner and generators see")
        if self.anchor_every is not None and self.delta is False:
            raise ValueError("sync.anchor_every has no effect with sync.delta=false, where every version is whole")
        return self

    @property
    def block_mb(self) -> float:
        """With `device_handles`: of each of the two blocks that a rank keeps."""
        return self.bucket_mb or BLOCK_MB

    def transport_between(
        self, *, one_process: bool, one_host: bool, one_device: bool = False, on_gpus: bool = False
    ) -> Transport:
        """What is used by a learner and generators that are placed so. ``one_device``: each generator shares one with a
        rank of the learner; ``on_gpus``: that is a GPU. `ValueError` if it cannot work there."""
        if self.transport == "auto" and one_device and on_gpus and not one_process:
            return "device_handles"
        if self.transport == "auto":
            return "direct" if one_process else "shared_memory" if one_host else "broadcast"
        if self.transport == "direct" and not one_process:
            raise ValueError("sync.transport=direct needs learner and generator in one process; use auto")
        if self.transport != "direct" and one_process:
            raise ValueError(
                f"sync.transport={self.transport} has no effect where learner and generator are one process; use auto"
            )
        if self.transport == "shared_memory" and not one_host:
            raise ValueError("sync.transport=shared_memory needs learner and generators on one host; use auto")
        if self.transport == "device_handles" and not one_device:
            raise ValueError(
                "sync.transport=device_handles needs a rank of the learner on the device of each generator; set "
                "runtime.placement: colocated, or use auto"
            )
        return self.transport
