"""Whether packed attention computes what a model's own forward computes; measured at load, never listed.

Recurrent layers, chunked masks and families that never call the attention function are silently wrong by whole nats
when tokens of several sequences share one packed row. None of them raises anything. So before a model is used, two
packed sequences, a shared prompt and a second chunk are compared with plain separate forwards.

A model that ranks hold in pieces is measured by all of them together, layer by layer, as it computes at any other time:
none of them has to hold it whole for that, and what is measured are its own weights, not those of a smaller one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from nearpolicy.errors import ModelError, described
from nearpolicy.models.attention import NAME, PAGE, PackedContext, Queries, Rule, attend, with_ones
from nearpolicy.models.pieces import in_pieces, local, whole
from nearpolicy.models.policy import PolicyModel, last_hidden
from nearpolicy.models.rows import Node, RowContext
from nearpolicy.models.value import ValueModel

_LOG = logging.getLogger(__name__)
TOLERANCE = 1e-4
"""Nats. Fit families in float32 reach 5e-6 as tiny models and 6e-5 as SmolLM2, whose log-probabilities are larger;
unfit ones miss by more than 1."""
LOW_PRECISION_TOLERANCE = 0.5
"""The same for bfloat16, where rounding alone reaches a tenth."""
LEAST_SENSITIVITY = 0.5
"""Nats by which another prompt must change a token's distribution for the comparison to mean anything."""


def tolerance_of(dtype: torch.dtype) -> float:
    """For weights of this type."""
    return TOLERANCE if dtype == torch.float32 else LOW_PRECISION_TOLERANCE


@torch.no_grad()
def check_fitness(
    model: PolicyModel | ValueModel, name: str, plain_attention: str = "eager", tolerance: float = TOLERANCE
) -> float:
    """Raises `ModelError` with the reason if the model does not fit; returns the largest gap in nats. Of a value model
    it is the gap in what a head of random numbers makes of its hidden states. Of a model in pieces all ranks ask
    together.

    A model that does not fit fails every time. One that fails once and then passes says something about the machine.
    """
    policy = model if isinstance(model, PolicyModel) else _Heard(model)
    measure = partial(_at_rest_after, model, partial(_measure, policy, name, plain_attention, tolerance))
    try:
        gap, sensitivity = measure()
    except ModelError as first:
        if in_pieces(next(model.parameters())):  # the others may have passed, and are not there to repeat it
            raise
        gap, sensitivity = measure()
        _LOG.warning(
            "%s: the check passed when repeated (%.3g nats) after this failure: %s. The same computation gave two "
            "results: this machine's memory, cooling or virtualisation may be at fault, and exact numerics with it",
            *(name, gap, first),
        )
    if sensitivity < LEAST_SENSITIVITY:
        # Fresh random weights can be so small that no token feels another: judge the architecture by louder ones.
        with _amplified(model):
            measure()
    return gap


def _at_rest_after(model: PolicyModel | ValueModel, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    try:
        return model.within(measure)
    finally:
        if (reshard := getattr(model, "reshard", None)) is not None:  # FSDP2's: of what the root has gathered
            reshard()


class _Heard:
    """A value model, whose decoder has no head, as something that says tokens: by a head of random numbers, in which
    every difference of hidden states is one of log-probabilities. Its own head begins as zeros."""

    SAYS = 64

    def __init__(self, model: ValueModel) -> None:
        self._of = model
        self.model = model.decoder
        self.config = self.model.config
        width = self.config.get_text_config().hidden_size
        self._head = torch.randn(width, self.SAYS, generator=torch.Generator().manual_seed(21)) / width**0.5

    @property
    def device(self) -> torch.device:
        return self._of.device

    def plain_logits(self, ids: Tensor) -> Tensor:
        states = self.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return states.float() @ self._head.to(states.device)

    def logits(self, input_ids: Tensor, positions: Tensor, context: PackedContext, rows: Tensor) -> Tensor:
        states = last_hidden(self.model, input_ids, positions, context)[rows]
        return states.float() @ self._head.to(states.device)


def _measure(policy: PolicyModel | _Heard, name: str, plain_attention: str, tolerance: float) -> tuple[float, float]:
    """Largest gap, and how much a token's distribution feels the prompt (nats); raises if the gap is too large."""
    vocabulary = policy.config.get_text_config().vocab_size
    generator, device = torch.Generator().manual_seed(20), policy.device
    prompt, first, second, other = (
        torch.randint(3, vocabulary, (length,), generator=generator).to(device) for length in (PAGE + 7, 9, 5, 11)
    )
    policy.model.set_attn_implementation(plain_attention)
    full = torch.cat([prompt, first])
    *expected, turned = _all_plain(
        policy, name, [full, torch.cat([prompt, second]), other, torch.cat([prompt.flip(0), first])]
    )
    sensitivity = _gap(turned[-len(first) :], expected[0][-len(first) :])
    policy.model.set_attn_implementation(NAME)
    try:
        packed = _packed(policy, prompt, first, second, other)
        chunked = _in_two_chunks(policy, full, len(prompt) - 4)
    except Exception as error:  # a family that does not fit may fail in any way
        raise ModelError(_refusal(name, policy, f"packed attention failed inside it: {described(error)}")) from error
    gaps = {
        "two completions of one shared prompt": max(_gap(a, b) for a, b in zip(packed[:2], expected[:2], strict=True)),
        "a second packed sequence": _gap(packed[2], expected[2]),
        "a second chunk over stored keys": _gap(chunked, expected[0]),
    }
    what, worst = max(gaps.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    if not worst <= tolerance:
        reason = (
            f"{what} differs from the model's own forward by {worst:.3g} nats (at most {tolerance:g} is allowed); "
            "it mixes tokens outside the attention function (a recurrent layer, a mask of its own, or attention "
            "outside transformers' interface)"
        )
        raise ModelError(_refusal(name, policy, reason))
    return worst, sensitivity


@contextmanager
def _amplified(model: torch.nn.Module) -> Iterator[None]:
    """Scale every weight matrix to unit gain, and put the old bits back afterwards."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    kept = [local(p).detach().clone() for p in matrices]
    try:
        for p in matrices:
            values = whole(p)
            gain = values.float().std() * max(1, values[0].numel()) ** 0.5
            if gain > 0:
                local(p).mul_(1.0 / gain.to(p.dtype))
        yield
    finally:
        for p, before in zip(matrices, kept, strict=True):
            local(p).copy_(before)


def _refusal(name: str, policy: PolicyModel | _Heard, reason: str) -> str:
    return (
        f"model {name!r} ({type(policy.model).__name__}) does not fit the embedded engine and learner: {reason}. "
        "Choose a model whose layers are plain attention."
    )


def _all_plain(policy: PolicyModel | _Heard, name: str, sequences: list[Tensor]) -> list[Tensor]:
    """What the model itself says of each sequence; a model that cannot be run at all is told from one that is unfit."""
    try:
        said = [_plain(policy, ids) for ids in sequences]
    except Exception as error:
        raise ModelError(
            f"model {name!r} ({type(policy.model).__name__}) cannot be run: {described(error)}; "
            "look at the sizes in its config.json"
        ) from error
    if not all(torch.isfinite(each).all() for each in said):
        raise ModelError(
            f"model {name!r} ({type(policy.model).__name__}) gives probabilities that are not finite numbers: its "
            "weights or its config are broken; fetch or save the model again"
        )
    return said


def _plain(policy: PolicyModel | _Heard, ids: Tensor) -> Tensor:
    return torch.log_softmax(policy.plain_logits(ids).float(), dim=-1)


def _packed(policy: PolicyModel | _Heard, prompt: Tensor, first: Tensor, second: Tensor, other: Tensor) -> list[Tensor]:
    """Log-probabilities of prompt + first, prompt + second and other, from one packed row."""
    ids = torch.cat([prompt, first, second, other])
    starts = torch.tensor([0, *(len(x) for x in (prompt, first, second))]).cumsum(0).tolist()
    nodes = [
        Node(starts[0], len(prompt)),
        Node(starts[1], len(first), parent=0),
        Node(starts[2], len(second), parent=0),
        Node(starts[3], len(other)),
    ]
    context = RowContext(nodes, len(ids), policy.device)
    logits = policy.logits(ids, context.positions, context, torch.arange(len(ids)))
    own = [torch.log_softmax(part.float(), dim=-1) for part in logits.split([n.length for n in nodes])]
    return [torch.cat([own[0], own[1]]), torch.cat([own[0], own[2]]), own[3]]


class _StoredKeys:
    """One sequence in chunks: keys of earlier chunks stay."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = torch.empty(0, dtype=torch.long)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        v1 = with_ones(v)
        if layer in self._keys:
            k, v1 = torch.cat([self._keys[layer][0], k]), torch.cat([self._keys[layer][1], v1])
        self._keys[layer] = (k, v1)

        def page(x: Tensor, j: int) -> Tensor:
            part = x[j * PAGE : (j + 1) * PAGE]
            padded = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, PAGE - len(part)))
            return padded.transpose(0, 1)[None].contiguous()

        queries = Queries(self.positions[None], self.positions.tolist())
        return attend(q[None], queries, lambda j: (page(k, j), page(v1, j)), rule)[0]


def _in_two_chunks(policy: PolicyModel | _Heard, ids: Tensor, cut: int) -> Tensor:
    context = _StoredKeys()
    parts = []
    for start, part in ((0, ids[:cut]), (cut, ids[cut:])):
        context.positions = torch.arange(start, start + len(part), device=policy.device)
        logits = policy.logits(part, context.positions, context, torch.arange(len(part)))
        parts.append(torch.log_softmax(logits.float(), dim=-1))
    return torch.cat(parts)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())
