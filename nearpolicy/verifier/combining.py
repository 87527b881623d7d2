"""From the verdicts on a rollout to its reward: weights, and gates between sources.

    verdicts by source -> the gate of each: open, closed or unknown -> weighted sum -> a number, or None

A verdict itself is never changed by another one: its value stays what its source said, and only the sum knows of gates.
"""

from __future__ import annotations

import enum
import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import RewardConfig

GATED = "gated"
"""The part that says of a source with requirements whether they kept its value out of the reward: 1, else 0."""


class Gate(enum.Enum):
    """Whether what a source says counts."""

    OPEN = "open"
    """All that it requires is met, or it requires nothing."""
    CLOSED = "closed"
    """Something it requires is not met: it adds nothing to the reward."""
    UNKNOWN = "unknown"
    """Nothing it requires is known to be missed, but something abstained or failed: nobody can say what it adds."""


def gates(verdicts: Mapping[str, Verdict], rewards: Sequence[RewardConfig]) -> dict[str, Gate]:
    """The gate of every source.

    A requirement is met if the named source scored at least the threshold and its own gate is open: where style
    requires the answer and the answer requires the form, a completion without the form gets nothing for its style.
    """
    found = {reward.source: Gate.OPEN for reward in rewards}
    required = {reward.source: reward.requires for reward in rewards if reward.requires}
    for source in _in_order(required):
        states = [
            state
            for name, threshold in required.get(source, {}).items()
            for state in (_reaches(verdicts.get(name), threshold), found[name])
        ]
        found[source] = next((gate for gate in (Gate.CLOSED, Gate.UNKNOWN) if gate in states), Gate.OPEN)
    return found


def _reaches(verdict: Verdict | None, threshold: float) -> Gate:
    if verdict is None or verdict.value is None:
        return Gate.UNKNOWN
    return Gate.OPEN if verdict.value >= threshold else Gate.CLOSED


def _in_order(required: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    """Sources such that what one requires comes before it."""
    return graphlib.TopologicalSorter(required).static_order() if required else ()


def weighted_reward(verdicts: Mapping[str, Verdict], rewards: Sequence[RewardConfig]) -> float | None:
    """The reward of one rollout: the weighted sum of what was scored; None if nothing was, or if any source failed.

    Weights 1.0 and 0.5: [1.0, abstained] gives 1.0, [abstained, 0.4] gives 0.2, [abstained, abstained] gives None. With
    a failed source the sum is unknown, not smaller: a failure never yields a number.

    What stands behind a closed gate adds 0. What stands behind an unknown one is left out as if it had abstained too:
    where nothing else was scored, the completion has no reward.
    """
    if any(verdict.outcome is Outcome.FAILED for verdict in verdicts.values()):
        return None
    gate_of, weights = gates(verdicts, rewards), {reward.source: reward.weight for reward in rewards}
    scored = [
        weights[name] * verdict.value if gate_of[name] is Gate.OPEN else 0.0
        for name, verdict in verdicts.items()
        if verdict.outcome is Outcome.SCORED and gate_of[name] is not Gate.UNKNOWN
    ]
    return sum(scored) if scored else None


def with_gates_shown(verdicts: Mapping[str, Verdict], rewards: Sequence[RewardConfig]) -> dict[str, Verdict]:
    """The verdicts, those behind a gate with the part `GATED`; it is left out where nobody can tell."""
    shown = {Gate.OPEN: 0.0, Gate.CLOSED: 1.0}
    gate_of, gated = gates(verdicts, rewards), {reward.source for reward in rewards if reward.requires}
    return {
        name: replace(verdict, parts={**verdict.parts, GATED: shown[gate_of[name]]})
        if name in gated and verdict.outcome is Outcome.SCORED and gate_of[name] in shown
        else verdict
        for name, verdict in verdicts.items()
    }


def counts(verdicts: Mapping[str, Verdict], rewards: Sequence[RewardConfig], source: str) -> bool | None:
    """Whether what a source says counts; None if nobody can say."""
    return {Gate.OPEN: True, Gate.CLOSED: False, Gate.UNKNOWN: None}[gates(verdicts, rewards)[source]]
