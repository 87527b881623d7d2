"""A model in pieces (FSDP2): which module goes with which, when gradients are added up, when weights are whole.

    forward    the pieces of a layer are gathered, used and dropped; those of the root stay until the backward pass
    backward   gathered again; gradients are added over the ranks by the last micro-batch of an update

A gradient is a *sum* over ranks, never a mean: what it is divided by adds up beside it, over all ranks, too.

Some parameters are not cut: factors of an adapter (a layer is merged out of whole ones, and they are small), scalars,
which cannot be, and those of another type than most. Each rank holds all of them, and their gradients are added by
`Sharding.settle`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nearpolicy.errors import ConfigError
from nearpolicy.learner.filling import fill_from_files
from nearpolicy.models.lora import is_factor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sharding:
    """Of a model that is whole: there is nothing to do."""

    def begin(self, *, last: bool) -> None:
        """Before a micro-batch. ``last``: of those whose gradients make an update."""

    def settle(self) -> None:
        """After the last micro-batch: the gradient is the sum over all ranks."""

    def forget(self) -> None:
        """The gradient, and what of it has not been added up yet."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in host memory, in pieces where the model is; its values are still to come."""
        return torch.empty(*shape, dtype=dtype)


class FullySharded(Sharding):
    """Of a root module whose pieces lie on a mesh, (replicas x) shards."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, rank: int, offload: bool) -> None:
        """``model``: with its weights, or with the ``files`` that this rank reads its pieces from. ``offload``: pieces,
        their gradients and their moments lie in host memory. Gradients are then added up by every micro-batch, so that
        no rank ever holds whole ones."""
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        self._model = model
        self._mesh = mesh
        self._rank = rank
        self._every_time = offload
        self._replicated = _replicated(model)
        on_accelerator = mesh.device_type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=on_accelerator) if offload else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": policy,
            "ignored_params": set(self._replicated),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=_sum_dtype(model)),
        }
        for layer in _layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for module in _cut_modules(model):  # a plain sum, in an operation that gloo has too
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # An expert that no token of one rank has gone to has no gradient there, and has one elsewhere.
            module.set_reduce_scatter_unused_params(True, recurse=False)
        for method in ("states", "within"):
            if hasattr(model, method):
                register_fsdp_forward_method(model, method)
        if model.files is not None:
            self._fill(model, on_host=offload)
        self._open = False
        """Whether gradients of this rank alone are there."""
        self._settled = False
        """Whether gradients of uncut parameters are sums over ranks."""

    def _fill(self, model: nn.Module, *, on_host: bool) -> None:
        """The weights of a model that has none yet."""
        device = torch.device("cpu") if on_host else model.files.device
        fill_from_files(model, model.files, pieces_on=device)
        model.files = None
        for parameter in _cut_parameters(model):  # what FSDP2 would find out in the first forward pass
            parameter.reset_sharded_param()
        self._replicated = _replicated(model)

    def begin(self, *, last: bool) -> None:
        self._model.set_requires_gradient_sync(last or self._every_time)
        if self._settled and self._rank:  # what has been added up counts once
            for parameter in self._replicated:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self._settled, self._open = False, True

    def settle(self) -> None:
        if not self._open:
            return
        gradients = [p.grad for p in self._replicated if p.grad is not None]
        for dtype in sorted({g.dtype for g in gradients}, key=str):
            _add_up([g for g in gradients if g.dtype == dtype])
        self._settled, self._open = True, False

    def forget(self) -> None:
        if self._open:
            self._model.reset_iter_state()
            for parameter in _cut_parameters(self._model):  # torch 2.13 says that it forgets these too, and does not
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        self._settled = self._open = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        whole = torch.empty(*shape, dtype=dtype, device="meta")
        placements = [Replicate()] * (self._mesh.ndim - 1) + [Shard(0)]
        own, _ = compute_local_shape_and_global_offset(whole.shape, self._mesh, placements)
        piece, stride = torch.empty(own, dtype=dtype), whole.stride()
        return DTensor.from_local(piece, self._mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def _add_up(gradients: list[torch.Tensor]) -> None:
    import torch.distributed as dist

    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _sum_dtype(model: nn.Module) -> torch.dtype | None:
    """Gradients of narrow types are added up in float32, over micro-batches and ranks."""
    return torch.float32 if _usual_dtype(model).itemsize < 4 else None


def _usual_dtype(model: nn.Module) -> torch.dtype:
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0]


def _replicated(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that every rank holds whole, in the order of the model."""
    usual = _usual_dtype(model)
    return [p for name, p in model.named_parameters() if is_factor(name) or p.dim() == 0 or p.dtype != usual]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder's layers: what transformers can checkpoint one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    yield from [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _cut_modules(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _cut_parameters(model: nn.Module) -> Iterator[Any]:
    """As FSDP2 keeps them, for what it does by itself at other times."""
    for module in _cut_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params


def require_offload_has_effect(offload: str, device: torch.device) -> None:
    """`ConfigError` if there is no other memory than the host's."""
    if offload != "none" and device.type == "cpu":
        raise ConfigError(
            f"learner.offload={offload} moves what is not used into host memory, and the learner computes on the "
            "CPU; leave it out"
        )


def at_rest(model: nn.Module) -> None:
    """After forward passes without a backward pass: drop what the root has gathered, which the next update would not
    change."""
    if (reshard := getattr(_root(model), "reshard", None)) is not None:
        reshard()


def with_whole_head(model: nn.Module) -> None:
    """From now until `at_rest` the root's own weights, the head among them, are whole. No communication where they are
    so already."""
    if (unshard := getattr(_root(model), "unshard", None)) is not None:
        unshard()


def _root(model: nn.Module) -> nn.Module:
    return getattr(model, "root", model)
