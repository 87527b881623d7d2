"""From the rewards of a group to one advantage per rollout; known before any model runs.

Promise: each function is the published formula in float64 and nothing else. No epsilon in a divisor, no clipping, no
dependence on the order of arrival. Four rules hold for all of them:

- A reward is a finite number of at most `LARGEST_REWARD`, or None where nothing scored the rollout. Anything else is a
  ValueError that names its place.
- An unscored rollout takes part in no mean, spread or baseline, and its advantage is 0.
- A spread is the n - 1 one. Rewards without spread give exactly 0 wherever the formula subtracts their mean, although
  the mean in floating point may differ from them.
- Groups arrive apart (`rewards_G`, or `rewards_B_G`, a list of them), so no prompt is ever compared with another one by
  accident; the three estimators that do it on purpose say so.

| estimator | subtracts | divides by | expectation of (1/G) sum A_i grad log pi(y_i) |
|---|---|---|---|
| `reinforce` | nothing | 1 | the gradient |
| `rloo` | mean of the others in the group | 1 | the gradient |
| `reinforce_baseline` | mean of the others in the batch | 1 | the gradient |
| `remax` | reward of the greedy completion | 1 | the gradient |
| `dr_grpo` | mean of the group | 1 | (G - 1)/G of the gradient |
| `opo` | length-weighted mean of the group | 1 | biased unless lengths are equal, then as `dr_grpo` |
| `grpo` | mean of the group | spread of the group | biased |
| `reinforce_plus_plus` | mean of the batch | spread of the batch | biased; gradient / spread in a large batch |
| `reinforce_plus_plus_baseline` | mean of the group | spread of these in the batch | biased; `dr_grpo` / spread there |
| `grpo_passk` | mean over k-subsets | their spread | biased, towards pass@k |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nearpolicy.errors import ObjectiveError

LARGEST_REWARD = 1e30
"""Advantages are kept in float32, and a reward beyond this is a mistake somewhere."""


def grpo(rewards_G: Sequence[float | None], *, scale: bool = True) -> np.ndarray:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / std(r), with the n - 1 spread and without an epsilon; ``scale=False`` leaves the division
    out. Unscored rollouts (None) take no part in mean and spread and get 0. A group without spread gets zeros; so does
    a group of one.
    """
    values, scored = _scored(rewards_G)
    if not _differ(values):
        return np.zeros(len(scored))
    if not scale:
        return _placed(values - _mean(values), scored)
    values = _near_one(values)
    centred = values - _mean(values)
    spread = math.sqrt(np.add.reduce(centred * centred) / (len(values) - 1))
    return _placed(centred / spread, scored)


def dr_grpo(rewards_G: Sequence[float | None]) -> np.ndarray:
    """[G] A_i = r_i - mean(r): no division by the spread (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783, section 3).

    The other half of Dr. GRPO, no division by the length, is `loss_agg: seq_mean_token_sum_norm`. In expectation the
    gradient is (G - 1)/G of the true one, because the mean contains r_i itself; `rloo` is this times G/(G - 1).
    """
    return grpo(rewards_G, scale=False)


def rloo(rewards_G: Sequence[float | None]) -> np.ndarray:
    """[G] A_i = r_i - mean of the other rewards (RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    Unbiased: the baseline of a rollout does not depend on that rollout. ValueError for a group with fewer than two
    scored rollouts, where there are no others (elsewhere such a group is given its bare reward, or zeros).
    """
    values, scored = _scored(rewards_G)
    if len(values) < 2:
        raise ValueError(
            f"rewards_G has {len(values)} scored of {len(scored)} rollouts: a group of one where the estimator needs "
            "two; drop the group, or sample more completions per prompt"
        )
    return _placed(_minus_the_others(values), scored)


def reinforce(rewards_G: Sequence[float | None]) -> np.ndarray:
    """[G] A_i = r_i: no baseline (Williams 1992). Unbiased, and defined for a group of one."""
    return _placed(*_scored(rewards_G))


def reinforce_baseline(rewards_B_G: Sequence[Sequence[float | None]]) -> list[np.ndarray]:
    """B arrays [G] of A_bi = r_bi - mean of all other rewards of the batch, those of other prompts included.

    The leave-one-out baseline of REINFORCE (Kool et al. 2019), taken over the batch: unbiased, since no baseline
    depends on its own rollout, and defined for one completion per prompt. It removes less variance than `rloo` where
    prompts differ in difficulty. ValueError for a batch of one scored rollout.

    Not the `reinforce_baseline` of OpenRLHF, which is `reinforce_plus_plus_baseline` here.
    """
    values, scored_B_G = _scored_batch(rewards_B_G)
    if len(values) == 1:
        raise ValueError(
            "rewards_B_G has 1 scored rollout: a batch of one where the estimator needs two; "
            "use `reinforce`, or take more prompts per step"
        )
    return _split(_minus_the_others(values) if len(values) else values, scored_B_G)


def reinforce_plus_plus(rewards_B_G: Sequence[Sequence[float | None]]) -> list[np.ndarray]:
    """B arrays [G] of A_bi = (r_bi - mean) / std over all scored rollouts of the batch (REINFORCE++, Hu et al. 2025,
    arXiv 2501.03262).

    Every scored rollout counts once. The paper normalises per token: its advantage is the reward minus the KL penalty
    of the tokens still to come, and mean and spread run over all tokens of the batch, so that with an outcome reward
    alone a rollout counts as often as it has tokens. Equal lengths and no KL in the reward make both the same up to
    the n - 1. A batch without spread gets zeros; so does a batch of one.
    """
    values, scored_B_G = _scored_batch(rewards_B_G)
    if not _differ(values):
        return [np.zeros(len(scored)) for scored in scored_B_G]
    values = _near_one(values)
    return _split(_centred(values) / values.std(ddof=1), scored_B_G)


def reinforce_plus_plus_baseline(rewards_B_G: Sequence[Sequence[float | None]]) -> list[np.ndarray]:
    """B arrays [G] of A_bi = (r_bi - mean of its group) / spread of these differences over the batch (REINFORCE++ with
    baseline, Hu et al. 2025, arXiv 2501.03262).

    The differences add up to 0 in every group, so the mean over the batch needs no subtraction of its own. Every
    scored rollout counts once in the spread (in the paper as often as it has tokens). A group without spread gets
    zeros, and its zeros count in the spread; so does a group of one, whose reward others divide by the spread
    undiminished. A batch in which no group has spread gets zeros.
    """
    values, scored_B_G = _scored_batch(rewards_B_G)
    ends = np.cumsum([np.count_nonzero(scored) for scored in scored_B_G])[:-1] if scored_B_G else []
    centred = np.concatenate([_centred(group) for group in np.split(_near_one(values), ends)])
    if _differ(centred):
        centred = centred / centred.std(ddof=1)
    return _split(centred, scored_B_G)


def remax(rewards_G: Sequence[float | None], greedy_reward: float | None) -> np.ndarray:
    """[G] A_i = r_i - reward of the greedy completion of the same prompt (ReMax, Li et al. 2023, arXiv 2310.10505).

    Unbiased, since the greedy completion does not depend on the sampled ones. ``greedy_reward`` None (nothing scored
    it) is a ValueError: without it there is no baseline.
    """
    values, scored = _scored(rewards_G)
    if greedy_reward is None:
        raise ValueError("greedy_reward is None: the greedy completion is unscored, and no baseline is left; drop it")
    _check(greedy_reward, "greedy_reward")
    return _placed(values - greedy_reward, scored)


def opo(rewards_G: Sequence[float | None], lengths_G: Sequence[int]) -> np.ndarray:
    """[G] A_i = r_i - sum(l r) / sum(l): the mean of the group, weighted by length (OPO, Hao et al. 2025, arXiv
    2505.23585).

    The baseline of least variance weighs a reward by the squared norm of its score function; OPO takes that to grow
    with the number of tokens. ``lengths_G``: sampled tokens per rollout; those of unscored rollouts are not read. Equal
    lengths give `dr_grpo`. The sum of the length-weighted advantages is 0. ValueError for a negative length, and if
    the scored rollouts have no token between them.
    """
    values, scored = _scored(rewards_G)
    lengths = np.array(lengths_G, dtype=np.float64)
    if lengths.shape != scored.shape:
        raise ValueError(f"lengths_G has {lengths.size} entries for {len(scored)} rewards; give one per rollout")
    for index in np.flatnonzero(scored & ~((lengths >= 0) & np.isfinite(lengths))):
        raise ValueError(f"lengths_G[{index}] is {lengths[index]}; a length is a number of tokens, 0 or more")
    lengths = lengths[scored]
    if len(values) and not lengths.any():
        raise ValueError("lengths_G is 0 for every scored rollout; there is nothing to weigh by, drop the group")
    if not _differ(values):
        return np.zeros(len(scored))
    return _placed(values - (lengths @ values) / lengths.sum(), scored)


def grpo_passk(rewards_G: Sequence[float | None], *, k: int) -> np.ndarray:
    """[G] advantages of Pass@k Training in closed form (Chen et al. 2025, arXiv 2508.10751, analytical derivation).

    Imagine every k-subset of the N scored rollouts as one sample whose reward is 1 if any of its members is right, let
    `grpo` (n spread) compare the subsets, and give each rollout the mean advantage of the subsets it is in. With w
    wrong rollouts and R = 1 - C(w, k)/C(N, k):

        right: (1 - R) / sqrt(R (1 - R))
        wrong: (1 - R - C(w - 1, k - 1)/C(N - 1, k - 1)) / sqrt(R (1 - R))

    They add up to 0. k = 1 is `grpo` with the n spread. Where no subset passes, or all do (none right, or fewer than
    k wrong), the spread is 0 and so are the advantages. ValueError for a reward other than 0 and 1, and for k outside
    1 .. N. Exact for any N: the counts are integers.

    The `grpo_passk` of verl is another algorithm (arXiv 2503.19595: only the best rollout gets an advantage, its lead
    over the second best).
    """
    values, scored = _scored(rewards_G)
    for index, reward in enumerate(rewards_G):
        if reward is not None and reward not in (0, 1):
            raise ObjectiveError(
                f"rewards_G[{index}] is {reward}; pass@k needs rewards of 0 or 1: "
                "take a binary reward alone, or another advantage"
            )
    if not 1 <= k <= len(values):
        raise ValueError(f"k is {k} and {len(values)} rollouts are scored; pass@k needs 1 <= k <= scored rollouts")
    right = int(values.sum())
    wrong = len(values) - right
    subsets, failing = math.comb(len(values), k), math.comb(wrong, k)
    if failing in (0, subsets):
        return np.zeros(len(scored))
    # (1 - R) / sqrt(R (1 - R)) = sqrt(failing / passing); the other line follows since the advantages add up to 0.
    of_right = math.sqrt(failing / (subsets - failing))
    return _placed(np.where(values == 1.0, of_right, -of_right * right / wrong), scored)


def scale_by_batch_spread(
    advantages_B_G: Sequence[np.ndarray], rewards_B_G: Sequence[Sequence[float | None]]
) -> list[np.ndarray]:
    """B arrays [G]: group-centred advantages divided by the spread of all scored rewards of the batch.

    `scale_rewards: batch` (Lite PPO, "Tricks or traps", arXiv 2508.08221; TRL): one divisor for the batch, so that a
    group with little spread is not blown up. The spread is that of the rewards themselves and contains the difference
    between prompts; that of `reinforce_plus_plus_baseline` does not. Zeros if no two rewards of the batch differ.
    """
    values, scored_B_G = _scored_batch(rewards_B_G)
    shapes = [len(advantages) for advantages in advantages_B_G], [len(scored) for scored in scored_B_G]
    if shapes[0] != shapes[1]:
        raise ValueError(f"advantages_B_G has groups of {shapes[0]} for rewards of {shapes[1]}; give one per reward")
    if not _differ(values):
        return [np.zeros(len(scored)) for scored in scored_B_G]
    exponent = _exponent(values)
    spread = _near_one(values).std(ddof=1)
    return [np.ldexp(np.asarray(advantages, np.float64), -exponent) / spread for advantages in advantages_B_G]


def _scored(rewards_G: Sequence[float | None], name: str = "rewards_G") -> tuple[np.ndarray, np.ndarray]:
    """([S] the scored rewards, [G] bool where they are)."""
    there = [reward is not None for reward in rewards_G]
    for index, reward in enumerate(rewards_G):
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            _check(reward, f"{name}[{index}]")
    values = rewards_G if all(there) else [reward for reward in rewards_G if reward is not None]
    return np.array(values, dtype=np.float64), np.array(there, dtype=bool)


def _check(reward: float, name: str) -> None:
    if not abs(reward) <= LARGEST_REWARD:
        raise ObjectiveError(
            f"{name} is {reward}; a reward is a finite number of at most {LARGEST_REWARD:g} in magnitude, or None "
            "where nothing scored the completion"
        )


def _scored_batch(rewards_B_G: Sequence[Sequence[float | None]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """([S] the scored rewards of all groups in order, B arrays [G] bool where they are)."""
    pairs = [_scored(rewards_G, f"rewards_B_G[{index}]") for index, rewards_G in enumerate(rewards_B_G)]
    return np.concatenate([np.zeros(0), *(values for values, _ in pairs)]), [scored for _, scored in pairs]


def _placed(values: np.ndarray, scored: np.ndarray) -> np.ndarray:
    advantages = np.zeros(len(scored))
    advantages[scored] = values
    return advantages


def _split(values: np.ndarray, scored_B_G: Sequence[np.ndarray]) -> list[np.ndarray]:
    ends = np.cumsum([np.count_nonzero(scored) for scored in scored_B_G])
    return [_placed(values[end - scored.sum() : end], scored) for end, scored in zip(ends, scored_B_G, strict=True)]


def _differ(values: np.ndarray) -> bool:
    return len(values) > 1 and len(set(values.tolist())) > 1  # of few numbers: sooner than their extremes


def _mean(values: np.ndarray) -> float:
    """As `np.mean` has it, which takes several times as long for few numbers."""
    return np.add.reduce(values) / len(values)


def _centred(values: np.ndarray) -> np.ndarray:
    return values - _mean(values) if _differ(values) else np.zeros(len(values))


def _minus_the_others(values: np.ndarray) -> np.ndarray:
    """r_i minus the mean of the others, which is n/(n - 1) times r_i minus the mean of all."""
    return _centred(values) * (len(values) / (len(values) - 1))


def _exponent(values: np.ndarray) -> int:
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def _near_one(values: np.ndarray) -> np.ndarray:
    """The values times the power of two (so without rounding) that brings the largest into [1/2, 1): the squares in a
    spread of tiny rewards would underflow, and 0/0 follow."""
    return np.ldexp(values, -_exponent(values))
