"""Calls of a record as messages, for a writer in another process.

Each record becomes a tuple of its fields: the copying of objects by `pickle` itself costs several times as much. Equal
objects of one message (strings, prompts, contexts) are written once. Tokens stay where they are, and those of a batch
are left out: its groups have been said before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nearpolicy.messages import Message, from_runs, pack, runs
from nearpolicy.records import Admission, Baseline, Event, Group, Prompt, Rollout, Segment, Verdict
from nearpolicy.store.calls import Call, PackedPrompt, Said, prompt_data, step_of
from nearpolicy.store.payload import Trained


def pack_calls(calls: Sequence[Said]) -> Message:
    return pack(list(calls), _REDUCE)


def _trained(row: Trained) -> tuple[Any, ...]:
    return _as_trained, (row.sample, row.place, runs(row.trained), runs(row.advantages))


def _as_trained(sample: int, place: int, trained: Any, advantages: Any) -> Trained:
    return Trained(sample, place, from_runs(trained), from_runs(advantages))


def _rollout(rollout: Rollout) -> tuple[Any, ...]:
    return _as_rollout, (rollout.sample, rollout.segments, rollout.text, rollout.numerics, rollout.lineage)


def _as_rollout(sample: int, segments: tuple[Segment, ...], text: str, numerics: str, lineage: int) -> Rollout:
    return Rollout(sample=sample, segments=segments, text=text, numerics=numerics, lineage=lineage)


def _verdict(verdict: Verdict) -> tuple[Any, ...]:
    parts, arrays = dict(verdict.parts) or None, dict(verdict.arrays) or None
    return _as_verdict, (verdict.outcome, verdict.value, parts, arrays, verdict.reason, verdict.seconds)


def _as_verdict(outcome: Any, value: Any, parts: Any, arrays: Any, reason: str, seconds: float) -> Verdict:
    return Verdict(
        outcome=outcome,
        value=value,
        parts=parts or _EMPTY,
        arrays=arrays or _EMPTY,
        reason=reason,
        seconds=seconds,
    )


def _baseline(baseline: Baseline) -> tuple[Any, ...]:
    return _as_baseline, (baseline.rollout, baseline.verdicts, baseline.reward)


def _as_baseline(rollout: Rollout, verdicts: Mapping[str, Verdict], reward: float | None) -> Baseline:
    return Baseline(rollout=rollout, verdicts=verdicts, reward=reward)


def _group(group: Group) -> tuple[Any, ...]:
    fields = (group.admission, group.rollouts, group.verdicts, group.rewards, group.failure, group.baseline)
    return _as_group, fields


def _as_group(
    admission: Admission, rollouts: Any, verdicts: Any, rewards: Any, failure: str | None, baseline: Any
) -> Group:
    return Group(
        admission=admission,
        rollouts=rollouts,
        verdicts=verdicts,
        rewards=rewards,
        failure=failure,
        baseline=baseline,
    )


def _admission(admission: Admission) -> tuple[Any, ...]:
    numbers = (admission.index, admission.seed, admission.version, admission.attempt, admission.prompt_index)
    return _as_admission, (admission.prompt, *numbers)


def _as_admission(
    prompt: Any, index: int, seed: int, version: int, attempt: int, prompt_index: int | None
) -> Admission:
    return Admission(index=index, prompt=prompt, seed=seed, version=version, attempt=attempt, prompt_index=prompt_index)


def _prompt(prompt: Prompt) -> tuple[Any, ...]:
    return PackedPrompt, (prompt.task, prompt_data(prompt))


def _event(event: Event) -> tuple[Any, ...]:
    where = (event.instance, event.admission, event.sample, event.segment, event.version)
    return _as_event, (event.time, event.role, event.kind, *where, event.seconds, event.numbers)


def _as_event(
    time: float,
    role: str,
    kind: str,
    instance: int,
    admission: int | None,
    sample: int | None,
    segment: int | None,
    version: int | None,
    seconds: float | None,
    numbers: Mapping[str, Any],
) -> Event:
    return Event(
        time=time,
        role=role,
        kind=kind,
        instance=instance,
        admission=admission,
        sample=sample,
        segment=segment,
        version=version,
        seconds=seconds,
        numbers=numbers,
    )


def _call(call: Call) -> tuple[Any, ...]:
    if call.verb == "consumed":
        batch, report, fates, unsaid = call.arguments
        return Call, ("used", (step_of(batch, report), fates, unsaid))
    return Call, tuple(call)


_EMPTY: Mapping[str, Any] = MappingProxyType({})
_REDUCE: Mapping[type, Any] = {
    Admission: _admission,
    Baseline: _baseline,
    Call: _call,
    Event: _event,
    Group: _group,
    Prompt: _prompt,
    Rollout: _rollout,
    Trained: _trained,
    Verdict: _verdict,
}
