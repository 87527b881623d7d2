"""AdamW over float32 master weights, with clipping by global norm.

The gradient of an update is a sum over its parts, divided once at the end: what it is divided by adds up beside it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nearpolicy.learner.config import LearnerConfig


class MasterAdamW:
    """The optimizer of a model. Low-precision models keep a float32 copy here: it would round small updates away."""

    def __init__(self, model: torch.nn.Module, config: LearnerConfig) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else _master(p) for p in self._parameters]
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
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self.divisor and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.divisor)
        self.divisor = 0.0

    @torch.no_grad()
    def step(self, rate: float, max_norm: float | None) -> float:
        """Normalise, clip to ``max_norm``, apply at this learning rate and clear the gradient; returns the norm before
        clipping. A gradient that is not finite is not applied."""
        self.normalise()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        gradients = [m.grad for m in self._masters if m.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if math.isfinite(norm):
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._masters, max_norm, torch.tensor(norm))
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Throw away what has been added up."""
        self.divisor = 0.0
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        masters = [m for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        return {"adamw": self._adamw.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        own = [m for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        for mine, saved in zip(own, state["masters"], strict=True):
            mine.copy_(saved)


def _master(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.detach().float().clone().requires_grad_(True)
