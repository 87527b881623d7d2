"""AdamW over float32 master weights, with clipping by global norm.

The gradient of an update is a sum over its parts, divided once at the end: what it is divided by adds up beside it.
Of a model in pieces each rank updates its own, and moments and masters lie in the same pieces.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nearpolicy.learner.config import LearnerConfig
from nearpolicy.models.pieces import in_pieces, joined, local, part_of


class MasterAdamW:
    """The optimizer of a model. Low-precision models keep a float32 copy here: it would round small updates away."""

    def __init__(self, model: torch.nn.Module, config: LearnerConfig) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [_master(p) for p in self._parameters]
        self._away = config.offload == "optimizer"
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.divisor = 0.0
        """Of the gradient that has been added up; 0 where it is divided already."""

    def normalise(self) -> None:
        """Divide the gradient that has been added up by its divisor."""
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        if self.divisor and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.divisor)
        self.divisor = 0.0

    @torch.no_grad()
    def step(self, rate: float, max_norm: float | None) -> float:
        """Normalise, clip to ``max_norm``, apply at this learning rate and clear the gradient; returns the norm before
        clipping. A gradient that is not finite is not applied."""
        self.normalise()
        for parameter, master in self._pairs():
            if master is not parameter and parameter.grad is not None:
                if _shared(parameter):
                    master.data = local(parameter)  # FSDP2 may have moved it
                master.grad = local(parameter.grad).to(master.dtype)
        norm = self._norm()
        if math.isfinite(norm):
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._masters, max_norm, torch.tensor(norm))
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._move(here=True)
            self._adamw.step()
            self._move(here=False)
            for parameter, master in self._pairs():
                if master is not parameter and not _shared(parameter):
                    local(parameter).copy_(master)
        self.zero_grad()
        return norm

    def _norm(self) -> float:
        """Of the whole gradient, the same on every rank."""
        gradients = [m.grad for m in self._masters if m.grad is not None]
        cut = {id(m): _cut(p) for p, m in self._pairs()}
        meshes = [mesh for mesh in cut.values() if mesh is not None]
        if not meshes:
            return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        norms = torch.stack([m.grad.norm(dtype=torch.float64) for m in self._masters if m.grad is not None])
        mine = torch.tensor([cut[id(m)] is not None for m in self._masters if m.grad is not None], device=norms.device)
        squares = norms.square()
        here, everywhere = squares[mine].sum(), squares[~mine].sum()
        mesh, dim = meshes[0]
        torch.distributed.all_reduce(here, group=mesh.get_group(dim))
        return float((here + everywhere).sqrt())

    def zero_grad(self) -> None:
        """Throw away what has been added up."""
        self.divisor = 0.0
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """In the pieces that the model is in."""
        adamw = self._adamw.state_dict()
        moments = {i: _mapped(own, joined, self._parameters[i]) for i, own in adamw["state"].items()}
        return {
            "adamw": adamw | {"state": moments},
            "masters": [joined(m, p) for p, m in self._pairs() if m is not p and not _shared(p)],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a state that is whole, or in the model's own pieces."""
        adamw = state["adamw"]
        moments = {i: _mapped(saved, part_of, self._parameters[i]) for i, saved in adamw["state"].items()}
        self._adamw.load_state_dict(adamw | {"state": moments})
        self._move(here=False)
        own = [(p, m) for p, m in self._pairs() if m is not p and not _shared(p)]
        for (parameter, mine), saved in zip(own, state["masters"], strict=True):
            mine.copy_(part_of(saved, parameter))

    def _pairs(self) -> list[tuple[torch.nn.Parameter, Tensor]]:
        return list(zip(self._parameters, self._masters, strict=True))

    def _move(self, *, here: bool) -> None:
        """With `learner.offload: optimizer` the moments lie in host memory but while they are used."""
        if not self._away:
            return
        for master, moments in self._adamw.state.items():
            for name, value in moments.items():
                if value.dim():
                    moments[name] = value.to(master.device if here else "cpu")


def _master(parameter: torch.nn.Parameter) -> Tensor:
    """What AdamW changes: the parameter, its piece here, or a float32 copy of that."""
    if parameter.dtype == torch.float32 and not in_pieces(parameter):
        return parameter
    own = local(parameter).detach()
    return (own if _shared(parameter) else own.float().clone()).requires_grad_(True)


def _shared(parameter: Tensor) -> bool:
    """Whether its master is the memory of its piece."""
    return in_pieces(parameter) and parameter.dtype == torch.float32


def _cut(parameter: Tensor) -> tuple[Any, int] | None:
    """(mesh, dimension of it) over which the pieces are spread; None where each rank has the whole."""
    if not in_pieces(parameter):
        return None
    mesh = parameter.device_mesh
    return next(((mesh, i) for i, p in enumerate(parameter.placements) if p.is_shard() and mesh.size(i) > 1), None)


def _mapped(moments: dict[str, Any], change: Any, like: Tensor) -> dict[str, Any]:
    """The moments of one parameter, those of its shape changed by ``change(values, like)``."""
    return {name: change(v, like) if isinstance(v, Tensor) and v.dim() == like.dim() and v.dim() else v
            for name, v in moments.items()}  # fmt: skip
