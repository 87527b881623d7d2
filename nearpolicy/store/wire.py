"""Calls of a record as bytes, for a writer in another process.

Each record becomes a tuple of its fields, and each array its bytes: the copying of objects by `pickle` itself costs
several times as much. Equal objects of one message (strings, prompts, contexts) are written once. The tokens of a batch
are left out: its groups have been said before.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from nearpolicy.records import Admission, Baseline, Event, Group, Prompt, Rollout, Segment, Verdict
from nearpolicy.store.calls import Call, PackedPrompt, Said, prompt_data, step_of


def pack_calls(calls: Sequence[Said]) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(list(calls))
    return file.getvalue()


def unpack_calls(data: bytes) -> list[Said]:
    """Arrays are views of ``data``, so that records take them without a copy."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.dispatch_table = {**_REDUCE, Segment: self._segment}
        self._contexts: dict[int, bytes] = {}
        """Those of a group are one array."""

    def _segment(self, segment: Segment) -> tuple[Any, ...]:
        context = self._contexts.get(id(segment.context_ids))
        if context is None:
            context = self._contexts[id(segment.context_ids)] = segment.context_ids.tobytes()
        tokens, logprobs, versions = segment.token_ids, segment.behavior_logprobs, segment.versions
        mask = None if segment.num_sampled == len(tokens) else segment.mask.tobytes()
        extras = dict(segment.extras) if segment.extras else None
        fields = (context, tokens.tobytes(), logprobs.tobytes(), versions.tobytes(), mask, segment.finish, extras)
        return _as_segment, fields


def _as_segment(
    context: bytes,
    tokens: bytes,
    logprobs: bytes,
    versions: bytes,
    mask: bytes | None,
    finish: Any,
    extras: Mapping[str, np.ndarray] | None,
) -> Segment:
    return Segment(
        context_ids=np.frombuffer(context, np.int32),
        token_ids=np.frombuffer(tokens, np.int32),
        mask=_all_true(len(tokens) // 4) if mask is None else np.frombuffer(mask, np.bool_),
        behavior_logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32),
        finish=finish,
        extras=extras or _EMPTY,
    )


@lru_cache(maxsize=256)
def _all_true(length: int) -> np.ndarray:
    mask = np.ones(length, np.bool_)
    mask.setflags(write=False)
    return mask


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


def _mapping(mapping: Mapping[Any, Any]) -> tuple[Any, ...]:
    return dict, (dict(mapping),)


_EMPTY: Mapping[str, Any] = MappingProxyType({})
_REDUCE: Mapping[type, Any] = {
    **copyreg.dispatch_table,
    Admission: _admission,
    Baseline: _baseline,
    Call: _call,
    Event: _event,
    Group: _group,
    MappingProxyType: _mapping,
    Prompt: _prompt,
    Rollout: _rollout,
    Verdict: _verdict,
}
