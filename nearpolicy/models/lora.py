"""Low-rank adapters (LoRA, arXiv 2106.09685): W = W0 + alpha / rank * B A takes the place of W0; only A and B learn.

    forward    y = x W^T            W is made anew in every pass and dropped after its product
    backward   dA = s (g B)^T x     dB = s g^T (x A^T)     dx = g W0 + s (g B) A          s = alpha / rank

Promises. W0 is never written to, so no cycle of publications or checkpoints can make it drift. What is published, what
is saved and what every product is made with are the bits of one function, `merged`: engine and learner agree as they do
without an adapter. The gradient is that of the usual path W0 x + s B (A x), to which the forward pass is equal in exact
arithmetic, and costs what it costs there: no gradient of a whole matrix is ever made.

PEFT's layers would be the usual choice. They add s B (A x) to W0 x, which an engine that holds one matrix cannot
reproduce: on SmolLM2-135M (rank 16, all linear layers, 512 tokens) they are up to 2.5e-5 nats away from it, these
layers 0; and they rename every weight. So PEFT's part here is its files, which `nearpolicy.learner.adapters` writes.
Seconds of one thread for a forward and backward pass there, by packed tokens:

    tokens   all weights   PEFT's layers   these   with a merged copy beside W0 (405 MB)   autograd through the merged
       136           1.9             1.2     1.4                                     1.2
       816           7.6             6.0     6.2                                     6.4                           8.2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nearpolicy.errors import ModelError
from nearpolicy.models.files import WeightFiles
from nearpolicy.models.pieces import part_of, piece, whole
from nearpolicy.models.policy import PolicyModel, Scores
from nearpolicy.models.targets import ALL_LINEAR, is_named, last_names
from nearpolicy.models.weights import digest, fingerprint, named_weights
from nearpolicy.roles import Adapter, Shard

NAMES_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""What PEFT (0.21), in whose format adapters are saved, takes for the experts of a mixture, also where a dense layer is
called so: it would load such an adapter into the wrong place."""


@torch.no_grad()
def merged(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """[out, in] base + scaling * b @ a, in the numbers of a and b, rounded once to those of the base.

    base [out, in], a [rank, in], b [out, rank]. On one thread, because the bits of a product may depend on how many
    there are, and engine and learner have different numbers of them; with two threads it takes no longer, since it
    waits for memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return torch.addmm(base.to(a.dtype), b, a, alpha=scaling).to(base.dtype)
    finally:
        torch.set_num_threads(before)


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. ``weight`` is the base, and stays what it was."""

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        scaling: float,
        switch: Switch,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> None:
        """``device``: of the adapter, if the base has no memory yet."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        # A as in PEFT (and as torch begins a linear layer), B zero: the adapter begins as no change.
        bound = 1.0 / math.sqrt(self.in_features)
        start = torch.empty(rank, self.in_features).uniform_(-bound, bound, generator=generator)
        where = {"dtype": torch.promote_types(self.weight.dtype, torch.float32), "device": device or self.weight.device}
        self.lora_A = nn.Parameter(start.to(**where))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, **where))
        self.scaling = scaling
        self._switch = switch

    def merged(self) -> Tensor:
        """[out, in] what the layer computes with. The whole of it, also where ranks hold the base in pieces: the bits
        of a product of some rows may be others."""
        return merged(whole(self.weight), self.lora_A, self.lora_B, self.scaling)

    def forward(self, x: Tensor) -> Tensor:
        if not self._switch.on:
            return F.linear(x, self.weight, self.bias)
        return _MergedProduct.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scaling)


class _MergedProduct(torch.autograd.Function):
    """x [..., in] -> [..., out]; what it keeps for the backward pass is x, which is there anyway."""

    @staticmethod
    def forward(ctx, x, base, bias, a, b, scaling):
        ctx.save_for_backward(x, base, a, b)
        ctx.scaling = scaling
        return F.linear(x, merged(base, a, b, scaling), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, base, a, b = ctx.saved_tensors
        g, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        narrow_a, narrow_b = a.to(g.dtype), b.to(g.dtype)
        through_b = (g @ narrow_b).mul_(ctx.scaling)  # [rows, rank]
        of_x = of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_x = torch.addmm(g @ base, through_b, narrow_a).view_as(x)
        if ctx.needs_input_grad[3]:
            of_a = (through_b.t() @ rows).to(a.dtype)
        if ctx.needs_input_grad[4]:
            of_b = (g.t() @ (rows @ narrow_a.t())).mul_(ctx.scaling).to(b.dtype)
        return of_x, None, None, of_a, of_b, None


class Switch:
    """Whether the layers of one policy use their adapters."""

    on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class LoraPolicy(PolicyModel):
    """A policy of which only low-rank adapters are trained. Takes the model over and puts its layers in."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        alpha: float,
        target_modules: Iterable[str],
        seed: int = 0,
        files: WeightFiles | None = None,
    ) -> None:
        """``seed`` decides where A begins. ``files``: of a model that has no weights yet. `ModelError` for targets that
        cannot have an adapter."""
        chosen = target_layers(model, target_modules, rank)
        super().__init__(model, files)
        self.rank, self.alpha = rank, alpha
        self.switch = Switch()
        generator = torch.Generator().manual_seed(seed)
        model.requires_grad_(False)
        for name, layer in chosen.items():
            with_adapter = LoraLinear(layer, rank, alpha / rank, self.switch, generator, self.device)
            model.set_submodule(name, with_adapter)

    @property
    def layers(self) -> dict[str, LoraLinear]:
        """Module name -> layer, in the order of the model."""
        return {name: layer for name, layer in self.model.named_modules() if isinstance(layer, LoraLinear)}

    @property
    def base_fingerprint(self) -> str:
        """Of the weights that the adapter changes, as they are without it."""
        base = ((name, t) for name, t in named_weights(self.model).items() if not is_factor(name))
        return fingerprint({name: digest(whole(tensor)) for name, tensor in base})

    def without_adapter(self) -> PolicyModel:
        """The base model as a policy of its own, in the same memory."""
        return _BasePolicy(self)

    @contextmanager
    def scaled(self, times: float) -> Iterator[None]:
        """Compute with the adapter counted so many times; only to compare with."""
        before = {layer: layer.scaling for layer in self.layers.values()}
        try:
            for layer, scaling in before.items():
                layer.scaling = scaling * times
            yield
        finally:
            for layer, scaling in before.items():
                layer.scaling = scaling

    def weights(self) -> dict[str, Tensor]:
        """As of any policy; the matrices with an adapter are merged copies."""
        return self._without_factors(named_weights(self.model))

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        layers = {f"{name}.weight": layer for name, layer in self.layers.items()}
        for name, tensor in named_weights(self.model).items():
            if name in layers:
                yield name, layers[name].merged()
            elif not is_factor(name):
                yield name, whole(tensor)

    def pieces(self) -> Iterator[tuple[str, Shard]]:
        """As of any policy; those of the matrices with an adapter are copied out of the merged ones."""
        layers = {f"{name}.weight": layer for name, layer in self.layers.items()}
        for name, tensor in named_weights(self.model).items():
            if name in layers:
                yield name, replace(piece(tensor), tensor=part_of(layers[name].merged(), tensor).clone())
            elif not is_factor(name):
                yield name, piece(tensor)

    def adapter(self) -> Adapter:
        factors = {f"{name}.weight": (x.lora_A.detach(), x.lora_B.detach()) for name, x in self.layers.items()}
        shown = {name: (digest(a), digest(b)) for name, (a, b) in factors.items()}
        return Adapter(scaling=self.alpha / self.rank, factors=factors, digests=shown)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder, state_dict=self._without_factors(self.model.state_dict()))

    def factors(self) -> dict[str, Tensor]:
        """``layer.lora_A`` [rank, in] and ``layer.lora_B`` [out, rank] of every layer: all that is trained."""
        return {name: tensor.detach() for name, tensor in self.model.named_parameters() if is_factor(name)}

    @torch.no_grad()
    def load_factors(self, factors: Mapping[str, Tensor]) -> None:
        """Take these for A and B; `ModelError` unless they are all there, in their shapes, and no others."""
        own = self.factors()
        shapes = [{name: tuple(tensor.shape) for name, tensor in side.items()} for side in (factors, own)]
        wrong = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
        if wrong:
            there, here = (side.get(wrong[0], "missing") for side in shapes)
            raise ModelError(
                f"an adapter does not fit: {wrong[0]} is {there} there and {here} here, and {len(wrong) - 1} others "
                "differ; set learner.lora.rank and target_modules as they were"
            )
        for name, tensor in own.items():
            tensor.copy_(factors[name])

    def _without_factors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        changed = {f"{name}.weight": layer.merged() for name, layer in self.layers.items()}
        return {name: changed.get(name, tensor) for name, tensor in tensors.items() if not is_factor(name)}


class _BasePolicy(PolicyModel):
    """A `LoraPolicy` with its adapter off: every call goes to that policy, which alone is a root. Only to compare with:
    it gives no gradient, since a backward pass may compute layers again, and would find the adapter on."""

    def __init__(self, policy: LoraPolicy) -> None:
        super().__init__(policy.model)
        self._policy = (policy,)  # not a part of this module: it is the other way round

    @property
    def root(self) -> PolicyModel:
        return self._policy[0]

    @torch.no_grad()
    def _without(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self.root.switch.off():
            return call(*arguments, **options)

    def forward(self, *arguments: Any, **options: Any) -> Scores:
        return self._without(self.root, *arguments, **options)

    def states(self, *arguments: Any) -> Tensor:
        return self._without(self.root.states, *arguments)

    def hidden(self, *arguments: Any) -> Tensor:
        return self._without(self.root.hidden, *arguments)

    def head(self, hidden: Tensor) -> Tensor:
        return self._without(self.root.head, hidden)


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is an A or a B."""
    return name.endswith((".lora_A", ".lora_B"))


def target_layers(model: nn.Module, target_modules: Iterable[str], rank: int) -> dict[str, nn.Linear]:
    """Module name -> layer that gets an adapter, in the order of the model; `ModelError` names what cannot have one."""
    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    chosen, problems = set(), []
    for wanted in target_modules:
        if wanted == ALL_LINEAR:
            found = [name for name, module in linear.items() if module is not head]
        else:
            found = [name for name in modules if is_named(name, wanted)]
        if not found:
            problems.append(f"it has no module `{wanted}`; its linear layers are {', '.join(last_names(linear))}")
        chosen.update(found)
    problems += _unfit(model, {name: modules[name] for name in modules if name in chosen}, rank)
    if problems:
        raise ModelError("learner.lora does not fit the model: " + "; ".join(dict.fromkeys(problems)))
    return {name: module for name, module in linear.items() if name in chosen}


def _unfit(model: nn.Module, chosen: Mapping[str, nn.Module], rank: int) -> Iterator[str]:
    """Why a module cannot have an adapter of this rank, one sentence for all that are called alike."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    config = model.config.get_text_config()
    mixture = any(getattr(config, count, None) for count in ("num_experts", "num_local_experts", "n_routed_experts"))
    for name, module in chosen.items():
        short = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            yield f"`{short}` is a {type(module).__name__}, and only linear layers can have an adapter; leave it out"
        elif len(shared := names_of[id(module.weight)]) > 1:
            other = next(each for each in shared if each != f"{name}.weight")
            yield f"`{short}` has one weight with {other}, which an adapter would change as well; leave it out"
        elif mixture and short in NAMES_OF_EXPERTS:
            yield (
                f"`{short}` of a mixture of experts cannot have one that PEFT loads again: it takes the name for the "
                "experts. Name other layers in learner.lora.target_modules"
            )
        elif rank > min(module.weight.shape):
            yield f"rank {rank} is more than `{short}` {list(module.weight.shape)} can have; lower learner.lora.rank"
