"""Which token of a rollout is credited with what: from rewards in a sequence to one number per token.

Promise: time is counted in trained tokens. A row has T positions; ``mask_T`` is True where the policy chose the token,
and the others (observations, tool output, padding) are stepped over as if they were not there:

    position   0  1  2  3  4  5
    mask       T  T  .  .  T  .
    reward     .  .  .  r  .  s
    goes to       r<----+  s<-+

An observation costs no discount, what stands there in values or log-ratios is never read, and a reward on it belongs
to the last trained token before, undiminished. Every function works in float64 and gives 0 outside the mask, so zeros
for a row without a trained token. Wrong shapes, numbers that are not finite where they are read, and a reward before
the first trained token (nobody's doing) are ValueErrors that name the field and the index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nearpolicy.errors import ObjectiveError
from nearpolicy.objectives.advantages import LARGEST_REWARD, grpo


def discounted_returns(
    rewards_T: Sequence[float], mask_T: Sequence[bool], *, gamma: float, bootstrap: float = 0.0
) -> np.ndarray:
    """[T] G_t = r_t + gamma G_{t+1} over trained tokens, with G after the last one = ``bootstrap``.

    ``bootstrap``: what the rest of the episode is worth if it was cut (0 at its end). ``gamma`` in [0, 1], per trained
    token; 1 gives the return-to-go.
    """
    _within("gamma", gamma, 0.0, 1.0)
    places = _trained(mask_T)
    after = _number("bootstrap", bootstrap)
    returns = []
    for reward in reversed(_rewards_of_tokens(rewards_T, places, len(mask_T))):
        after = reward + gamma * after
        returns.append(after)
    return _placed(returns[::-1], places, len(mask_T))


def gae(
    rewards_T: Sequence[float],
    values_T: Sequence[float],
    mask_T: Sequence[bool],
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """([T] advantages, [T] returns) of generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t

    ``values_T``: V before each trained token. V after the last one is ``bootstrap``: 0 where the episode ended, the
    critic's value where it was cut. ``lam`` = 1 is the discounted return minus V, unbiased whatever V is; ``lam`` = 0
    is the one-step error. Nothing is whitened (verl and TRL do it in the same place). A separate lambda for the critic
    (VAPO, decoupled GAE) is a second call.
    """
    _within("gamma", gamma, 0.0, 1.0)
    _within("lam", lam, 0.0, 1.0)
    places = _trained(mask_T)
    rewards = _rewards_of_tokens(rewards_T, places, len(mask_T))
    values = _read("values_T", values_T, places, len(mask_T), LARGEST_REWARD)
    value_after, advantage = _number("bootstrap", bootstrap), 0.0
    advantages = []
    for reward, value in zip(reversed(rewards), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * value_after - value + gamma * lam * advantage
        advantages.append(advantage)
        value_after = value
    advantages = np.array(advantages[::-1])
    return _placed(advantages, places, len(mask_T)), _placed(advantages + values, places, len(mask_T))


def length_adaptive_lambda(num_tokens: int, *, alpha: float) -> float:
    """1 - 1 / (alpha l) for a row of l trained tokens, not below 0: length-adaptive GAE (VAPO, arXiv 2504.05118).

    Makes the weights of the errors, sum of lambda^t = 1 / (1 - lambda), grow as alpha l (the paper takes alpha = 0.05).
    For rows shorter than 1/alpha tokens the formula is negative, which it cannot mean: they get 0.
    """
    if num_tokens < 0 or not alpha > 0:
        raise ValueError(f"num_tokens is {num_tokens} and alpha is {alpha}; a length is 0 or more, alpha above 0")
    return max(0.0, 1.0 - 1.0 / (alpha * num_tokens)) if num_tokens else 0.0


def vtrace(
    rewards_T: Sequence[float],
    values_T: Sequence[float],
    log_rhos_T: Sequence[float],
    mask_T: Sequence[bool],
    *,
    gamma: float,
    rho_bar: float,
    c_bar: float,
    lam: float = 1.0,
    bootstrap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """([T] value targets v, [T] policy-gradient advantages): V-trace (IMPALA, Espeholt et al. 2018, arXiv 1802.01561).

    With rho_t = min(rho_bar, pi/mu) and c_t = lam min(c_bar, pi/mu) of each trained token:

        delta_t = rho_t (r_t + gamma V_{t+1} - V_t)
        v_t = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1})         eq. 1, as the recursion of section 4.1
        A_t = rho_t (r_t + gamma v_{t+1} - V_t)                     section 4.2

    ``log_rhos_T``: log pi(token) - log mu(token), the current minus the behaviour policy; -inf (a token that the
    current policy cannot produce) has ratio 0. V and v after the last token are ``bootstrap``. In expectation the
    targets have one fixed point, the value of the policy proportional to min(rho_bar mu, pi). Ratios of 1, with both
    caps and ``lam`` at 1, give the discounted return and A_t = return - V_t.

    The advantage already carries the ratio rho_t: a loss that uses it must not multiply by a correction weight again.
    IMPALA's own code lets the cap of A_t differ from rho_bar, and some libraries mix v_{t+1} with V_{t+1} where
    lam < 1; neither is in the paper and neither is here.

    ValueError if c_bar > rho_bar (theorem 1 assumes the opposite), and if c_bar above 1 makes the targets overflow.
    """
    _within("gamma", gamma, 0.0, 1.0)
    _within("lam", lam, 0.0, 1.0)
    _within("rho_bar", rho_bar, 0.0, LARGEST_REWARD)
    _within("c_bar", c_bar, 0.0, rho_bar)
    places = _trained(mask_T)
    rewards = _rewards_of_tokens(rewards_T, places, len(mask_T))
    values = _read("values_T", values_T, places, len(mask_T), LARGEST_REWARD)
    log_rhos = _read("log_rhos_T", log_rhos_T, places, len(mask_T), math.inf)
    ratios = np.exp(np.minimum(log_rhos, math.log(LARGEST_REWARD) + 1.0))  # every cap is below, and exp stays finite
    rhos, cs = np.minimum(ratios, rho_bar).tolist(), (lam * np.minimum(ratios, c_bar)).tolist()
    value_after = target_after = _number("bootstrap", bootstrap)
    targets, advantages = [], []
    for reward, value, rho, c in zip(*map(reversed, (rewards, values.tolist(), rhos, cs)), strict=True):
        advantages.append(rho * (reward + gamma * target_after - value))
        delta = rho * (reward + gamma * value_after - value)
        target_after = value + delta + gamma * c * (target_after - value_after)
        targets.append(target_after)
        value_after = value
    if not np.isfinite(targets).all() or not np.isfinite(advantages).all():
        raise ObjectiveError(
            f"c_bar is {c_bar} and its product over {len(places)} tokens overflows; use c_bar at most 1"
        )
    return _placed(targets[::-1], places, len(mask_T)), _placed(advantages[::-1], places, len(mask_T))


def trajectory_credit(value: float, mask_T: Sequence[bool]) -> np.ndarray:
    """[T] one advantage of the whole rollout, on each of its trained tokens (all outcome-reward methods do this)."""
    places = _trained(mask_T)
    return _placed(np.full(len(places), _number("value", value)), places, len(mask_T))


def turn_indices(mask_T: Sequence[bool]) -> np.ndarray:
    """[T] int64: number of the turn a trained token belongs to, counted from 0; -1 outside the mask.

    A turn is a run of the mask. Two turns without a position between them are one: rows that may contain that need at
    least one observation token (a role marker, say) between turns.
    """
    mask = _mask(mask_T)
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return np.where(mask, np.cumsum(starts) - 1, -1)


def turn_credit(values_K: Sequence[float], mask_T: Sequence[bool]) -> np.ndarray:
    """[T] the k-th value on every trained token of the k-th turn. ValueError unless there is one value per turn."""
    turns = turn_indices(mask_T)
    num_turns = int(turns.max(initial=-1)) + 1
    if len(values_K) != num_turns:
        raise ValueError(f"values_K has {len(values_K)} entries and mask_T has {num_turns} turns; give one per turn")
    values = np.array([_number(f"values_K[{turn}]", value) for turn, value in enumerate(values_K)] + [0.0])
    return values[turns]  # -1, outside the mask, is the 0 at the end


def turn_returns(rewards_K: Sequence[float], *, gamma: float) -> np.ndarray:
    """[K] rewards still to come from each turn on, discounted once per turn: what `turn_credit` is given where a turn
    answers for the turns after it."""
    return discounted_returns(rewards_K, np.ones(len(rewards_K), dtype=bool), gamma=gamma)


def turn_and_trajectory_credit(
    turn_values_K: Sequence[float], trajectory_value: float, mask_T: Sequence[bool], *, weight: float
) -> np.ndarray:
    """[T] advantage of the turn plus ``weight`` times the advantage of the whole rollout, on each trained token.

    The combination of multi-turn GRPO (MT-GRPO, Zeng et al. 2025, arXiv 2505.11821), which has it for two turns: a
    turn-level advantage where the turn itself was judged, and the outcome for all. Turns nobody judged have value 0.
    """
    return turn_credit(turn_values_K, mask_T) + _number("weight", weight) * trajectory_credit(trajectory_value, mask_T)


def turn_grpo(rewards_G_K: Sequence[Sequence[float | None]], *, scale: bool = True) -> list[np.ndarray]:
    """G arrays [K] of group-relative advantages per turn: the k-th turn is compared with the k-th turns of the group.

    Rollouts may have different numbers of turns; one that ended earlier takes no part in later comparisons, and a turn
    that only one rollout reached gets 0. From the second turn on, the turns compared follow different histories: this
    is the common heuristic (turn-level rewards of MT-GRPO), not a baseline of the same state.
    """
    for index, rewards_K in enumerate(rewards_G_K):
        for turn, reward in enumerate(rewards_K):
            _number(f"rewards_G_K[{index}][{turn}]", 0.0 if reward is None else reward)
    advantages = [np.zeros(len(rewards_K)) for rewards_K in rewards_G_K]
    for turn in range(max((len(rewards_K) for rewards_K in rewards_G_K), default=0)):
        rollouts = [index for index, rewards_K in enumerate(rewards_G_K) if len(rewards_K) > turn]
        column = grpo([rewards_G_K[index][turn] for index in rollouts], scale=scale)
        for index, advantage in zip(rollouts, column, strict=True):
            advantages[index][turn] = advantage
    return advantages


def process_sum(
    step_rewards_K: Sequence[float | None], step_ends_K: Sequence[int], mask_T: Sequence[bool]
) -> np.ndarray:
    """[T] sum of the rewards of the steps that end at the token or later (process supervision of DeepSeekMath, arXiv
    2402.03300, section 4.1.3, which normalises the rewards over the group first).

    ``step_ends_K``: position of the last token of each step, increasing. A step nobody scored (None) adds nothing.
    Trained tokens after the last step end are credited with nothing.
    """
    rewards = _at_step_ends(_step_rewards(step_rewards_K), step_ends_K, len(mask_T))
    return discounted_returns(rewards, mask_T, gamma=1.0)


def softmin_rewards(step_rewards_K: Sequence[float | None], *, temperature: float) -> np.ndarray:
    """[K] r_k softmax(-r / temperature)_k: step rewards whose sum is about their minimum (PURE, Cheng et al. 2025,
    arXiv 2504.15275).

    The smaller the temperature, the closer the sum to min(r), from above; 0 is the limit, min(r) on the worst step (in
    equal parts on worst steps that tie). Unscored steps take no part and get 0.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; use 0 for the minimum itself, or a small positive number")
    rewards = _step_rewards(step_rewards_K)
    scored = np.array([reward is not None for reward in step_rewards_K], dtype=bool)
    if not scored.any():
        return rewards
    above = np.where(scored, rewards - rewards[scored].min(), math.inf)
    with np.errstate(over="ignore"):  # a tiny temperature: exp(-inf) is the 0 that is meant
        weights = np.exp(-above / temperature) if temperature > 0 else (above == 0.0).astype(np.float64)
    return rewards * weights / weights.sum()


def process_min(
    step_rewards_K: Sequence[float | None],
    step_ends_K: Sequence[int],
    mask_T: Sequence[bool],
    *,
    temperature: float,
) -> np.ndarray:
    """[T] credit by the worst step (PURE, Cheng et al. 2025, arXiv 2504.15275): `process_sum` of `softmin_rewards`.

    With temperature 0: tokens up to the end of the worst step get its reward, tokens after it get 0, so that a good
    step cannot pay for a bad one. PURE then subtracts a leave-one-out baseline; here the caller does. This does not
    follow the gradient of the expected minimum, as `trajectory_credit` of the minimum would: a token after the worst
    step gets 0, not the minimum that it kept from falling further.
    """
    return process_sum(softmin_rewards(step_rewards_K, temperature=temperature).tolist(), step_ends_K, mask_T)


def _mask(mask_T: Sequence[bool]) -> np.ndarray:
    mask = np.asarray(mask_T)
    if mask.ndim != 1 or (mask.size and mask.dtype != np.bool_):
        raise ValueError(f"mask_T is {mask.dtype} of shape {mask.shape}; it is [T] bool, True where the policy chose")
    return mask.astype(bool)


def _trained(mask_T: Sequence[bool]) -> np.ndarray:
    """[N] positions of the trained tokens."""
    return np.flatnonzero(_mask(mask_T))


def _read(name: str, values_T: Sequence[float], places: np.ndarray, length: int, largest: float) -> np.ndarray:
    """[N] the values at ``places``; the others may be anything."""
    values = np.asarray(values_T, dtype=np.float64)
    if values.shape != (length,):
        raise ValueError(f"{name} has shape {values.shape} and mask_T has {length} positions; give one per position")
    read = values[places]
    # Written so that NaN fails; where largest is inf (log-ratios), -inf is a ratio of 0 and only +inf has no meaning.
    fine = read < math.inf if largest == math.inf else np.abs(read) <= largest
    for wrong in np.flatnonzero(~fine):
        limit = "a log-ratio below inf" if largest == math.inf else f"finite and at most {largest:g} in magnitude"
        raise ValueError(f"{name}[{places[wrong]}] is {read[wrong]}; it must be {limit}")
    return read


def _number(name: str, value: float) -> float:
    if not abs(value) <= LARGEST_REWARD:
        raise ValueError(f"{name} is {value}; it must be finite, and at most {LARGEST_REWARD:g} in magnitude")
    return float(value)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie between {low:g} and {high:g}")


def _rewards_of_tokens(rewards_T: Sequence[float], places: np.ndarray, length: int) -> list[float]:
    """[N] reward of each trained token: its own, and those on the positions between it and the next trained token."""
    rewards = _read("rewards_T", rewards_T, np.arange(length), length, LARGEST_REWARD)
    owners = np.searchsorted(places, np.arange(length), side="right") - 1
    for index in np.flatnonzero((owners < 0) & (rewards != 0.0)):
        raise ValueError(
            f"rewards_T[{index}] is {rewards[index]}, before the first trained token; no choice of the policy led to "
            "it: move it to the token that earned it, or leave the row out"
        )
    owned = owners >= 0
    return np.bincount(owners[owned], weights=rewards[owned], minlength=len(places)).tolist()


def _step_rewards(step_rewards_K: Sequence[float | None]) -> np.ndarray:
    """[K] with 0 for unscored steps."""
    return np.array(
        [
            0.0 if reward is None else _number(f"step_rewards_K[{step}]", reward)
            for step, reward in enumerate(step_rewards_K)
        ]
    )


def _at_step_ends(step_rewards: np.ndarray, step_ends_K: Sequence[int], length: int) -> np.ndarray:
    """[T] rewards with each step's at its last position."""
    ends = np.asarray(step_ends_K)
    if ends.shape != step_rewards.shape or (ends.size and not np.issubdtype(ends.dtype, np.integer)):
        raise ValueError(f"step_ends_K is {list(step_ends_K)}; give one position per step reward ({len(step_rewards)})")
    before = np.concatenate([[-1], ends[:-1]]) if ends.size else ends
    for step in np.flatnonzero((ends <= before) | (ends >= length)):
        raise ValueError(f"step_ends_K[{step}] is {ends[step]}; ends increase and lie within the {length} positions")
    rewards = np.zeros(length)
    rewards[ends.astype(np.int64)] = step_rewards
    return rewards


def _placed(values: Sequence[float] | np.ndarray, places: np.ndarray, length: int) -> np.ndarray:
    placed = np.zeros(length)
    placed[places] = values
    return placed
