"""From the groups of a step to what is trained, as a recipe has it: the one way of a run, its resume and its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from nearpolicy.config import RunConfig
from nearpolicy.records import Batch, Group, Row


def assembled(config: RunConfig, groups: Sequence[Group], step: int) -> tuple[Row, ...]:
    """Rows with reward-only advantages, as the run made them of these groups for this step."""
    from nearpolicy.objectives.assign import assign_advantages

    rows = assign_advantages(
        groups,
        config.objective,
        max_completion_length=config.sampling.max_completion_length,
        left_out=partial(left_out, config),
    )
    if (soft := config.queue.soft_staleness) is None:
        return rows
    weights = {group.index: age_weight(step - group.oldest_version, soft) for group in groups}
    return tuple(
        row if weights[row.group] == 1 else replace(row, advantages=row.advantages * np.float32(weights[row.group]))
        for row in rows
    )


def replayed(config: RunConfig, groups: Sequence[Group]) -> tuple[Row, ...]:
    """Rows of the successes of groups that earlier steps have used up, with the advantages of then."""
    from nearpolicy.objectives.assign import assign_advantages

    if not groups:
        return ()
    least, limit = config.queue.replay.min_reward, config.sampling.max_completion_length
    rewards = {(g.index, r.sample): reward for g in groups for r, reward in zip(g.rollouts, g.rewards, strict=True)}
    rows = assign_advantages(groups, config.objective, max_completion_length=limit)
    succeeded = {key for key, reward in rewards.items() if reward is not None and reward >= least}
    return tuple(
        replace(row, replayed=True) for row in rows if (row.group, row.sample) in succeeded and row.advantages.any()
    )


def as_learned(config: RunConfig, batch: Batch) -> Batch:
    """A recorded batch with the rows that this recipe makes of its groups."""
    rows = (*assembled(config, batch.groups, batch.step), *replayed(config, batch.replayed))
    return replace(batch, rows=rows)


def age_weight(staleness: int, soft: int) -> float:
    """1 up to ``soft`` steps, then 1/2, 1/3, ..."""
    return 1 / (1 + max(0, staleness - soft))


def left_out(config: RunConfig, group: Group) -> str | None:
    """Why a group is left out for its rewards, as the recipe has it; None if it is not."""
    from nearpolicy.objectives import shaping

    limits, reason = config.queue, None
    if limits.drop_zero_variance_groups or limits.dynamic_sampling:
        baseline = None if group.baseline is None else group.baseline.reward
        reason = shaping.zero_variance_reason(group.rewards, baseline)
    if reason is None and limits.max_pass_rate is not None:
        reason = shaping.pass_rate_reason(group.rewards, too_easy_from=limits.max_pass_rate)
    return reason
