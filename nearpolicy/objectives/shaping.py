"""What is added to rewards before they are compared, and which groups are not worth comparing.

Promise: shaping is a pure function of rewards, lengths and tokens, so it is the same in synchronous and asynchronous
runs, in training and in a report. Penalties and bonuses come back as arrays of their own, [G] float64, to be added by
the caller and logged under their own names; nothing here changes a reward in place. A filter gives a reason, a short
string that a counter can be named after, or None to keep the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlong_penalty(lengths_G: Sequence[int], *, max_length: int, buffer: int, factor: float = 1.0) -> np.ndarray:
    """[G] soft overlong punishment (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.4): from 0 to -``factor``.

    0 up to ``max_length - buffer`` tokens, then linear, -``factor`` at ``max_length`` and beyond. With 100, 20 and 1:
    lengths 80, 81, 90, 100, 101 cost 0, 0.05, 0.5, 1, 1. Tokens are sampled ones, the end token included.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer} and max_length {max_length}; the buffer is 1 .. max_length tokens")
    if not (np.isfinite(factor) and factor >= 0):
        raise ValueError(f"factor is {factor}; it is the penalty at max_length, 0 or more")
    into_buffer = _lengths(lengths_G) - (max_length - buffer)
    return 0.0 - factor * np.clip(into_buffer / buffer, 0.0, 1.0)  # 0.0 minus, so that no penalty is 0.0 and not -0.0


def kimi_length_reward(lengths_G: Sequence[int], correct_G: Sequence[bool | None]) -> np.ndarray:
    """[G] length reward of Kimi k1.5 (arXiv 2501.12599, "Length Penalty"), to be added with a weight.

    lambda_i = 0.5 - (len_i - min) / (max - min) over the group; a right answer gets lambda_i, a wrong one
    min(0, lambda_i); all 0 if no two lengths differ. Unscored answers (None) count in neither min nor max and get 0.
    """
    lengths = _lengths(lengths_G)
    if len(correct_G) != len(lengths):
        raise ValueError(f"correct_G has {len(correct_G)} entries for {len(lengths)} lengths; give one per rollout")
    scored = np.array([correct is not None for correct in correct_G], dtype=bool)
    rewards = np.zeros(len(lengths))
    if not scored.any() or np.ptp(lengths[scored]) == 0.0:
        return rewards
    shortest = lengths[scored].min()
    values = 0.5 - (lengths - shortest) / np.ptp(lengths[scored])
    right = np.array([bool(correct) for correct in correct_G], dtype=bool)
    return np.where(scored, np.where(right, values, np.minimum(values, 0.0)), 0.0)


def token_cost(lengths_G: Sequence[int], *, per_token: float) -> np.ndarray:
    """[G] -``per_token`` for every token: the plain price of length, the same for right and wrong answers."""
    if not (np.isfinite(per_token) and per_token >= 0):
        raise ValueError(f"per_token is {per_token}; it is a cost, 0 or more")
    return 0.0 - per_token * _lengths(lengths_G)


def ngram_similarity(tokens_G_T: Sequence[Sequence[int]], *, n: int) -> np.ndarray:
    """[G, G] Jaccard similarity of the sets of token n-grams: shared / all, 1 for equal sets, symmetric.

    A completion shorter than n tokens has one gram, itself; so short completions are alike only if they are equal.
    """
    if n < 1:
        raise ValueError(f"n is {n}; an n-gram has at least 1 token")
    grams_G = [_ngrams([int(token) for token in tokens], n) for tokens in tokens_G_T]
    similarity = np.eye(len(grams_G))
    for i, grams in enumerate(grams_G):
        for j in range(i):
            shared = len(grams & grams_G[j])
            similarity[i, j] = similarity[j, i] = shared / (len(grams) + len(grams_G[j]) - shared)
    return similarity


def diversity_bonus(
    similarity_G_G: np.ndarray, *, weight: float, takes_part_G: Sequence[bool] | None = None
) -> np.ndarray:
    """[G] ``weight`` times the mean dissimilarity to the others of the group: weight x mean over j != i of (1 - s_ij).

    Between 0 (a copy of all others) and ``weight`` (nothing in common with any). Only rollouts that take part (all
    unless given) are compared and get a bonus; pass the right ones, or being wrong in an unusual way pays too. Fewer
    than two give zeros. The diagonal is not read. ValueError unless the matrix is square and within [0, 1].
    """
    similarity = np.asarray(similarity_G_G, dtype=np.float64)
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1]:
        raise ValueError(f"similarity_G_G has shape {similarity.shape}; it is [G, G], one row per rollout")
    if not np.isfinite(weight):
        raise ValueError(f"weight is {weight}; it must be finite")
    others = ~np.eye(len(similarity), dtype=bool)
    for i, j in np.argwhere(others & ~((similarity >= 0.0) & (similarity <= 1.0))):
        raise ValueError(f"similarity_G_G[{i}, {j}] is {similarity[i, j]}; a similarity lies between 0 and 1, clip it")
    part = np.ones(len(similarity), bool) if takes_part_G is None else np.asarray(takes_part_G, dtype=bool)
    if part.shape != (len(similarity),):
        raise ValueError(f"takes_part_G has shape {part.shape} for {len(similarity)} rollouts; give one per rollout")
    num_others = np.count_nonzero(part) - 1
    if num_others < 1:
        return np.zeros(len(similarity))
    pairs = others & part[:, None] & part[None, :]
    return weight * np.where(pairs, 1.0 - similarity, 0.0).sum(axis=1) / num_others


def zero_variance_reason(rewards_G: Sequence[float | None], baseline: float | None = None) -> str | None:
    """Why a group carries no signal: `too_few_scored` (under two), `zero_variance` (all scored ones equal), or None.

    The filter of DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), for rewards of any kind. Where they are
    compared with a ``baseline`` and not with one another, one that differs from it is a signal.
    """
    scored = _scored(rewards_G)
    if len(scored) < (2 if baseline is None else 1):
        return "too_few_scored"
    compared = scored if baseline is None else [*scored, *_scored([baseline])]
    return "zero_variance" if min(compared) == max(compared) else None


def pass_rate_reason(
    rewards_G: Sequence[float | None],
    *,
    passing: float = 1.0,
    too_easy_from: float | None = None,
    too_hard_to: float | None = None,
) -> str | None:
    """Why a group lies outside the wanted range of difficulty: `unscored`, `too_easy`, `too_hard`, or None.

    The pass rate is the share of scored rollouts with a reward of ``passing`` or more (count before any penalty is
    added). `too_easy` at ``too_easy_from`` or above, as ScaleRL drops prompts at 0.9 (arXiv 2510.13786); `too_hard` at
    ``too_hard_to`` or below; either may be None. The bounds belong to what is dropped: 9 of 10 is 0.9 exactly.
    """
    bounds = {"too_easy_from": too_easy_from, "too_hard_to": too_hard_to}
    for name, bound in bounds.items():
        if bound is not None and not 0.0 <= bound <= 1.0:
            raise ValueError(f"{name} is {bound}; a pass rate lies between 0 and 1")
    if too_easy_from is not None and too_hard_to is not None and too_hard_to >= too_easy_from:
        raise ValueError(f"too_hard_to is {too_hard_to} and too_easy_from {too_easy_from}; no group would be left")
    scored = _scored(rewards_G)
    if not scored:
        return "unscored"
    rate = sum(reward >= passing for reward in scored) / len(scored)
    if too_easy_from is not None and rate >= too_easy_from:
        return "too_easy"
    return "too_hard" if too_hard_to is not None and rate <= too_hard_to else None


def _lengths(lengths_G: Sequence[int]) -> np.ndarray:
    lengths = np.array(lengths_G, dtype=np.float64)
    for index in np.flatnonzero(~((lengths >= 0) & np.isfinite(lengths))):
        raise ValueError(f"lengths_G[{index}] is {lengths[index]}; a length is a number of tokens, 0 or more")
    return lengths


def _scored(rewards_G: Sequence[float | None]) -> list[float]:
    for index, reward in enumerate(rewards_G):
        if reward is not None and not np.isfinite(reward):
            raise ValueError(f"rewards_G[{index}] is {reward}; a reward is finite, or None where nothing scored it")
    return [reward for reward in rewards_G if reward is not None]


def _ngrams(tokens: list[int], n: int) -> set[tuple[int, ...]]:
    if len(tokens) < n:
        return {tuple(tokens)}
    return {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}
