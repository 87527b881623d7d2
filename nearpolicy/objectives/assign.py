"""From the groups of a step to rows with one advantage per token. No model, no torch.

    rewards -> shaping (length, diversity, KL in the reward) -> estimator -> tokens

Runs in the pipeline on rewards alone. Where an estimator needs log-probabilities the learner runs it once more with
them (`Annotations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearpolicy.objectives import advantages, credit, shaping
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Finish, Group, Rollout, Row, Segment

Rewards = Sequence[Sequence[float | None]]
"""One number per rollout of each group; None where a rollout was not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """What the learner knows of the tokens: arrays [T], one per segment, by (group, sample, place of the segment).

    Positions outside the segment's mask are 0. Empty where the objective does not need it.
    """

    proximal_logprobs: dict[tuple[int, int, int], np.ndarray]
    reference_logprobs: dict[tuple[int, int, int], np.ndarray]
    reference_kl: dict[tuple[int, int, int], np.ndarray]
    """KL from the proximal policy to the reference over the whole vocabulary."""
    values: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    """Of a critic, before each trained token."""


def needs_annotations(config: ObjectiveConfig) -> bool:
    """Whether advantages depend on what only the learner knows, so that it has to assign them again."""
    return needs_logprobs(config) or config.advantage == "gae"


def needs_logprobs(config: ObjectiveConfig) -> bool:
    """Whether advantages depend on log-probabilities."""
    return config.kl_in == "reward" or config.advantage in ("vtrace", "teacher")


def assign_advantages(
    groups: Sequence[Group],
    config: ObjectiveConfig,
    *,
    max_completion_length: int | None = None,
    left_out: Callable[[Group], str | None] = lambda group: None,
    annotations: Annotations | None = None,
) -> tuple[Row, ...]:
    """One `Row` per segment, in (group, sample, segment) order; none for groups with a reason to be ``left_out``.

    Tokens of unscored rollouts, and of truncated ones where the objective masks them, are not trained. Without the
    annotations that the objective needs, advantages are those of the shaped rewards alone. A group's greedy completion
    gives a baseline and no row.
    """
    groups = [group for group in groups if left_out(group) is None]
    penalty_of = _penalties(config, annotations)
    rewards_B_G = _rewards(groups, config, max_completion_length, penalty_of)
    baselines_B = [shaped_baseline(group, config, max_completion_length) for group in groups]
    tokens = _token_advantages(groups, rewards_B_G, baselines_B, config, penalty_of, annotations)
    rows = []
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
            cut = _is_masked(rollout, config)
            for k, segment in enumerate(rollout.segments):
                trained = segment.mask & (reward is not None and not cut)
                values = np.where(trained, tokens(group.index, rollout.sample, k, segment), 0.0)
                rows.append(
                    Row(group=group.index, sample=rollout.sample, segment=segment, trained=trained, advantages=values)
                )
    return tuple(rows)


def value_targets(
    groups: Sequence[Group],
    config: ObjectiveConfig,
    annotations: Annotations,
    *,
    gae_lambda: float,
    max_completion_length: int | None = None,
) -> dict[tuple[int, int, int], np.ndarray]:
    """[T] per segment: what a critic is trained towards, by (group, sample, place of the segment).

    With `gae` the returns for a lambda of their own (decoupled GAE, VC-PPO, arXiv 2503.01491): 1 makes them the
    discounted return of what was sampled, whatever the critic says. With `vtrace` the V-trace targets.
    """
    penalty_of = _penalties(config, annotations)
    rewards_B_G = _rewards(groups, config, max_completion_length, penalty_of)
    if config.advantage == "vtrace":
        return _vtrace(groups, rewards_B_G, config, annotations)[0]
    return _gae(groups, rewards_B_G, config, penalty_of, annotations, lambda num_tokens: gae_lambda)[1]


def shaped_rewards(
    group: Group, config: ObjectiveConfig, max_completion_length: int | None = None
) -> list[float | None]:
    """The group's rewards with what depends on length and on the other completions; None stays None."""
    lengths = [rollout.num_sampled for rollout in group.rollouts]
    change = _price_of_length(lengths, config, max_completion_length)
    if config.length_reward:
        right = [None if reward is None else reward >= RIGHT for reward in group.rewards]
        change += config.length_reward * shaping.kimi_length_reward(lengths, right)
    if config.diversity_bonus:
        sampled = [np.concatenate([s.token_ids[s.mask] for s in r.segments] or [[]]) for r in group.rollouts]
        change += shaping.diversity_bonus(
            shaping.ngram_similarity(sampled, n=3),
            weight=config.diversity_bonus,
            takes_part_G=[reward is not None and reward >= RIGHT for reward in group.rewards],
        )
    return [None if r is None else float(r + c) for r, c in zip(group.rewards, change, strict=True)]


def shaped_baseline(group: Group, config: ObjectiveConfig, max_completion_length: int | None = None) -> float | None:
    """The reward of the group's greedy completion, at the same price of length as the samples; None without one.

    It pays no KL to the reference (nor does it in the authors' program and in verl): the penalty needs
    log-probabilities, and the learner takes those of what it trains. Any baseline that does not depend on the samples
    leaves the gradient unbiased.
    """
    if group.baseline is None or group.baseline.reward is None:
        return None
    [change] = _price_of_length([group.baseline.rollout.num_sampled], config, max_completion_length)
    return float(group.baseline.reward + change)


def _price_of_length(lengths: Sequence[int], config: ObjectiveConfig, max_completion_length: int | None) -> np.ndarray:
    """[G] what each completion's own length adds to its reward."""
    change = np.zeros(len(lengths))
    if config.overlong_buffer is not None:
        if max_completion_length is None:
            raise ValueError("objective.overlong_buffer needs max_completion_length, the length at which it ends")
        change += shaping.overlong_penalty(
            lengths,
            max_length=max_completion_length,
            buffer=config.overlong_buffer,
            factor=config.overlong_penalty,
        )
    if config.length_cost:
        change += shaping.token_cost(lengths, per_token=config.length_cost)
    return change


RIGHT = 1.0
"""Reward from which a completion counts as right, for rewards that only right answers may earn or lose."""


def estimate(
    rewards_B_G: Rewards,
    lengths_B_G: Sequence[Sequence[int]],
    baselines_B: Sequence[float | None],
    config: ObjectiveConfig,
) -> list[np.ndarray]:
    """One advantage per rollout of each group, [G] float64 each. ``baselines_B``: rewards of greedy completions."""
    match config.advantage:
        case "grpo":
            if config.scale_rewards == "group":
                return [advantages.grpo(rewards_G) for rewards_G in rewards_B_G]
            centred = [advantages.dr_grpo(rewards_G) for rewards_G in rewards_B_G]
            if config.scale_rewards == "batch":
                return advantages.scale_by_batch_spread(centred, rewards_B_G)
            return centred
        case "dr_grpo":
            return [advantages.dr_grpo(rewards_G) for rewards_G in rewards_B_G]
        case "rloo" | "vtrace":
            return [_leave_one_out(rewards_G) for rewards_G in rewards_B_G]
        case "reinforce" | "teacher" | "gae":
            return [advantages.reinforce(rewards_G) for rewards_G in rewards_B_G]
        case "reinforce_baseline":
            if sum(map(_num_scored, rewards_B_G)) < 2:
                return [np.zeros(len(rewards_G)) for rewards_G in rewards_B_G]
            return advantages.reinforce_baseline(rewards_B_G)
        case "reinforce_plus_plus":
            return advantages.reinforce_plus_plus(rewards_B_G)
        case "reinforce_plus_plus_baseline":
            return advantages.reinforce_plus_plus_baseline(rewards_B_G)
        case "remax":
            return [advantages.remax(r, baseline) for r, baseline in zip(rewards_B_G, baselines_B, strict=True)]
        case "opo":
            return [advantages.opo(r, lengths) for r, lengths in zip(rewards_B_G, lengths_B_G, strict=True)]
        case "grpo_passk":
            return [_pass_k(rewards_G, config.pass_k) for rewards_G in rewards_B_G]
    raise ValueError(f"objective.advantage {config.advantage!r} is not known")


_TokenAdvantages = Callable[[int, int, int, Segment], np.ndarray | float]
"""(group, sample, place of the segment, segment) -> [T], or one number for all its tokens."""
_PenaltyOf = Callable[[int, int, int], np.ndarray | float]


def _token_advantages(
    groups: Sequence[Group],
    rewards_B_G: Rewards,
    baselines_B: Sequence[float | None],
    config: ObjectiveConfig,
    penalty_of: _PenaltyOf,
    annotations: Annotations | None,
) -> _TokenAdvantages:
    if config.advantage == "teacher" and annotations is not None:
        theirs, own = annotations.reference_logprobs, annotations.proximal_logprobs
        return lambda group, sample, k, segment: theirs[group, sample, k] - own[group, sample, k]
    if config.advantage == "vtrace" and annotations is not None:
        _, by_token = _vtrace(groups, rewards_B_G, config, annotations)
        return lambda group, sample, k, segment: by_token[group, sample, k]
    if config.advantage == "gae" and annotations is not None:
        by_token, _ = _gae(groups, rewards_B_G, config, penalty_of, annotations, _lambda_of(config))
        return lambda group, sample, k, segment: by_token[group, sample, k]
    if config.advantage == "reinforce_plus_plus" and (config.gamma != 1.0 or config.kl_in == "reward"):
        by_token = _normalised_returns(groups, rewards_B_G, config, penalty_of)
        return lambda group, sample, k, segment: by_token[group, sample, k]
    lengths_B_G = [[rollout.num_sampled for rollout in group.rollouts] for group in groups]
    values = {
        (group.index, rollout.sample): float(value)
        for group, values_G in zip(groups, estimate(rewards_B_G, lengths_B_G, baselines_B, config), strict=True)
        for rollout, value in zip(group.rollouts, values_G, strict=True)
    }
    return lambda group, sample, k, segment: np.float32(values[group, sample])


_ByToken = dict[tuple[int, int, int], np.ndarray]
"""(group, sample, place of the segment) -> [T]."""


def _vtrace(
    groups: Sequence[Group], rewards_B_G: Rewards, config: ObjectiveConfig, annotations: Annotations
) -> tuple[_ByToken, _ByToken]:
    """(targets of the values, advantages). Without a critic the value of every state of a rollout is the mean reward of
    the group's others."""
    targets: _ByToken = {}
    found: _ByToken = {}
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        baselines = np.array([0.0 if r is None else r for r in rewards_G]) - _leave_one_out(rewards_G)
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
            compared = bool(annotations.values) or _num_scored(rewards_G) > 1
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


def _lambda_of(config: ObjectiveConfig) -> Callable[[int], float]:
    """Trained tokens of a rollout -> lambda of its advantages."""
    alpha = config.gae_alpha
    if alpha is None:
        return lambda num_tokens: config.gae_lambda
    return lambda num_tokens: credit.length_adaptive_lambda(num_tokens, alpha=alpha)


def _gae(
    groups: Sequence[Group],
    rewards_B_G: Rewards,
    config: ObjectiveConfig,
    penalty_of: _PenaltyOf,
    annotations: Annotations,
    lambda_of: Callable[[int], float],
) -> tuple[_ByToken, _ByToken]:
    """(advantages, whitened over the tokens of the batch if so set, and returns) from a critic's values.

    The reward stands at the last sampled token of the rollout, less each token's own penalty. A completion that the
    length limit cut has ended there like any other, for its reward is that of what stands: nothing is bootstrapped.
    """
    found: _ByToken = {}
    returns: _ByToken = {}
    trained = []
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
            mask = _mask(rollout)
            both = np.zeros(len(mask)), np.zeros(len(mask))
            if reward is not None and mask.any() and not _is_masked(rollout, config):
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


def _normalised_returns(
    groups: Sequence[Group], rewards_B_G: Rewards, config: ObjectiveConfig, penalty_of: _PenaltyOf
) -> dict[tuple[int, int, int], np.ndarray]:
    """REINFORCE++ per token (arXiv 2501.03262): discounted returns of the reward at the end less each token's penalty,
    then one mean and one spread over all tokens of the batch."""
    found: dict[tuple[int, int, int], np.ndarray] = {}
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


def _whitened(found: _ByToken, trained: Sequence[np.ndarray]) -> _ByToken:
    """Less the mean of all ``trained`` tokens, over their spread; zeros where they are all equal."""
    values = np.concatenate(trained) if trained else np.zeros(0)
    if len(values) < 2 or np.ptp(values) == 0.0:
        return {key: np.zeros_like(own) for key, own in found.items()}
    return {key: (own - values.mean()) / values.std(ddof=1) for key, own in found.items()}


def _token_rewards(group: Group, rollout: Rollout, reward: float, penalty_of: _PenaltyOf) -> np.ndarray:
    """[T] over all segments: the reward at the last sampled token, less each token's own penalty."""
    mask = _mask(rollout)
    own = [
        np.broadcast_to(penalty_of(group.index, rollout.sample, k), s.mask.shape)
        for k, s in enumerate(rollout.segments)
    ]
    rewards_T = np.where(mask, -np.concatenate(own), 0.0)
    rewards_T[np.flatnonzero(mask)[-1]] += reward
    return rewards_T


def _is_masked(rollout: Rollout, config: ObjectiveConfig) -> bool:
    """Whether the objective trains no token of it, because it was cut."""
    return config.mask_truncated_completions and rollout.finish is not Finish.STOP


def _over_segments(group: Group, rollout: Rollout, by_token: _ByToken) -> np.ndarray:
    """[T] of all segments, one after another."""
    return np.concatenate([by_token[group.index, rollout.sample, k] for k in range(len(rollout.segments))])


def _mask(rollout: Rollout) -> np.ndarray:
    """Of all segments, one after another."""
    return np.concatenate([np.zeros(0, bool), *(segment.mask for segment in rollout.segments)])


def _by_segment(group: Group, rollout: Rollout, values: np.ndarray) -> dict[tuple[int, int, int], np.ndarray]:
    ends = np.cumsum([len(segment.mask) for segment in rollout.segments])
    return {(group.index, rollout.sample, k): part for k, part in enumerate(np.split(values, ends)[:-1])}


def _num_scored(rewards_G: Sequence[float | None]) -> int:
    return sum(reward is not None for reward in rewards_G)


def _leave_one_out(rewards_G: Sequence[float | None]) -> np.ndarray:
    """A recorded group may have been enough for another estimator and leave this one nothing to compare."""
    return advantages.rloo(rewards_G) if _num_scored(rewards_G) > 1 else np.zeros(len(rewards_G))


def _pass_k(rewards_G: Sequence[float | None], k: int) -> np.ndarray:
    """A group with fewer scored rollouts than k says nothing of pass@k."""
    if _num_scored(rewards_G) < k:
        return np.zeros(len(rewards_G))
    return advantages.grpo_passk(rewards_G, k=k)


def _penalties(config: ObjectiveConfig, annotations: Annotations | None) -> _PenaltyOf:
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


def _rewards(
    groups: Sequence[Group], config: ObjectiveConfig, max_completion_length: int | None, penalty_of: _PenaltyOf
) -> Rewards:
    """Shaped, and less the penalties of the whole rollout unless the estimator takes them from each token's own."""
    rewards_B_G = [shaped_rewards(group, config, max_completion_length) for group in groups]
    if config.advantage in ("reinforce_plus_plus", "gae"):
        return rewards_B_G
    return [_less_penalties(g, rewards_G, penalty_of) for g, rewards_G in zip(groups, rewards_B_G, strict=True)]


def _less_penalties(group: Group, rewards_G: Sequence[float | None], penalty_of: _PenaltyOf) -> list[float | None]:
    less = []
    for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
        parts = [
            np.sum(np.broadcast_to(penalty_of(group.index, rollout.sample, k), s.mask.shape), where=s.mask)
            for k, s in enumerate(rollout.segments)
        ]
        less.append(None if reward is None else float(reward - sum(parts)))
    return less
