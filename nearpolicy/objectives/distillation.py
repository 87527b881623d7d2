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
    top, tokens = student_logprobs.topk(k, dim=-1)
    theirs = teacher_logprobs.detach().gather(-1, tokens)
    kl = full_kl(top, theirs)
    if k == student_logprobs.shape[-1]:
        return kl
    return kl + full_kl(_rest(top)[..., None], _rest(theirs)[..., None])


def sampled_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[N] log teacher - log student of the sampled tokens, without gradient: the advantage with which policy gradient
    descends KL(student || teacher) at discount 0 (on-policy distillation, Thinking Machines 2025)."""
    return (teacher_logprobs - logprobs).detach()


def _rest(logprobs: Tensor) -> Tensor:
    """[...] log of what is left beside the given tokens [..., k], never below the rounding of 1."""
    tiny = torch.finfo(logprobs.dtype).tiny
    return torch.log1p(-logprobs.exp().sum(dim=-1).clamp(max=1.0 - torch.finfo(logprobs.dtype).eps)).clamp(
        min=float(torch.tensor(tiny).log())
    )
