"""Estimators that give every token of a rollout a number of its own, and what they are made of. No model, no torch.

Arrays run over all segments of a rollout, one after another, and are cut back into segments at the end: time goes on
from one segment to the next, and what the policy did not choose is stepped over (`credit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearpolicy.objectives import advantages, credit
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Finish, Group, Rollout

Rewards = Sequence[Sequence[float | None]]
"""One number per rollout of each group; None where a rollout was not scored."""
ByToken = dict[tuple[int, int, int], np.ndarray]
"""(group, sample, place of the segment) -> [T]."""
PenaltyOf = Callable[[int, int, int], np.ndarray | float]
"""(group, sample, place of the segment) -> [T] penalty of each token, or one number for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """What the learner knows of the tokens: arrays [T], one per segment, by (group, sample, place of the segment).

    Positions outside the segment's mask are 0. Empty where the objective does not need it.
    """

    proximal_logprobs: ByToken
    reference_logprobs: ByToken
    reference_kl: ByToken
    """KL from the proximal policy to the reference over the whole vocabulary."""
    values: ByToken = field(default_factory=dict)
    """Of a critic, before each trained token."""


def vtrace_credit(
    groups: Sequence[Group], rewards_B_G: Rewards, config: ObjectiveConfig, annotations: Annotations
) -> tuple[ByToken, ByToken]:
    """(targets of the values, advantages). Without a critic the value of every state of a rollout is the mean reward of
    the group's others."""
    targets: ByToken = {}
    found: ByToken = {}
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        baselines = np.array([0.0 if r is None else r for r in rewards_G]) - leave_one_out(rewards_G)
        for rollout, reward, baseline in zip(group.rollouts, rewards_G, baselines, strict=True):
            mask = _mask(rollout)
            log_rhos = np.concatenate(
                [np.zeros(0)]
                + [
                    annotations.proximal_logprobs[group.index, rollout.sample, k] - s.behavior_logprobs
                    for k, s in enumerate(rollout.segments)
                ]
            )
            both = np.zeros(len(mask)), np.zeros(len(mask))
            compared = bool(annotations.values) or num_scored(rewards_G) > 1
            if reward is not None and mask.any() and compared:
                rewards_T = np.zeros(len(mask))
                rewards_T[np.flatnonzero(mask)[-1]] = reward
                values = annotations.values
                both = credit.vtrace(
                    rewards_T,
                    _over_segments(group, rollout, values) if values else np.full(len(mask), baseline),
                    log_rhos,
                    mask,
                    gamma=config.gamma,
                    rho_bar=config.vtrace_rho,
                    c_bar=config.vtrace_c,
                )
            targets |= _by_segment(group, rollout, both[0])
            found |= _by_segment(group, rollout, both[1])
    return targets, found


def gae_credit(
    groups: Sequence[Group],
    rewards_B_G: Rewards,
    config: ObjectiveConfig,
    penalty_of: PenaltyOf,
    annotations: Annotations,
    lambda_of: Callable[[int], float],
) -> tuple[ByToken, ByToken]:
    """(advantages, whitened over the tokens of the batch if so set, and returns) from a critic's values.

    The reward stands at the last sampled token of the rollout, less each token's own penalty. A completion that the
    length limit cut has ended there like any other, for its reward is that of what stands: nothing is bootstrapped.
    """
    found: ByToken = {}
    returns: ByToken = {}
    trained = []
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
            mask = _mask(rollout)
            both = np.zeros(len(mask)), np.zeros(len(mask))
            if reward is not None and mask.any() and not is_masked(rollout, config):
                both = credit.gae(
                    _token_rewards(group, rollout, reward, penalty_of),
                    _over_segments(group, rollout, annotations.values),
                    mask,
                    gamma=config.gamma,
                    lam=lambda_of(int(mask.sum())),
                )
                trained.append(both[0][mask])
            found |= _by_segment(group, rollout, both[0])
            returns |= _by_segment(group, rollout, both[1])
    return _whitened(found, trained) if config.scale_rewards == "batch" else found, returns


def normalised_returns(
    groups: Sequence[Group], rewards_B_G: Rewards, config: ObjectiveConfig, penalty_of: PenaltyOf
) -> ByToken:
    """REINFORCE++ per token (arXiv 2501.03262): discounted returns of the reward at the end less each token's penalty,
    then one mean and one spread over all tokens of the batch."""
    found: ByToken = {}
    trained = []
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
            mask = _mask(rollout)
            returns = np.zeros(len(mask))
            if reward is not None and mask.any():
                rewards_T = _token_rewards(group, rollout, reward, penalty_of)
                returns = credit.discounted_returns(rewards_T, mask, gamma=config.gamma)
                trained.append(returns[mask])
            found |= _by_segment(group, rollout, returns)
    return _whitened(found, trained)


def _whitened(found: ByToken, trained: Sequence[np.ndarray]) -> ByToken:
    """Less the mean of all ``trained`` tokens, over their spread; zeros where they are all equal."""
    values = np.concatenate(trained) if trained else np.zeros(0)
    if len(values) < 2 or np.ptp(values) == 0.0:
        return {key: np.zeros_like(own) for key, own in found.items()}
    return {key: (own - values.mean()) / values.std(ddof=1) for key, own in found.items()}


def _token_rewards(group: Group, rollout: Rollout, reward: float, penalty_of: PenaltyOf) -> np.ndarray:
    """[T] over all segments: the reward at the last sampled token, less each token's own penalty."""
    mask = _mask(rollout)
    own = [
        np.broadcast_to(penalty_of(group.index, rollout.sample, k), s.mask.shape)
        for k, s in enumerate(rollout.segments)
    ]
    rewards_T = np.where(mask, -np.concatenate(own), 0.0)
    rewards_T[np.flatnonzero(mask)[-1]] += reward
    return rewards_T


def penalties(config: ObjectiveConfig, annotations: Annotations | None) -> PenaltyOf:
    """Coefficient times the estimate of the KL to the reference, [T] for each segment."""
    if config.kl_in != "reward" or annotations is None:
        return lambda group, sample, k: 0.0
    if config.kl_estimator == "full":
        return lambda *key: config.kl_coef * annotations.reference_kl[key]

    def penalty(*key: int) -> np.ndarray:
        # `regularisers` has these on tensors; here there is no torch.
        d = annotations.proximal_logprobs[key].astype(np.float64) - annotations.reference_logprobs[key]
        return (
            config.kl_coef * {"k1": d, "k2": 0.5 * d * d, "k3": np.expm1(np.minimum(-d, 20.0)) + d}[config.kl_estimator]
        )

    return penalty


def is_masked(rollout: Rollout, config: ObjectiveConfig) -> bool:
    """Whether the objective trains no token of it, because it was cut."""
    return config.mask_truncated_completions and rollout.finish is not Finish.STOP


def num_scored(rewards_G: Sequence[float | None]) -> int:
    return sum(reward is not None for reward in rewards_G)


def leave_one_out(rewards_G: Sequence[float | None]) -> np.ndarray:
    """A recorded group may have been enough for another estimator and leave this one nothing to compare."""
    return advantages.rloo(rewards_G) if num_scored(rewards_G) > 1 else np.zeros(len(rewards_G))


def _over_segments(group: Group, rollout: Rollout, by_token: ByToken) -> np.ndarray:
    """[T] of all segments, one after another."""
    return np.concatenate([by_token[group.index, rollout.sample, k] for k in range(len(rollout.segments))])


def _mask(rollout: Rollout) -> np.ndarray:
    """Of all segments, one after another."""
    return np.concatenate([np.zeros(0, bool), *(segment.mask for segment in rollout.segments)])


def _by_segment(group: Group, rollout: Rollout, values: np.ndarray) -> ByToken:
    ends = np.cumsum([len(segment.mask) for segment in rollout.segments])
    return {(group.index, rollout.sample, k): part for k, part in enumerate(np.split(values, ends)[:-1])}
