"""Calls of a record as messages, for a writer in another process.

Each record becomes a tuple of its fields: the copying of objects by `pickle` itself costs several times as much. Equal
objects of one message (strings, prompts, contexts) are written once. Tokens stay where they are, and those of a batch
are left out: its groups have been said before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from nearpolicy.messages import Message, Reduce, from_runs, pack, runs
from nearpolicy.records import Admission, Baseline, Event, Group, Prompt, Rollout, Verdict
from nearpolicy.store.calls import Call, PackedPrompt, Said, prompt_data, step_of
from nearpolicy.store.payload import Trained


def pack_calls(calls: Sequence[Said]) -> Message:
    return pack(list(calls), _REDUCE)


def _trained(row: Trained) -> tuple[Any, ...]:
    return _as_trained, (row.sample, row.place, runs(row.trained), runs(row.advantages))


def _as_trained(sample: int, place: int, trained: Any, advantages: Any) -> Trained:
    return Trained(sample, place, from_runs(trained), from_runs(advantages))


def _prompt(prompt: Prompt) -> tuple[Any, ...]:
    return PackedPrompt, (prompt.task, prompt_data(prompt))


def _call(call: Call) -> tuple[Any, ...]:
    if call.verb == "consumed":
        batch, report, fates, unsaid = call.arguments
        return Call, ("used", (step_of(batch, report), fates, unsaid))
    return Call, tuple(call)


_NAMES: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind) if field.init)
    for kind in (Admission, Baseline, Event, Group, Rollout, Verdict)
}


def _by_fields(kind: type) -> Reduce:
    values = attrgetter(*_NAMES[kind])
    return lambda record: (_made, (kind, values(record)))


def _made(kind: type, values: tuple[Any, ...]) -> Any:
    return kind(**dict(zip(_NAMES[kind], values, strict=True)))


_REDUCE: Mapping[type, Reduce] = {
    **{kind: _by_fields(kind) for kind in _NAMES},
    Call: _call,
    Prompt: _prompt,
    Trained: _trained,
}
