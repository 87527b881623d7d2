"""From the groups of a step to rows with one advantage per token. No model, no torch.

    rewards -> shaping (length, diversity, KL in the reward) -> estimator -> tokens

Runs in the pipeline on rewards alone. Where an estimator needs log-probabilities the learner runs it once more with
them (`Annotations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nearpolicy.distant import same
from nearpolicy.objectives import advantages, credit, shaping
from nearpolicy.objectives.by_token import (
    Annotations,
    ByToken,
    PenaltyOf,
    Rewards,
    gae_credit,
    is_masked,
    leave_one_out,
    normalised_returns,
    num_scored,
    penalties,
    vtrace_credit,
)
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Group, Row, Segment


def needs_annotations(config: ObjectiveConfig) -> bool:
    """Whether advantages depend on what only the learner knows, so that it has to assign them again."""
    return config.needs_annotations


def needs_logprobs(config: ObjectiveConfig) -> bool:
    """Whether advantages depend on log-probabilities."""
    return config.needs_logprobs


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
    penalty_of = penalties(config, annotations)
    rewards_B_G = _rewards(groups, config, max_completion_length, penalty_of)
    baselines_B = [shaped_baseline(group, config, max_completion_length) for group in groups]
    tokens = _token_advantages(groups, rewards_B_G, baselines_B, config, penalty_of, annotations)
    rows = []
    for group, rewards_G in zip(groups, rewards_B_G, strict=True):
        for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
            cut = is_masked(rollout, config)
            for k, segment in enumerate(rollout.segments):
                trained = segment.mask if reward is not None and not cut else np.zeros(len(segment.mask), bool)
                advantages = tokens(group.index, rollout.sample, k, segment)
                rows.append(_row(group.index, rollout.sample, segment, trained, advantages))
    return tuple(rows)


def _row(group: int, sample: int, segment: Segment, trained: np.ndarray, advantages: np.ndarray | np.float32) -> Row:
    fields = {"group": group, "sample": sample, "segment": segment, "trained": trained}
    num_tokens = len(trained)
    if type(advantages) is np.float32 and trained is segment.mask and segment.num_sampled == num_tokens:
        # Most rows are as plain as this, and need no look through their tokens.
        num_useful = num_tokens * bool(advantages)
        return Row.counted(num_tokens, num_useful, **fields, advantages=same(advantages, num_tokens), replayed=False)
    values = np.where(trained, advantages, 0.0)
    values.setflags(write=False)  # nobody else has it: a row takes it as it is
    return Row(**fields, advantages=values)


def value_targets(
    groups: Sequence[Group],
    config: ObjectiveConfig,
    annotations: Annotations,
    *,
    gae_lambda: float,
    max_completion_length: int | None = None,
) -> ByToken:
    """[T] per segment: what a critic is trained towards, by (group, sample, place of the segment).

    With `gae` the returns for a lambda of their own (decoupled GAE, VC-PPO, arXiv 2503.01491): 1 makes them the
    discounted return of what was sampled, whatever the critic says. With `vtrace` the V-trace targets.
    """
    penalty_of = penalties(config, annotations)
    rewards_B_G = _rewards(groups, config, max_completion_length, penalty_of)
    if config.advantage == "vtrace":
        return vtrace_credit(groups, rewards_B_G, config, annotations)[0]
    return gae_credit(groups, rewards_B_G, config, penalty_of, annotations, lambda num_tokens: gae_lambda)[1]


def shaped_rewards(
    group: Group, config: ObjectiveConfig, max_completion_length: int | None = None
) -> list[float | None]:
    """The group's rewards with what depends on length and on the other completions; None stays None."""
    if not (config.overlong_buffer or config.length_cost or config.length_reward or config.diversity_bonus):
        return [None if reward is None else float(reward) for reward in group.rewards]
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
            return [leave_one_out(rewards_G) for rewards_G in rewards_B_G]
        case "reinforce" | "teacher" | "gae":
            return [advantages.reinforce(rewards_G) for rewards_G in rewards_B_G]
        case "reinforce_baseline":
            if sum(map(num_scored, rewards_B_G)) < 2:
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


def _token_advantages(
    groups: Sequence[Group],
    rewards_B_G: Rewards,
    baselines_B: Sequence[float | None],
    config: ObjectiveConfig,
    penalty_of: PenaltyOf,
    annotations: Annotations | None,
) -> _TokenAdvantages:
    if config.advantage == "teacher" and annotations is not None:
        theirs, own = annotations.reference_logprobs, annotations.proximal_logprobs
        return lambda group, sample, k, segment: theirs[group, sample, k] - own[group, sample, k]
    if config.advantage == "vtrace" and annotations is not None:
        _, by_token = vtrace_credit(groups, rewards_B_G, config, annotations)
        return lambda group, sample, k, segment: by_token[group, sample, k]
    if config.advantage == "gae" and annotations is not None:
        by_token, _ = gae_credit(groups, rewards_B_G, config, penalty_of, annotations, _lambda_of(config))
        return lambda group, sample, k, segment: by_token[group, sample, k]
    if config.advantage == "reinforce_plus_plus" and (config.gamma != 1.0 or config.kl_in == "reward"):
        by_token = normalised_returns(groups, rewards_B_G, config, penalty_of)
        return lambda group, sample, k, segment: by_token[group, sample, k]
    lengths_B_G = [[rollout.num_sampled for rollout in group.rollouts] for group in groups]
    values = {
        (group.index, rollout.sample): float(value)
        for group, values_G in zip(groups, estimate(rewards_B_G, lengths_B_G, baselines_B, config), strict=True)
        for rollout, value in zip(group.rollouts, values_G, strict=True)
    }
    return lambda group, sample, k, segment: np.float32(values[group, sample])


def _lambda_of(config: ObjectiveConfig) -> Callable[[int], float]:
    """Trained tokens of a rollout -> lambda of its advantages."""
    alpha = config.gae_alpha
    if alpha is None:
        return lambda num_tokens: config.gae_lambda
    return lambda num_tokens: credit.length_adaptive_lambda(num_tokens, alpha=alpha)


def _pass_k(rewards_G: Sequence[float | None], k: int) -> np.ndarray:
    """A group with fewer scored rollouts than k says nothing of pass@k."""
    if num_scored(rewards_G) < k:
        return np.zeros(len(rewards_G))
    return advantages.grpo_passk(rewards_G, k=k)


def _rewards(
    groups: Sequence[Group], config: ObjectiveConfig, max_completion_length: int | None, penalty_of: PenaltyOf
) -> Rewards:
    """Shaped, and less the penalties of the whole rollout unless the estimator takes them from each token's own."""
    rewards_B_G = [shaped_rewards(group, config, max_completion_length) for group in groups]
    if config.advantage in ("reinforce_plus_plus", "gae") or config.kl_in != "reward":
        return rewards_B_G
    return [_less_penalties(g, rewards_G, penalty_of) for g, rewards_G in zip(groups, rewards_B_G, strict=True)]


def _less_penalties(group: Group, rewards_G: Sequence[float | None], penalty_of: PenaltyOf) -> list[float | None]:
    less = []
    for rollout, reward in zip(group.rollouts, rewards_G, strict=True):
        parts = [
            np.sum(np.broadcast_to(penalty_of(group.index, rollout.sample, k), s.mask.shape), where=s.mask)
            for k, s in enumerate(rollout.segments)
        ]
        less.append(None if reward is None else float(reward - sum(parts)))
    return less
