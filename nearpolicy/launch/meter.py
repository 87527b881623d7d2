"""Whether engine and learner agree about weights they share, watched over a run.

line of a step   its fresh tokens: too few -> a probe after the publication, reported in the next line
                 engine's part beyond what is allowed -> one diagnosis after the next publication, until it is over
rows of a step   completions that end where no end token is -> the same
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearpolicy.launch.diagnosis import Bound, Diagnosis, Examines, diagnose, wrong_stops_of
from nearpolicy.launch.probe import TOKENS_EACH, Probe
from nearpolicy.records import Row, StepReport

SHARE, AT_LEAST_S = 0.02, 5.0
"""Of the run's time, what the learner may spend on probes: while they have taken more there is none. One that is begun
may take what is left of it, or so many seconds."""


@dataclass(slots=True, kw_only=True)
class Meter:
    """One for a run."""

    probe: Probe
    engine: Examines
    bound: Bound
    ends: Sequence[int]
    """End tokens of model and tokenizer."""
    tokens: int
    """Fresh tokens that a step should have; 0: no probe."""
    diagnoses: bool
    """Whether disagreement is looked into."""
    tell: Callable[..., None]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _fresh: float = 0.0
    _due: bool = False
    _lasting: set[str] = field(default_factory=set)
    """What has been said and is not over: gap, stops."""
    _probed: dict[str, float] = field(default_factory=dict)
    _began: float | None = None
    _spent: float = 0.0

    def forget(self) -> None:
        """What was found of weights that do not count any more."""
        self._probed, self._due, self._fresh = {}, False, 0.0

    def probed(self) -> dict[str, float]:
        """Metrics of the probe under the weights that this step began with; nothing if there was none."""
        found, self._probed = self._probed, {}
        return found

    def observe(self, metrics: Mapping[str, float]) -> None:
        """The line of a step, the probe's metrics in it."""
        self._fresh = metrics.get("mismatch/fresh_tokens", 0.0)
        beyond = self.bound.exceeded_by(metrics)
        if beyond is None:
            return
        self._due = beyond and "gap" not in self._lasting
        if not beyond:
            self._lasting.discard("gap")

    async def published(self, report: StepReport, *, ended: bool) -> None:
        """Engine and learner hold the weights of the report, until this returns."""
        if self.diagnoses:
            await self._look_at_stops(report)
        prompts = prompts_of(report.rows)
        if not prompts:
            return
        if self._due and self.diagnoses:
            self._due = False
            self._lasting.add("gap")
            await self._diagnose(prompts, report.version)
        elif self._fresh < self.tokens and not ended:
            await self._measure(prompts, report.version)

    async def _look_at_stops(self, report: StepReport) -> None:
        learner, segments = self.probe.scoring.learner, [row.segment for row in report.rows]
        found = await learner.call(wrong_stops_of, segments, tuple(self.ends), bool(self.probe.sampling.stop))
        if found is None:
            self._lasting.discard("stops")
        elif "stops" not in self._lasting:
            self._lasting.add("stops")
            self._tell(report.version, found, seconds=0.0)

    async def _diagnose(self, prompts: Sequence[np.ndarray], version: int) -> None:
        begin = self.clock()
        found = await diagnose(self.probe, self.engine, prompts, version, self.bound)
        self._tell(version, found, seconds=self.clock() - begin)

    def _tell(self, version: int, found: Diagnosis, *, seconds: float) -> None:
        step = version - 1
        self.tell("diagnosis", version=version, seconds=seconds, cause=found.cause, text=found.text, **found.numbers)
        self.say(f"step {step}: engine and learner disagree ({found.cause}): {found.text}")

    async def _measure(self, prompts: Sequence[np.ndarray], version: int) -> None:
        begin = self.clock()
        self._began = begin if self._began is None else self._began
        left = SHARE * (begin - self._began) - self._spent
        if left < 0.0:
            return
        allowed = max(AT_LEAST_S, left)
        prompts = prompts[: -(-self.tokens // TOKENS_EACH)]
        n = -(-self.tokens // (TOKENS_EACH * len(prompts)))
        try:
            async with asyncio.timeout(allowed):
                self._probed = dict((await self.probe.measure(prompts, version, n=n)).metrics)
        except TimeoutError:
            self._probed = {}
        seconds = self.clock() - begin
        self._spent += seconds
        self.tell("probe", version=version, seconds=seconds, tokens=self._probed.get("mismatch/probe_tokens", 0.0))


def prompts_of(rows: Sequence[Row]) -> list[np.ndarray]:
    """What the engine read first for each group."""
    return list({row.group: row.segment.context_ids for row in reversed(rows)}.values())[::-1]
