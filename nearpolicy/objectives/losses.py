"""Policy losses per token. Which tokens count, and with what share, is the business of `aggregation`.

All take [N] tensors over trained tokens and give [N] losses whose gradient with respect to ``logprobs`` is the point:

- ``logprobs``: of the current policy pi, with gradient
- ``proximal_logprobs``: of the policy at the start of the step
- ``behavior_logprobs``: of the policy that sampled
- ``advantages``
- ``weights``: of the behaviour correction (`corrections`), without gradient

A loss either takes ``weights``, or measures against the behaviour policy by itself; none does both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearpolicy.objectives.sequences import Sequences, difference, ratio


def policy_gradient(logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """[N] REINFORCE: -w A log pi (Williams 1992); the correction weight w carries no gradient."""
    return -weights * advantages * logprobs


def ppo_clip(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """[N] -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / proximal (Schulman et al. 2017, equation 7).

    Separate bounds: DAPO (arXiv 2503.14476, equation 8). The correction weight stands outside the minimum: it corrects
    which tokens were sampled, not how far pi may move (decoupled form, Hilton et al. 2022).

    ``dual_clip`` c > 1: where A < 0 the loss is at most w c |A| (dual-clip PPO, Ye et al. 2020, arXiv 1912.09729).
    """
    r = ratio(difference(logprobs, proximal_logprobs))
    value = torch.minimum(r * advantages, r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        value = torch.where(advantages < 0, torch.maximum(value, dual_clip * advantages), value)
    return -weights * value


def clip_shares(log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """[N] bool, [N] bool: tokens whose gradient the lower and the upper bound of a clipped ratio stops."""
    r = ratio(log_ratio.detach())
    return (r < 1.0 - clip_low) & (advantages < 0), (r > 1.0 + clip_high) & (advantages > 0)


def outside(log_ratio: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """[N] bool, [N] bool: tokens whose ratio lies below and above the clip range, whatever their advantage."""
    r = ratio(log_ratio.detach())
    return r < 1.0 - clip_low, r > 1.0 + clip_high


def gspo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """[N] the clipped objective on the sequence's ratio s = exp(mean_t log(pi / proximal)), the same value for each of
    its tokens (GSPO, arXiv 2507.18071, equation 5). Aggregate as the mean of sequence means."""
    log_ratio = difference(logprobs, proximal_logprobs)
    log_s = sequences.spread(sequences.mean(log_ratio)).to(log_ratio.dtype)
    return ppo_clip(log_s, torch.zeros_like(log_s), advantages, weights, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """[N] GSPO with the gradient through each token's own log-probability: s_t = sg[s] pi_t / sg[pi_t] (arXiv
    2507.18071, equation 13). Equal to `gspo` in value, and in gradient where a sequence has one advantage;
    advantages may differ by token."""
    log_ratio = difference(logprobs, proximal_logprobs).detach()
    log_s = sequences.spread(sequences.mean(log_ratio)).to(log_ratio.dtype)
    return ppo_clip(
        log_s + (logprobs - logprobs.detach()),
        torch.zeros_like(log_s),
        advantages,
        weights,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def gmpo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """[N] geometric-mean policy optimisation (GMPO, arXiv 2507.20673): -w A exp(mean_t log r_t), each token's
    ratio clipped to [exp(-clip_low), exp(clip_high)] on the side its advantage is clipped on; the same value for each
    token of a sequence. Aggregate as the mean of sequence means.

    ``clip_low`` and ``clip_high`` are bounds on the log-ratio. All tokens of a sequence need one advantage.
    """
    log_ratio = difference(logprobs, proximal_logprobs)
    clipped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    geometric = ratio(sequences.spread(sequences.mean(pessimistic))).to(log_ratio.dtype)
    return -weights * advantages * geometric


def cispo(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """[N] -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi, r = pi / behaviour: no token loses its gradient (CISPO,
    MiniMax-M1, arXiv 2506.13585, equations 4 and 5). The clipped ratio is the correction; no other weight is applied.
    """
    r = ratio(difference(logprobs, behavior_logprobs).detach())
    return -r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * logprobs


def sapo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> Tensor:
    """[N] -w f(r) A with the soft gate f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A (SAPO, arXiv
    2511.20347). At r = 1 the gradient is that of REINFORCE; it fades on both sides instead of stopping."""
    r = ratio(difference(logprobs, proximal_logprobs))
    tau = torch.full_like(r, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    return -weights * advantages * (4.0 / tau) * torch.sigmoid(tau * (r - 1.0))


def aipo(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, cap: float) -> Tensor:
    """[N] -sg[min(pi / behaviour, cap)] A log pi (AIPO, LlamaRL, arXiv 2505.24034): one-sided truncation of the ratio
    between the current and the sampling policy. No other weight is applied."""
    return -ratio(difference(logprobs, behavior_logprobs).detach()).clamp(max=cap) * advantages * logprobs


def kimi(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequences: Sequences,
    *,
    tau: float,
) -> Tensor:
    """[N] whose sum over a sequence is -w A log pi(y) + tau / 2 (log(pi(y) / proximal(y)))^2: policy gradient with a
    squared log-ratio that holds the whole sequence near the proximal policy (Kimi k1.5, arXiv 2501.12599, section
    2.3.2, gradient as in equation 3). ``advantages``: rewards minus their group's mean. The penalty is shared equally
    by the tokens.

    A regression, so that it has one optimum whoever sampled: with advantages r - tau log Z the gradient is zero at
    pi = proximal exp(r / tau) / Z. The mean of the group stands for tau log Z, its limit for large tau."""
    log_ratio = difference(logprobs, proximal_logprobs)
    squared = sequences.sum(log_ratio).square()
    penalty = sequences.spread(squared / sequences.sizes().clamp(min=1)).to(log_ratio.dtype)
    return -weights * advantages * logprobs + 0.5 * tau * penalty


def dppo_kept(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """[N] bool: tokens inside the trust region of DPPO (arXiv 2602.04879, binary total variation).

    A token is out where its probability has moved by more than ``clip_high`` up while A > 0, or by more than
    ``clip_low`` down while A < 0: absolute differences of probabilities, not of ratios.
    """
    moved = logprobs.detach().double().exp() - behavior_logprobs.double().exp()
    return ~(((advantages > 0) & (moved > clip_high)) | ((advantages < 0) & (moved < -clip_low)))


def dppo(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """[N] -(pi / behaviour) A inside the trust region (`dppo_kept`), no loss outside (DPPO, arXiv 2602.04879). The
    ratio is the correction; no other weight is applied."""
    kept = dppo_kept(logprobs, behavior_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(kept, -ratio(difference(logprobs, behavior_logprobs)) * advantages, 0.0)


def off_policy_sequences_kept(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, threshold: float
) -> Tensor:
    """[N] bool: False for all tokens of a sequence that was bad and has become unlikely: A < 0 and
    mean_t log(behaviour / pi) > ``threshold`` (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, equation
    9)."""
    drift = sequences.mean(difference(behavior_logprobs, logprobs).detach())
    return ~((sequences.spread(drift) > threshold) & (advantages < 0))


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """[N] (log pi - mean log pi)(A - mean A) over all tokens of an update: the token's part in the change of entropy
    (arXiv 2505.22617, equation 10). Needs the whole update at once, not a micro-batch of it."""
    x, a = logprobs.detach().double(), advantages.double()
    return (x - x.mean()) * (a - a.mean())


def clip_cov_detached(covariance: Tensor, chosen: Tensor, *, low: float, high: float, share: float) -> Tensor:
    """[N] bool: tokens whose gradient Clip-Cov stops: ``share`` of all tokens (at least one, if there is one), drawn
    among those with covariance in [low, high] (arXiv 2505.22617, equations 11 and 12).

    ``chosen``: [N] one number per token in [0, 1); the tokens with the smallest are drawn, so that the choice is the
    caller's random numbers and nothing else.
    """
    inside = (covariance >= low) & (covariance <= high)
    count = min(int(inside.sum()), _number(share, covariance))
    order = torch.where(inside, chosen.double(), torch.inf).argsort(stable=True)
    out = torch.zeros_like(inside)
    out[order[:count]] = True
    return out


def kl_cov_penalised(covariance: Tensor, *, share: float) -> Tensor:
    """[N] bool: the ``share`` of tokens with the largest covariance (at least one): those that KL-Cov penalises (arXiv
    2505.22617, equation 13)."""
    out = torch.zeros(len(covariance), dtype=torch.bool, device=covariance.device)
    if len(covariance):
        out[covariance.argsort(descending=True, stable=True)[: _number(share, covariance)]] = True
    return out


def _number(share: float, values: Tensor) -> int:
    """``share`` of the values, rounded down but at least one; 0.29 of 100 is 29, although the product is below it."""
    return max(1, math.floor(share * len(values) + 1e-9))


def clip_cov(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    detached: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """[N] `ppo_clip`, and no loss for the ``detached`` tokens [N] (`clip_cov_detached`)."""
    losses = ppo_clip(logprobs, proximal_logprobs, advantages, weights, clip_low=clip_low, clip_high=clip_high)
    return torch.where(detached, torch.zeros_like(losses), losses)


def kl_cov(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    penalised: Tensor,
    *,
    coefficient: float,
) -> Tensor:
    """[N] -w r A, plus coefficient |log r| for the ``penalised`` tokens [N] (`kl_cov_penalised`), r = pi / proximal
    (arXiv 2505.22617, equation 14, its divergence estimated as in listing 1). The penalty pulls with full strength at
    any distance, and not at all at r = 1."""
    log_ratio = difference(logprobs, proximal_logprobs)
    penalty = torch.where(penalised, log_ratio.abs(), torch.zeros_like(log_ratio))
    return -weights * ratio(log_ratio) * advantages + coefficient * penalty


def interpolated_proximal(logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """[N] log-probabilities of a proximal policy between the sampling and the current one, without a forward pass of
    its own: alpha log behaviour + (1 - alpha) log pi, alpha = 1 / staleness, 0 where staleness is 0 (A-3PO, arXiv
    2512.06547). ``staleness``: [N] steps between the version that sampled the token and the one that trains on it."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    alpha = torch.where(staleness > 0, 1.0 / staleness.double().clamp(min=1.0), 0.0).to(wide)
    return alpha * behavior_logprobs + (1.0 - alpha) * logprobs.detach()


def replayed_success(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, cap: float) -> Tensor:
    """[N] -sg[min(pi / behaviour, cap)] max(A, 0) log pi: a success of the past, weighed by how likely it is today
    (self-imitation, Oh et al. 2018, with truncated importance weights; replay for language models: RePO, arXiv
    2506.09340).

    A sequence that was right once is never pushed down for not being the best today. Biased for that reason, also where
    the policies are equal.
    """
    weight = ratio(difference(logprobs, behavior_logprobs).detach()).clamp(max=cap)
    return -weight * advantages.clamp(min=0.0) * logprobs


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """[N] half the larger of (V - R)^2 and (clip(V, V_old - clip, V_old + clip) - R)^2; plain without ``clip`` (PPO as
    implemented; Huang et al. 2022, detail 9)."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (held - returns).square())
