"""The root module: a Hugging Face causal language model whose forward gives what learner and engine need.

The learner (and FSDP2, which only hooks what enters a root) calls `PolicyModel.forward`: log-probabilities and
entropies of chosen rows, with the vocabulary head applied in chunks inside; and `PolicyModel.states`. The engine calls
`logits`. All go through the same hidden states, the same head and the same attention function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from nearpolicy.models.attention import PackedContext
from nearpolicy.models.pieces import piece, whole
from nearpolicy.models.weights import named_weights

if TYPE_CHECKING:
    from nearpolicy.models.files import WeightFiles
    from nearpolicy.roles import Adapter, Shard

T = TypeVar("T")

HEAD_CHUNK = 512
"""Rows of logits held at once; more rows are computed in chunks and recomputed in backward."""


class Scores(NamedTuple):
    """What a policy says of N chosen tokens, [N] each, in nats."""

    logprobs: Tensor
    """With gradient."""
    entropies: Tensor
    """Of the distribution that the token stands in; with gradient if asked for."""
    reference_kl: Tensor | None = None
    """KL from that distribution to the reference's, with gradient, if a reference was given."""

    def first(self, count: int) -> Scores:
        """Without the padding behind."""
        return Scores(*(None if values is None else values[:count] for values in self))


class PolicyModel(nn.Module):
    """Wraps a causal LM that computes packed attention (see `nearpolicy.models.loading`)."""

    def __init__(self, model: nn.Module, files: WeightFiles | None = None) -> None:
        super().__init__()
        self.model = model
        self.files = files
        """Where its weights are, as long as it has none."""
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_scale: float | None = getattr(config, "logit_scale", None)  # Cohere multiplies
        self._logits_scaling: float | None = getattr(config, "logits_scaling", None)  # Granite divides

    @property
    def config(self):
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device if self.files is None else self.files.device

    @property
    def root(self) -> PolicyModel:
        """The policy whose forward is called in the end."""
        return self

    def weights(self) -> dict[str, Tensor]:
        """Canonical Hugging Face name -> tensor, of what this policy computes with; tied tensors once."""
        return named_weights(self.model)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weights` one by one. Where ranks hold them in pieces, all ranks take each at the same time, and no more than
        one is put together at once."""
        for name, tensor in named_weights(self.model).items():
            yield name, whole(tensor)

    def pieces(self) -> Iterator[tuple[str, Shard]]:
        """What this rank holds of each of the `weights`."""
        for name, tensor in named_weights(self.model).items():
            yield name, piece(tensor)

    def adapter(self) -> Adapter | None:
        """What of `weights` differs from the model that was loaded, if that is all that is ever trained."""
        return None

    def save_pretrained(self, folder: Path) -> None:
        """An ordinary Hugging Face folder with `weights`."""
        self.model.save_pretrained(folder)

    def save_config(self, folder: Path) -> None:
        """What of such a folder is not weights."""
        config = self.model.config
        config.dtype = str(self.model.dtype).removeprefix("torch.")
        config.architectures = [type(self.model).__name__]
        config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)

    def on_disk(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole `weights` of one layer under the names, and in the shapes, that files of this model have."""
        from transformers.core_model_loading import revert_weight_conversion

        tied, unsaved = (
            getattr(self.model, name, None) for name in ("all_tied_weights_keys", "_keys_to_ignore_on_save")
        )
        named = {(tied or {}).get(name, name): tensor for name, tensor in weights.items()}
        return revert_weight_conversion(self.model, {n: t for n, t in named.items() if n not in (unsaved or ())})

    def hidden(self, input_ids: Tensor, positions: Tensor, context: PackedContext) -> Tensor:
        """[T] ids and positions -> [T, hidden] last hidden states."""
        return last_hidden(self.model.get_decoder(), input_ids, positions, context)

    def plain_logits(self, input_ids: Tensor) -> Tensor:
        """[T] ids -> [T, V] what the model itself says, without anything of ours but its attention function."""
        return self.model(input_ids=input_ids[None], use_cache=False).logits[0]

    def within(self, call: Callable[[], T]) -> T:
        """``call()`` as a part of this model: where ranks hold it in pieces, with its own weights whole, layers as they
        come, and all ranks together."""
        return call()

    def states(self, input_ids: Tensor, positions: Tensor, context: PackedContext, rows: Tensor) -> Tensor:
        """[rows, hidden] last hidden states of the chosen packed rows."""
        return self.hidden(input_ids, positions, context)[rows]

    def head(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, V] logits, with the scaling and soft-cap of the family."""
        logits = self.model.get_output_embeddings()(hidden)
        if self._logit_scale is not None:
            logits = logits * self._logit_scale
        if self._logits_scaling is not None:
            logits = logits / self._logits_scaling
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def logits(self, input_ids: Tensor, positions: Tensor, context: PackedContext, rows: Tensor) -> Tensor:
        """[rows, V] logits of the chosen packed rows."""
        return self.head(self.hidden(input_ids, positions, context)[rows])

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: PackedContext,
        rows: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        *,
        entropy_has_gradient: bool = False,
        reference: tuple[PolicyModel, Tensor] | None = None,
        support: Support | None = None,
    ) -> Scores:
        """Log-probability of ``targets`` [N] after packed ``rows`` [N], and the entropy there.

        Both are of softmax(logits / temperature), in natural logarithms, renormalised over the ``support`` if one is
        given. ``reference``: another model and its hidden states [N, hidden] for the same rows; then the KL to its
        distribution is given as well.
        """
        hidden = chosen_rows(self.hidden(input_ids, positions, context), rows)
        settings = (temperature, entropy_has_gradient, None if reference is None else reference[0])
        theirs = hidden.new_empty(len(rows), 0) if reference is None else reference[1]
        if len(rows) <= HEAD_CHUNK:
            return Scores(*self._score(hidden, targets, theirs, support, *settings))
        num_chunks = -(-len(rows) // HEAD_CHUNK)  # even chunks: a short last one would take another kernel
        chunks = [x.tensor_split(num_chunks) for x in (hidden, targets, theirs)]
        supports = [None] * num_chunks if support is None else support.split([len(x) for x in chunks[0]])
        parts = [
            checkpoint(self._score, *chunk, *settings, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*chunks, supports, strict=True)
        ]
        return Scores(*map(torch.cat, zip(*parts, strict=True)))

    def _score(
        self,
        hidden: Tensor,
        targets: Tensor,
        reference_hidden: Tensor,
        support: Support | None,
        temperature: float,
        entropy_has_gradient: bool,
        reference: PolicyModel | None,
    ) -> tuple[Tensor, ...]:
        logits, theirs = self.head(hidden), None
        allowed = None if support is None else support.mask(logits.shape[-1])
        if reference is not None:
            with torch.no_grad():
                theirs = log_softmax(reference.head(reference_hidden), temperature)
                theirs = theirs if allowed is None else restricted(theirs, allowed, IMPOSSIBLE)
        scores = score_tokens(logits, targets, temperature, theirs, allowed)
        if not entropy_has_gradient:
            scores = scores._replace(entropies=scores.entropies.detach())
        return scores if reference is not None else scores[:2]


def chosen_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """[T, hidden] -> [rows, hidden]. A row may be chosen several times (the end of a prompt that a group shares), and
    the gradient of an index adds those up in the order in which threads come to them; that of `index_select` in the
    order of the rows."""
    return hidden.index_select(0, rows)


def last_hidden(decoder: nn.Module, input_ids: Tensor, positions: Tensor, context: PackedContext) -> Tensor:
    """[T] ids and positions through a Hugging Face decoder -> [T, hidden] last hidden states."""
    output = decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, packed=context)
    return output.last_hidden_state[0]


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The tokens that could be drawn at each of N positions."""

    sizes: Tensor
    """[N] int64."""
    ids: Tensor
    """[sum of sizes] int64, one position after another."""

    def split(self, lengths: Sequence[int]) -> list[Support]:
        """By consecutive runs of so many positions."""
        sizes = self.sizes.split(list(lengths))
        return [Support(s, ids) for s, ids in zip(sizes, self.ids.split([int(s.sum()) for s in sizes]), strict=True)]

    def mask(self, vocabulary: int) -> Tensor:
        """[N, V] bool."""
        allowed = torch.zeros(len(self.sizes), vocabulary, dtype=torch.bool, device=self.ids.device)
        allowed[torch.arange(len(self.sizes), device=self.ids.device).repeat_interleave(self.sizes), self.ids] = True
        return allowed


def score_tokens(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reference_logprobs: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Scores:
    """Scores of ``targets`` [N] under [N, V] logits, renormalised over the ``allowed`` tokens if they are given, and
    the KL to a reference [N, V] if there is one."""
    found = _TokenScores.apply(logits, targets, temperature, reference_logprobs, allowed)
    return Scores(*found) if reference_logprobs is not None else Scores(*found[:2])


class _TokenScores(torch.autograd.Function):
    """Log-probability l, entropy H and KL in one pass over the vocabulary each way, instead of one per operation.

    With p = softmax(z / T) and gradients a, h, k that arrive for l, H and KL, the gradient of z_j is

        (a (1[j = target] - p_j) - h p_j (log p_j + H) + k p_j (log p_j - log q_j - KL)) / T
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, reference_logprobs, allowed):
        logprobs = log_softmax(logits, temperature)
        if allowed is not None:
            logprobs = restricted(logprobs, allowed, IMPOSSIBLE)
        probabilities = logprobs.exp()
        kl = None
        if reference_logprobs is not None:
            kl = torch.sub(logprobs, reference_logprobs).mul_(probabilities).sum(dim=-1)
        entropies = probabilities.mul_(logprobs).sum(dim=-1).neg_()
        ctx.save_for_backward(logprobs, targets, entropies, reference_logprobs, kl)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs.gather(1, targets[:, None])[:, 0].clone(), entropies, kl  # no view: FSDP2 hooks it

    @staticmethod
    @once_differentiable
    def backward(ctx, of_logprobs, of_entropies, of_kl):
        logprobs, targets, entropies, reference_logprobs, kl = ctx.saved_tensors
        gradient, scale = logprobs.exp(), 1.0 / ctx.temperature
        column = torch.zeros_like(entropies)
        if of_logprobs is not None:
            column = column - of_logprobs
        if of_entropies is None and of_kl is None:
            gradient.mul_((column * scale)[:, None])
        else:
            inner = torch.zeros_like(entropies)
            if of_entropies is not None:
                inner, column = inner - of_entropies, column - of_entropies * entropies
            if of_kl is not None:
                inner, column = inner + of_kl, column - of_kl * kl
            weights = torch.addcmul((column * scale)[:, None], logprobs, (inner * scale)[:, None])
            if of_kl is not None:
                weights.addcmul_(reference_logprobs, (of_kl * scale)[:, None], value=-1.0)
            gradient.mul_(weights)
        if of_logprobs is not None:
            gradient.scatter_add_(1, targets[:, None], (of_logprobs * scale)[:, None])
        return gradient.to(ctx.dtype), None, None, None, None


IMPOSSIBLE = -1e9
"""A log-probability of tokens outside the support whose product with their probability, 0, is a number."""


def restricted(logprobs: Tensor, allowed: Tensor, otherwise: float) -> Tensor:
    """[rows, V] log-probabilities renormalised over the ``allowed`` tokens; ``otherwise`` for the rest. The one formula
    of engine and learner."""
    left = logprobs.masked_fill(~allowed, float("-inf"))
    return (left - left.logsumexp(dim=-1, keepdim=True)).masked_fill_(~allowed, otherwise)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """[rows, V] log-probabilities at a temperature, in float32 or better; the one formula of engine and learner."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperature, dim=-1)
