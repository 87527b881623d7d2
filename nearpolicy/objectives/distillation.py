"""On-policy distillation: reverse KL from student to teacher on what the student has sampled.

Three forms of the same quantity KL(student || teacher) per position, from exact to cheap: over the whole vocabulary,
over the student's top-k, and from the sampled token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearpolicy.objectives.regularisers import full_kl


def reverse_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[N] KL(student || teacher) of two [N, V] tables of log-probabilities, with gradient into the student's (MiniLLM,
    Gu et al. 2024; GKD, Agarwal et al. 2024)."""
    return full_kl(student_logprobs, teacher_logprobs.detach())


def reverse_kl_top_k(student_logprobs: Tensor, teacher_logprobs: Tensor, *, k: int) -> Tensor:
    """[N] KL over k + 1 events: the student's k most likely tokens one by one, and all the rest as one.

    A lower bound of `reverse_kl`, equal to it at k = V; unlike a renormalised top-k it sees mass that leaves the top.
    """
    if not 1 <= k <= student_logprobs.shape[-1]:
        raise ValueError(f"k is {k}; it must lie between 1 and the vocabulary, {student_logprobs.shape[-1]}")
    tokens = student_logprobs.topk(k, dim=-1).indices
    ours, theirs = (_top_and_rest(table, tokens) for table in (student_logprobs, teacher_logprobs.detach()))
    return full_kl(ours, theirs)


def sampled_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[N] log teacher - log student of the sampled tokens, without gradient: the advantage with which policy gradient
    descends KL(student || teacher) at discount 0 (on-policy distillation, Thinking Machines 2025)."""
    return (teacher_logprobs - logprobs).detach()


def _top_and_rest(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """[N, k + 1] log-probabilities of the given tokens [N, k], and of all others [N, V - k] together.

    The rest is added up, not taken as 1 minus the top: with a sure student it is smaller than the rounding of 1.
    """
    wide = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    nothing = torch.finfo(wide.dtype).min  # a sum of nothing but zeros would have no gradient but NaN
    rest = wide.scatter(-1, tokens, -torch.inf).clamp(min=nothing).logsumexp(dim=-1, keepdim=True)
    return torch.cat([wide.gather(-1, tokens), rest.masked_fill(rest < nothing / 2, -torch.inf)], dim=-1)
