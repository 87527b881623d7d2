"""From the groups of a step to what is trained, as a recipe has it: the one way of a run, its resume and its replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nearpolicy.config import RunConfig
from nearpolicy.records import Group, Row


def assembled(config: RunConfig, groups: Sequence[Group]) -> tuple[Row, ...]:
    """Rows with reward-only advantages, as the run made them of these groups."""
    from nearpolicy.objectives.assign import assign_advantages

    return assign_advantages(
        groups,
        config.objective,
        max_completion_length=config.sampling.max_completion_length,
        left_out=partial(left_out, config),
    )


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
