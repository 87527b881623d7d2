"""Calls of a record as messages, for a writer in another process.

Each record becomes a tuple of its fields: the copying of objects by `pickle` itself costs several times as much. Equal
objects of one message (strings, prompts, contexts) are written once. Tokens stay where they are, and those of a batch
are left out: its groups have been said before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from nearpolicy.messages import Message, Reduce, from_runs, pack, runs
from nearpolicy.records import Admission, Baseline, Event, Group, Prompt, Rollout, Verdict
from nearpolicy.store.calls import Call, PackedPrompt, Said, prompt_data, step_of
from nearpolicy.store.payload import Trained


def pack_calls(calls: Sequence[Said]) -> Message:
    """Of a list of `Said`. All events are one call: nothing in a commit depends on them, and there are many."""
    others: list[Said] = [call for call in calls if type(call) is not Event]
    if events := [tuple(call) for call in calls if type(call) is Event]:
        others.append(Call("happened", (events,)))
    return pack(others, _REDUCE)


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


def _by_fields(kind: type) -> Reduce:
    """All fields, also those that a record works out when it is made: it was checked where it was."""
    values = attrgetter(*(field.name for field in fields(kind)))
    return lambda record: (_made, (kind, values(record)))


def _made(kind: type, values: tuple[Any, ...]) -> Any:
    record = object.__new__(kind)
    for put, value in zip(_PUTS[kind], values, strict=True):
        put(record, value)
    return record


_KINDS = (Admission, Baseline, Group, Rollout, Verdict)
_PUTS: Mapping[type, Sequence[Callable[[Any, Any], None]]] = {
    kind: [getattr(kind, field.name).__set__ for field in fields(kind)] for kind in _KINDS
}
"""What puts each field of a frozen record into its slot."""


_REDUCE: Mapping[type, Reduce] = {
    **{kind: _by_fields(kind) for kind in _KINDS},
    Call: _call,
    Prompt: _prompt,
    Trained: _trained,
}
