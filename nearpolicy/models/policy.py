"""The root module: a Hugging Face causal language model whose forward gives what learner and engine need.

The learner (and FSDP2, which only hooks a root's ``forward``) calls `PolicyModel.forward`: log-probabilities and
entropies of chosen rows, with the vocabulary head applied in chunks inside. The engine calls `logits`. Both go through
the same hidden states, the same head and the same attention function.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nearpolicy.models.attention import PackedContext
from nearpolicy.objectives.regularisers import full_kl

HEAD_CHUNK = 1024
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

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_scale: float | None = getattr(config, "logit_scale", None)  # Cohere multiplies
        self._logits_scaling: float | None = getattr(config, "logits_scaling", None)  # Granite divides

    @property
    def config(self):
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def hidden(self, input_ids: Tensor, positions: Tensor, context: PackedContext) -> Tensor:
        """[T] ids and positions -> [T, hidden] last hidden states."""
        output = self.model.get_decoder()(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, packed=context
        )
        return output.last_hidden_state[0]

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
    ) -> Scores:
        """Log-probability of ``targets`` [N] after packed ``rows`` [N], and the entropy there.

        Both are of softmax(logits / temperature), in natural logarithms. ``reference``: another model and its hidden
        states [N, hidden] for the same rows; then the KL to its distribution is given as well.
        """
        hidden = self.hidden(input_ids, positions, context)[rows]
        settings = (temperature, entropy_has_gradient, None if reference is None else reference[0])
        theirs = hidden.new_empty(len(rows), 0) if reference is None else reference[1]
        if len(rows) <= HEAD_CHUNK:
            return Scores(*self._score(hidden, targets, theirs, *settings))
        num_chunks = -(-len(rows) // HEAD_CHUNK)  # even chunks: a short last one would take another kernel
        parts = [
            checkpoint(self._score, *chunk, *settings, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(x.tensor_split(num_chunks) for x in (hidden, targets, theirs)), strict=True)
        ]
        return Scores(*map(torch.cat, zip(*parts, strict=True)))

    def _score(
        self,
        hidden: Tensor,
        targets: Tensor,
        reference_hidden: Tensor,
        temperature: float,
        entropy_has_gradient: bool,
        reference: PolicyModel | None,
    ) -> tuple[Tensor, ...]:
        logprobs = log_softmax(self.head(hidden), temperature)
        with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
            entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
        scores = logprobs.gather(1, targets[:, None])[:, 0], entropies
        if reference is None:
            return scores
        with torch.no_grad():
            theirs = log_softmax(reference.head(reference_hidden), temperature)
        return *scores, full_kl(logprobs, theirs)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """[rows, V] log-probabilities at a temperature; the one formula of engine and learner, always in float32."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)
