"""The time line of a run: every role tells what it does when, by one schema.

Time is the monotonic clock, counted from the run's wall anchor, which is stored once: clock corrections bend nothing,
and a resumed run goes on with the same zero.

Decode steps come thousands a second, so they are written in bunches: one event per 64 steps, or sooner when the batch
drains, the version changes, the generator pauses, or somebody flushes. Sums in a bunch equal the sums over its steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from nearpolicy.records import Event
from nearpolicy.telemetry.metrics import MetricsWriter, split_finite
from nearpolicy.telemetry.sinks import Sinks
from nearpolicy.telemetry.trace import Trace

_LOG = logging.getLogger(__name__)

EVENT_KINDS: Mapping[str, tuple[str, str, str]] = {
    # kind: (role that tells it, its numbers, meaning); * marks kinds that span time
    "admit": ("queue", "", "a prompt got an index and a slot"),
    "prefill": ("generator", "tokens, sampled", "* prompt tokens computed, maybe beside running sequences"),
    "decode_step": (
        "generator",
        "batch, context_sum, ms, sampled, running",
        "* one token for each running sequence; sums over so many steps and their largest batch, if they come together "
        "(steps, batch_max)",
    ),
    "decode": ("generator", "steps, batch_sum, batch_max, context_sum, ms, sampled", "* a bunch of decode steps"),
    "swap": ("generator", "", "* the generator moved to other weights"),
    "finish": ("generator", "tokens, reason", "a sequence ended"),
    "join": ("generator", "name, replicas", "a member with so many replicas joined; the instance is its first"),
    "leave": ("generator", "name, again, reason", "a member left; requests that were issued again elsewhere"),
    "lost": ("generator", "name, again, reason", "a member was lost; requests that were issued again elsewhere"),
    "verify": ("verifier", "queue_s, scored, abstained, failed", "* one rollout judged; its wait; sources by outcome"),
    "budget": ("verifier", "spent, budget", "an endpoint's money is used up; what it is asked from now on fails"),
    "ready": ("queue", "", "a group is complete"),
    "fail": ("queue", "reason", "a group was given up"),
    "filter": ("queue", "reason", "a group was left out for its rewards"),
    "expire": ("queue", "reason, finished", "a group was beyond the bound on staleness"),
    "take": ("queue", "groups", "a step took its groups"),
    "annotate": ("learner", "", "* log-probabilities and values at the start of a step"),
    "forward_backward": ("learner", "model", "* the gradient of one update, of the policy unless a model is named"),
    "optim": ("learner", "model", "* one optimizer step, of the policy unless a model is named"),
    "export": ("sync", "bytes", "* weights leave the learner, with their digests"),
    "load": ("sync", "bytes", "* a generator takes them"),
    "compare": ("sync", "tensors", "* digests compared"),
    "evaluate": ("evaluate", "questions", "* held-out questions under one fixed version"),
    "checkpoint": ("learner", "step", "* training state saved"),
    "alarm": ("monitor", "metric, value, severity, action, text", "a monitor saw a metric beyond its bound"),
    "rollback": ("learner", "step, reason", "* weights and training state of fewer steps; which, and why"),
    "pause": ("monitor", "reason", "* the run waited for a person"),
    "probe": ("monitor", "tokens", "* tokens sampled and scored to compare engine and learner; 0 if it took too long"),
    "diagnosis": ("monitor", "cause, text, ...", "* engine and learner disagree: the fault that explains it"),
    "resume": (
        "learner",
        "step, checkpoint, begun, anew",
        "* a run taken up after so many steps; groups that go on from tokens they had, and that are sampled anew",
    ),
    "idle": ("any", "cause", "* a role waited; the cause names for what"),
}

DECODE_BUNCH = 64
_DRAINS = ("swap", "idle")
"""Kinds by which a generator says that decoding is interrupted."""

BUSY_KINDS: Mapping[str, str] = {
    "prefill": "generate",
    "decode_step": "generate",
    "verify": "verify",
    "export": "sync",
    "load": "sync",
    "compare": "sync",
}
"""Kinds whose seconds add up to a metric ``time/<name>_s``. Verifiers run beside one another, so their sum may exceed
the wall time."""


class _TakesEvents(Protocol):
    def event(self, event: Event) -> None: ...


@dataclass(slots=True)
class _Bunch:
    """Decode steps of one generator under one version that are not written yet."""

    version: int | None
    start: float
    end: float
    steps: int = 0
    batch_sum: int = 0
    batch_max: int = 0
    context_sum: int = 0
    ms: float = 0.0
    sampled: int = 0


class Recorder:
    """Implements `nearpolicy.roles.Telemetry`: events to the store, metrics to ``metrics.jsonl`` and the sinks."""

    def __init__(
        self,
        store: _TakesEvents,
        *,
        wall_anchor: float,
        metrics: MetricsWriter | None = None,
        sinks: Sinks | None = None,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wall_anchor``: wall time of the run's time zero, as the store keeps it."""
        self._store = store
        self._metrics = metrics
        self._sinks = sinks
        self._trace = trace
        self._clock = clock
        # The wall clock is asked once: a run that goes on starts where the wall says, and is monotonic from there.
        self._zero = clock() - max(0.0, time.time() - wall_anchor)
        self._lock = threading.Lock()
        self._bunches: dict[tuple[str, int], _Bunch] = {}
        self._busy = dict.fromkeys(BUSY_KINDS.values(), 0.0)
        self._last: dict[str, tuple[str, float]] = {}
        """Role -> its last event, and when it ended."""
        self._judged: list[tuple[float, float]] = []
        """(seconds, of these waiting) of rollouts judged since the step before."""

    def now(self) -> float:
        """Seconds since the run's anchor."""
        return self._clock() - self._zero

    def last_events(self) -> dict[str, tuple[str, float]]:
        """Role -> (kind of its last event, seconds ago)."""
        now = self.now()
        return {role: (kind, now - end) for role, (kind, end) in self._last.copy().items()}

    def event(
        self,
        role: str,
        kind: str,
        *,
        ago: float = 0.0,
        instance: int | None = None,
        admission: int | None = None,
        sample: int | None = None,
        segment: int | None = None,
        version: int | None = None,
        seconds: float | None = None,
        **numbers: Any,
    ) -> None:
        """One entry of the time line, now, or that was so many seconds ``ago`` (told by somebody else's clock); with
        ``seconds``, one that ends then and began so long before. ``numbers``: see `EVENT_KINDS`."""
        if kind not in EVENT_KINDS:
            raise ValueError(f"{role} tells an event of kind {kind!r}; known kinds: {', '.join(EVENT_KINDS)}")
        end = self._clock() - self._zero - ago
        self._last[role] = (kind, end)
        instance = instance or 0
        with self._lock:
            if kind in BUSY_KINDS:
                spent = numbers["ms"] / 1000 if kind == "decode_step" else seconds or 0.0
                self._busy[BUSY_KINDS[kind]] += spent - numbers.get("queue_s", 0.0)
            if kind == "verify":
                self._judged.append((seconds or 0.0, numbers.get("queue_s", 0.0)))
            if self._trace is not None:
                spent = numbers["ms"] / 1000 if kind == "decode_step" else seconds
                about = {"instance": instance, "admission": admission, "sample": sample, "segment": segment}
                told = {name: value for name, value in (about | {"version": version}).items() if value is not None}
                self._trace.add(role, kind, end - (spent or 0.0), spent, told | numbers, instance)
            if kind == "decode_step":
                self._add_step((role, instance), version, end, numbers)
                return
            if kind in _DRAINS:
                self._write_bunch((role, instance))
            self._store.event(
                Event(
                    time=end if seconds is None else end - seconds,
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
            )

    @contextmanager
    def span(self, role: str, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Tell what the body does when it ends, also by an exception; numbers known only then go into the dict."""
        late: dict[str, Any] = {}
        start = self._clock()
        try:
            yield late
        finally:
            self.event(role, kind, **fields, **late, seconds=self._clock() - start)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics, to file and sinks; values that are not finite are called out."""
        _, not_finite = split_finite(metrics)
        with self._lock:
            if self._metrics is not None:
                self._metrics.write(step, metrics)
            if self._sinks is not None:
                self._sinks.log(step, metrics)
            if self._trace is not None:
                self._trace.step(step, self.now())
        if not_finite:
            _LOG.warning("step %d: not finite: %s", step, ", ".join(f"{n} is {v}" for n, v in not_finite.items()))

    def undo(self, step: int) -> None:
        """This step and later ones are rolled back; their lines do not count any more."""
        with self._lock:
            if self._metrics is not None:
                self._metrics.undo(step)

    def busy_times(self) -> dict[str, float]:
        """``time/<name>_s`` since the last call (see `BUSY_KINDS`)."""
        with self._lock:
            times = {f"time/{name}_s": seconds for name, seconds in self._busy.items()}
            self._busy = dict.fromkeys(self._busy, 0.0)
        return times

    def judging_times(self) -> dict[str, float]:
        """How long verdicts took since the last call, by quantiles; nothing if there were none."""
        with self._lock:
            judged, self._judged = self._judged, []
        if not judged:
            return {}
        seconds, waits = (sorted(column) for column in zip(*judged, strict=True))
        last = len(judged) - 1
        times = {f"verifier/latency_p{q}_s": seconds[round(last * q / 100)] for q in (50, 95, 99)}
        return times | {"verifier/queue_p95_s": waits[round(last * 0.95)], "verifier/judged": float(len(judged))}

    def flush(self) -> None:
        """Write the bunches that are not full yet."""
        with self._lock:
            for where in list(self._bunches):
                self._write_bunch(where)

    def close(self) -> None:
        """Flush, and close what was handed in except the store."""
        self.flush()
        with self._lock:
            if self._metrics is not None:
                self._metrics.close()
            if self._sinks is not None:
                self._sinks.close()
            if self._trace is not None:
                self._trace.close()

    def _add_step(self, where: tuple[str, int], version: int | None, end: float, numbers: Mapping[str, Any]) -> None:
        bunch = self._bunches.get(where)
        if bunch is not None and bunch.version != version:
            self._write_bunch(where)
            bunch = None
        if bunch is None:
            bunch = self._bunches[where] = _Bunch(version, start=end - numbers["ms"] / 1000, end=end)
        bunch.end = end
        bunch.steps += int(numbers.get("steps", 1))
        bunch.batch_sum += int(numbers["batch"])
        bunch.batch_max = max(bunch.batch_max, int(numbers.get("batch_max", numbers["batch"])))
        bunch.context_sum += int(numbers["context_sum"])
        bunch.ms += float(numbers["ms"])
        bunch.sampled += int(numbers["sampled"])
        if bunch.steps >= DECODE_BUNCH or numbers.get("running") == 0:
            self._write_bunch(where)

    def _write_bunch(self, where: tuple[str, int]) -> None:
        bunch = self._bunches.pop(where, None)
        if bunch is None:
            return
        role, instance = where
        names = ("steps", "batch_sum", "batch_max", "context_sum", "ms", "sampled")
        self._store.event(
            Event(
                time=bunch.start,
                role=role,
                kind="decode",
                instance=instance,
                version=bunch.version,
                seconds=bunch.end - bunch.start,
                numbers={name: getattr(bunch, name) for name in names},
            )
        )
