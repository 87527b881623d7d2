"""An objective on the tokens of a micro-batch: loss x correction x divisor x regularisers, as a recipe puts them
together. Where micro-batches are cut is not known here, and makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from nearpolicy.objectives import aggregation, corrections, losses, preference, regularisers
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.corrections import Correction
from nearpolicy.objectives.sequences import Sequences, held_back


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The trained tokens of one micro-batch, [N] each: all that an objective may look at."""

    logprobs: Tensor
    """Of the current policy, with gradient."""
    entropies: Tensor
    """Nats; with gradient where the objective asked for it."""
    proximal_logprobs: Tensor
    """Of the policy at the start of the step."""
    behavior_logprobs: Tensor
    """Of the policy that sampled."""
    advantages: Tensor
    sequences: Sequences
    """Tokens by rollout."""
    staleness: Tensor | None = None
    """Steps between the version that sampled the token and the one that trains on it."""
    reference_logprobs: Tensor | None = None
    reference_kl: Tensor | None = None
    """KL from the policy to the reference over the whole vocabulary, with gradient."""
    chosen: Tensor | None = None
    """Bool: tokens that `Objective.choose` picked out of the whole update."""

    def __post_init__(self) -> None:
        count = len(self.logprobs)
        shapes = {
            f.name: getattr(self, f.name).shape for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        shapes["sequences.index"] = self.sequences.index.shape
        wrong = [f"{name} has {tuple(shape)}" for name, shape in shapes.items() if tuple(shape) != (count,)]
        if wrong:
            raise ValueError(f"{count} tokens need arrays of shape ({count},), but {', '.join(wrong)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """What an objective says of N tokens."""

    losses: Tensor
    """[N] with gradient."""
    kept: Tensor
    """[N] bool: the others leave the sum and the divisor."""
    named: Mapping[str, Tensor]
    """[N] each, without gradient; their means over tokens are logged under these names."""


class TokenObjective(Protocol):
    """What a learner needs to know of an objective."""

    skips_zero_advantage: bool
    """Rollouts without any advantage add nothing to the loss and need no forward pass."""
    whole_rollouts: bool
    """All segments of a rollout must be in one micro-batch."""
    entropy_has_gradient: bool
    same_support: bool
    """Log-probabilities are over the tokens that could be sampled."""

    def token_losses(self, tokens: Tokens) -> TokenLosses: ...

    def shares(self, kept: Tensor, sequences: Sequences) -> Tensor:
        """[N] factors of the losses."""
        ...

    def divisor(self, kept: Tensor, sequences: Sequences) -> float:
        """What these tokens add to the divisor of their update."""
        ...


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective of a recipe."""

    config: ObjectiveConfig
    max_completion_length: int
    entropy_coef: float | None = None
    """Weight of the entropy bonus now; the recipe's where nothing has changed it."""
    skips_zero_advantage: bool = field(init=False)
    whole_rollouts: bool = field(init=False)
    entropy_has_gradient: bool = field(init=False)

    def __post_init__(self) -> None:
        config, parts = self.config, self.config.parts.values()
        rejects = any(part.rejects for part in parts)
        # Rejected tokens leave the divisor, so all tokens have to be seen; regularisers act on all of them.
        everywhere = rejects or config.kl_in == "loss" or self.entropy_weight > 0 or config.entropy_target is not None
        set_ = object.__setattr__
        set_(self, "skips_zero_advantage", not everywhere and config.loss not in ("kimi", "kl_cov"))
        set_(
            self,
            "whole_rollouts",
            any(part.by_sequence for part in parts)
            or config.loss_agg != "token_mean"
            or config.off_policy_threshold is not None,
        )
        set_(self, "entropy_has_gradient", self.entropy_weight > 0)

    @property
    def entropy_weight(self) -> float:
        """Of the bonus now."""
        return self.config.entropy_coef if self.entropy_coef is None else self.entropy_coef

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model has to be asked, for the loss or for advantages."""
        return self.config.reference != "none"

    @property
    def needs_critic(self) -> bool:
        """Whether advantages cannot be had without a critic's values."""
        return self.config.advantage == "gae"

    @property
    def same_support(self) -> bool:
        """Whether log-probabilities are over the tokens that could be sampled."""
        return bool(self.config.same_support)

    @property
    def needs_full_kl(self) -> bool:
        return self.config.kl_estimator == "full"

    @property
    def chooses(self) -> bool:
        """Whether tokens are picked out of the whole update before the loss (`choose`)."""
        return self.config.loss in ("clip_cov", "kl_cov")

    def choose(self, logprobs: Tensor, advantages: Tensor, chances: Tensor) -> Tensor:
        """[M] bool over all trained tokens of an update, in the order of its rows. ``chances``: [M] random numbers."""
        config = self.config
        covariance = losses.covariances(logprobs, advantages)
        if config.loss == "kl_cov":
            return losses.kl_cov_penalised(covariance, share=config.cov_share)
        return losses.clip_cov_detached(
            covariance, chances, low=config.cov_low, high=config.cov_high, share=config.cov_share
        )

    def token_losses(self, tokens: Tokens) -> TokenLosses:
        proximal = tokens.proximal_logprobs
        if self.config.proximal == "interpolated":
            proximal = losses.interpolated_proximal(tokens.logprobs, tokens.behavior_logprobs, tokens.staleness)
        correction = self.correction(proximal, tokens.behavior_logprobs, tokens.sequences)
        values, named = self._policy_losses(tokens, proximal, correction.weights)
        if self.config.off_policy_threshold is not None:
            on = self._near_enough(tokens)
            values = torch.where(on, values, 0.0)
            named["policy/off_policy_share"] = (~on).float()
        named = {
            **named,
            "correction/raw_mean": correction.raw,
            "correction/weight_mean": correction.weights,
            "correction/rejected_share": (~correction.kept).float(),
            "policy/held_back_share": _held_back(tokens, proximal).float(),
        }
        if self.config.correction_cap is not None:
            named["correction/truncated_mean"] = correction.raw.clamp(max=self.config.correction_cap)
        if self.needs_reference and self.config.loss != "opd":
            kl = self._kl(tokens)
            named["policy/kl_reference"] = kl.detach()
            if self.config.kl_in == "loss":
                values = values + self.config.kl_coef * kl
        if self.entropy_weight:
            values = values - self.entropy_weight * tokens.entropies
        return TokenLosses(losses=values, kept=correction.kept, named=named)

    def shares(self, kept: Tensor, sequences: Sequences) -> Tensor:
        return aggregation.shares(kept, sequences, self.config.loss_agg, self.max_completion_length)

    def divisor(self, kept: Tensor, sequences: Sequences) -> float:
        return aggregation.divisor(kept, sequences, self.config.loss_agg)

    def correction(self, proximal: Tensor, behavior: Tensor, sequences: Sequences) -> Correction:
        """[N] weights of the behaviour correction."""
        config = self.config
        band = {"cap": config.correction_cap, "floor": config.correction_floor}
        match config.correction:
            case "none":
                return corrections.none(proximal, behavior)
            case "token_truncate":
                return corrections.token_truncate(proximal, behavior, **band)
            case "token_mask":
                return corrections.token_mask(proximal, behavior, **band, weighted=config.correction_weighted)
            case "sequence_truncate":
                return corrections.sequence_truncate(proximal, behavior, sequences, **band)
            case "sequence_mask":
                return corrections.sequence_mask(
                    proximal, behavior, sequences, **band, weighted=config.correction_weighted
                )
            case "geometric_mask":
                return corrections.geometric_mask(proximal, behavior, sequences, **band)
        raise ValueError(f"objective.correction {config.correction!r} is not known")

    def _near_enough(self, tokens: Tokens) -> Tensor:
        return losses.off_policy_sequences_kept(
            tokens.logprobs,
            tokens.behavior_logprobs,
            tokens.advantages,
            tokens.sequences,
            threshold=self.config.off_policy_threshold,
        )

    def _policy_losses(self, tokens: Tokens, proximal: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        config, now, advantages = self.config, tokens.logprobs, tokens.advantages
        behavior, sequences = tokens.behavior_logprobs, tokens.sequences
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        match config.loss:
            case "pg" | "opd":
                return losses.policy_gradient(now, advantages, weights), {}
            case "ppo_clip" | "decoupled_ppo":
                values = losses.ppo_clip(now, proximal, advantages, weights, **clip, dual_clip=config.dual_clip)
                return values, _clip_shares(now - proximal, advantages, clip)
            case "gspo" | "gspo_token":
                loss = losses.gspo if config.loss == "gspo" else losses.gspo_token
                log_s = sequences.spread(sequences.mean((now - proximal).detach()))
                return loss(now, proximal, advantages, weights, sequences, **clip), _clip_shares(
                    log_s, advantages, clip
                )
            case "gmpo":
                return losses.gmpo(now, proximal, advantages, weights, sequences, **clip), {}
            case "cispo":
                low, high = losses.outside(now - behavior, **clip)
                named = {"policy/clip_low_share": low.float(), "policy/clip_high_share": high.float()}
                return losses.cispo(now, behavior, advantages, **clip), named
            case "sapo":
                gate = {
                    "temperature_positive": config.sapo_temperature_positive,
                    "temperature_negative": config.sapo_temperature_negative,
                }
                return losses.sapo(now, proximal, advantages, weights, **gate), {}
            case "aipo":
                return losses.aipo(now, behavior, advantages, cap=config.aipo_cap), {}
            case "kimi":
                return losses.kimi(now, proximal, advantages, weights, sequences, tau=config.kimi_tau), {}
            case "dppo":
                kept = losses.dppo_kept(now, behavior, advantages, **clip)
                return losses.dppo(now, behavior, advantages, **clip), {"policy/outside_trust_share": (~kept).float()}
            case "clip_cov":
                values = losses.clip_cov(now, proximal, advantages, weights, tokens.chosen, **clip)
                return values, _clip_shares(now - proximal, advantages, clip)
            case "kl_cov":
                coefficient = config.kl_cov_coef
                return losses.kl_cov(now, proximal, advantages, weights, tokens.chosen, coefficient=coefficient), {}
        raise ValueError(f"objective.loss {config.loss!r} is not known")

    def _kl(self, tokens: Tokens) -> Tensor:
        match self.config.kl_estimator:
            case "k1":
                return regularisers.k1(tokens.logprobs, tokens.reference_logprobs)
            case "k2":
                return regularisers.k2(tokens.logprobs, tokens.reference_logprobs)
            case "k3":
                return regularisers.k3(tokens.logprobs, tokens.reference_logprobs)
        return tokens.reference_kl


def _held_back(tokens: Tokens, proximal: Tensor) -> Tensor:
    """[N] bool: tokens with any log-ratio beyond what is exponentiated, to proximal, behaviour or reference policy."""
    policies = [tokens.logprobs.detach(), proximal, tokens.behavior_logprobs]
    pairs = [(policies[0], policies[1]), (policies[1], policies[2]), (policies[0], policies[2])]
    if tokens.reference_logprobs is not None:
        pairs.append((tokens.reference_logprobs, policies[0]))
    return torch.stack([held_back(a - b) for a, b in pairs]).any(dim=0)


def _clip_shares(log_ratio: Tensor, advantages: Tensor, clip: Mapping[str, float]) -> dict[str, Tensor]:
    low, high = losses.clip_shares(log_ratio, advantages, **clip)
    return {"policy/clip_low_share": low.float(), "policy/clip_high_share": high.float()}


@dataclass(frozen=True, slots=True)
class Supervised:
    """Maximum likelihood of given tokens as a token mean: what a warm start trains with."""

    skips_zero_advantage: bool = False
    whole_rollouts: bool = False
    entropy_has_gradient: bool = False
    same_support: bool = False

    def token_losses(self, tokens: Tokens) -> TokenLosses:
        kept = torch.ones_like(tokens.advantages, dtype=torch.bool)
        return TokenLosses(losses=preference.maximum_likelihood(tokens.logprobs), kept=kept, named={})

    def shares(self, kept: Tensor, sequences: Sequences) -> Tensor:
        return aggregation.shares(kept, sequences, "token_mean", 1)

    def divisor(self, kept: Tensor, sequences: Sequences) -> float:
        return aggregation.divisor(kept, sequences, "token_mean")
