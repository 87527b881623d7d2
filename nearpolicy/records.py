"""What flows through the system: small frozen records over read-only numpy arrays.

    Prompt -> Admission -> Rollout (segments) -> Group (with verdicts) -> Batch (with advantages)

Each type means "this much is known"; no later stage fills fields into an earlier one. Arrays are marked read-only when
a record is made, so that a record can be shared between threads without a copy. Those of tokens may lie elsewhere
(`nearpolicy.distant.Distant`): what is needed to direct a run (lengths, versions, counts) never does.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nearpolicy.distant import Distant, same

_EMPTY: Mapping[str, Any] = MappingProxyType({})

ROLLBACK, REMADE = "rollback", "remade"
"""Kinds of a `Branch`."""
BASELINE = -1
"""Sample number of a group's greedy completion, which has no place among its samples."""


def read_only(values: Any, dtype: Any) -> np.ndarray:
    """A contiguous array of ``dtype`` that nobody can write to; copies only what is not already so. What is not here
    stays where it is, and so does one number that stands for all."""
    kind = type(values)
    if kind is np.ndarray and values.dtype == dtype:
        flags = values.flags
        if not flags.writeable and (flags.c_contiguous or values.strides == (0,)):
            return values
    elif kind is Distant and values.dtype == dtype:
        return values
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.copy() if array is values else array
        array.setflags(write=False)
    return array


class Finish(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """The policy chose a stop token, or a stop string appeared."""
    LENGTH = "length"
    """The length limit cut it; the last token is not an end token."""
    ABORTED = "aborted"
    """Somebody called abort; what was sampled so far is kept."""
    FAILED = "failed"
    """The engine could not finish it."""


class Outcome(enum.Enum):
    """How a verification ended. Only ``SCORED`` ever becomes a number."""

    SCORED = "scored"
    ABSTAINED = "abstained"
    """The verifier has nothing to say about this completion; it takes part in no baseline of this source."""
    FAILED = "failed"
    """The verifier, not the completion, is at fault (crash, deadline, malformed answer)."""


class Fate(enum.Enum):
    """What became of a sampled token; the sum over all fates equals the tokens generated."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    MASKED = "masked"
    """In a consumed group, but not trained: excluded by a rule (truncated completion, unscored sample), or every update
    with it was skipped because its gradient was not finite."""
    ZERO_ADVANTAGE = "zero_advantage"
    BASELINE = "baseline"
    """In the greedy completion of a consumed group: it gave the group its baseline, and is never trained."""
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"
    ABORTED = "aborted"
    LOST = "lost"
    """Admitted, but not stored when a process died; found at restart."""
    REPLAYED = "replayed"
    """Trained once more, in a later step; counted apart, beside the fate that the token has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a task, before it is rendered into tokens."""

    id: str
    """Stable name within its task, for people and for reports; never a source of randomness."""
    task: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Chat messages; exactly one of ``text`` and ``messages`` is set."""
    columns: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """Everything else in the row, passed to rewards by name."""
    attachments: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """Opaque objects for environments, and the prompt `as_written` before chat; they do not leave the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A prompt that holds a slot. ``index`` decides prompt, random numbers and place in the queue."""

    index: int
    prompt: Prompt
    seed: int
    """Seed of the run; random numbers come from (seed, index, sample, turn, position, purpose)."""
    version: int
    """Newest published version at admission: no token of this admission is older."""
    attempt: int = 0
    """Counts retries; a retry keeps its index and therefore repeats its numbers."""
    prompt_index: int | None = None
    """Place of the prompt in the order of the data, where it is not ``index``: prompts may come again."""

    @property
    def place(self) -> int:
        """Of the prompt in the order of the data."""
        return self.index if self.prompt_index is None else self.prompt_index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A stretch of tokens that the learner sees as one row. Position t means the same token in every array."""

    context_ids: np.ndarray
    """[C] int32: everything the model had read before; never trained."""
    token_ids: np.ndarray
    """[T] int32: sampled tokens, the end token included if the policy chose it, and observations between them."""
    mask: np.ndarray
    """[T] bool: True where the policy chose the token."""
    behavior_logprobs: np.ndarray
    """[T] float32 log mu(token) under the distribution really sampled from; 0 where mask is False."""
    versions: np.ndarray
    """[T] int32 weights that sampled each token; -1 where mask is False."""
    finish: Finish
    extras: Mapping[str, np.ndarray] = field(default_factory=lambda: _EMPTY)
    """Named per-token arrays, empty by default."""
    num_sampled: int = field(init=False)
    """Tokens the policy chose."""

    def __post_init__(self) -> None:
        for name, dtype in _SEGMENT_DTYPES.items():
            given = getattr(self, name)
            if (array := read_only(given, dtype)) is not given:
                object.__setattr__(self, name, array)
        length = len(self.token_ids)
        if not length == len(self.mask) == len(self.behavior_logprobs) == len(self.versions):
            names = ("token_ids", "mask", "behavior_logprobs", "versions")
            lengths = {name: len(getattr(self, name)) for name in names}
            raise ValueError(f"a segment's per-token arrays must have one length, found {lengths}")
        object.__setattr__(self, "num_sampled", int(np.count_nonzero(self.mask)))

    @classmethod
    def counted(cls, num_sampled: int, **fields: Any) -> Segment:
        """By whoever knows how many, of arrays that are of the right type and length and that nobody can write to."""
        return _filled(cls, fields | {"num_sampled": num_sampled})


def _filled(kind: Any, fields: Mapping[str, Any]) -> Any:
    record = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


def _oldest_of(segment: Segment) -> int:
    """Version, of a segment with tokens that the policy chose."""
    versions, mask = segment.versions, segment.mask
    if versions.strides == (0,):  # one number for all
        return int(versions[0])
    return int((versions if segment.num_sampled == len(mask) else versions[mask]).min())


_SEGMENT_DTYPES = {
    "context_ids": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
    "mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}


@functools.lru_cache(maxsize=4096)
def all_chosen(length: int) -> np.ndarray:
    """The mask of tokens that the policy chose, all of them."""
    return same(np.True_, length)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One attempt at a prompt: its segments, and the text people and verifiers read."""

    sample: int
    """Place in the group, 0 .. G-1; `BASELINE` for its greedy completion."""
    segments: tuple[Segment, ...]
    text: str
    """Decoded sampled tokens without the stop token or stop string. Never tokenised again."""
    numerics: str
    """Mode of the engine that made it: exact or fast."""
    lineage: int = 0

    @property
    def finish(self) -> Finish:
        return self.segments[-1].finish if self.segments else Finish.FAILED

    @property
    def num_sampled(self) -> int:
        return sum([segment.num_sampled for segment in self.segments])

    @property
    def oldest_version(self) -> int | None:
        """Smallest version among the sampled tokens, or None without any."""
        oldest = [int(s.versions[s.mask].min()) for s in self.segments if s.mask.any()]
        return min(oldest, default=None)

    @property
    def newest_version(self) -> int | None:
        """Largest version among the sampled tokens, or None without any."""
        newest = [int(s.versions[s.mask].max()) for s in self.segments if s.mask.any()]
        return max(newest, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one reward source said of one rollout."""

    outcome: Outcome
    value: float | None = None
    """The score; a finite number exactly when the outcome is ``SCORED``."""
    parts: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    """Named scalars the value is made of, for reports."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=lambda: _EMPTY)
    """Named arrays: a number per token, or per step of the completion."""
    reason: str = ""
    """Free text for people: why it abstained or failed."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        finite = self.value is not None and math.isfinite(self.value)
        if (self.outcome is Outcome.SCORED) != finite or (self.value is not None and not finite):
            raise ValueError(f"a verdict that is {self.outcome.value} cannot carry the value {self.value!r}")

    @classmethod
    def scored(cls, value: float, /, **parts: float) -> Verdict:
        return cls(outcome=Outcome.SCORED, value=float(value), parts=MappingProxyType(parts) if parts else _EMPTY)

    @classmethod
    def abstained(cls, reason: str = "") -> Verdict:
        return cls(outcome=Outcome.ABSTAINED, reason=reason)

    @classmethod
    def failed(cls, reason: str) -> Verdict:
        return cls(outcome=Outcome.FAILED, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Baseline:
    """A greedy completion of a group's prompt, judged like its samples: what `objective.advantage: remax` compares
    them with. It is recorded and never trained, and counts in no statistic of the samples."""

    rollout: Rollout
    verdicts: Mapping[str, Verdict] = field(default_factory=lambda: _EMPTY)
    reward: float | None = None
    """None if nothing scored it; the group is then failed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All rollouts of one admission with their verdicts; complete, or failed with a reason."""

    admission: Admission
    rollouts: tuple[Rollout, ...] = ()
    verdicts: tuple[Mapping[str, Verdict], ...] = ()
    """One mapping from reward source to verdict per rollout."""
    rewards: tuple[float | None, ...] = ()
    """Weighted sum of the scored sources per rollout, 0 for those behind a closed gate; None if nothing scored it."""
    failure: str | None = None
    """Why the admission gave nothing to train on; the rollouts made so far stay, for the ledger."""
    baseline: Baseline | None = None
    """None unless the objective asks for one."""
    _oldest: int | None = field(default=None, init=False, repr=False)
    """`oldest_version`, once somebody has asked: queue, store, learner and metrics all do."""

    @property
    def index(self) -> int:
        return self.admission.index

    @property
    def everything(self) -> tuple[Rollout, ...]:
        """All that was generated for it: its samples, and the greedy completion if there is one."""
        return self.rollouts if self.baseline is None else (*self.rollouts, self.baseline.rollout)

    @property
    def num_sampled(self) -> int:
        """Tokens of `everything`: what the fates of the group add up to."""
        return sum(rollout.num_sampled for rollout in self.everything)

    @property
    def oldest_version(self) -> int:
        """Smallest version among all tokens of `everything`; the version at admission if there is none."""
        if self._oldest is None:
            segments = [s for rollout in self.everything for s in rollout.segments if s.num_sampled]
            oldest = min([_oldest_of(segment) for segment in segments], default=self.admission.version)
            object.__setattr__(self, "_oldest", oldest)
        return self._oldest

    @property
    def newest_version(self) -> int:
        """Largest version among all tokens of `everything`; the version at admission if there is none."""
        newest = [v for v in (rollout.newest_version for rollout in self.everything) if v is not None]
        return max(newest, default=self.admission.version)

    @property
    def has_signal(self) -> bool:
        """Whether two scored rollouts differ; beside a baseline, whether one differs from that."""
        scored = {reward for reward in self.rewards if reward is not None}
        return len(scored) > 1 or (self.baseline is not None and bool(scored - {self.baseline.reward}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One segment with the advantage of each of its tokens: what a learner trains on."""

    group: int
    """Admission index."""
    sample: int
    segment: Segment
    trained: np.ndarray
    """[T] bool: the segment's mask without the tokens a rule excludes."""
    advantages: np.ndarray
    """[T] float32, 0 where ``trained`` is False."""
    replayed: bool = False
    """Of a group that an earlier step has used up."""
    num_trained: int = field(init=False)
    num_useful: int = field(init=False)
    """Trained tokens whose advantage is not 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trained", read_only(self.trained, np.bool_))
        object.__setattr__(self, "advantages", read_only(self.advantages, np.float32))
        object.__setattr__(self, "num_trained", int(np.count_nonzero(self.trained)))
        object.__setattr__(self, "num_useful", int(np.count_nonzero(self.advantages[self.trained])))

    @classmethod
    def counted(cls, num_trained: int, num_useful: int, **fields: Any) -> Row:
        """By whoever knows how many, of arrays that are of the right type and that nobody can write to; they may be
        distant."""
        return _filled(cls, fields | {"num_trained": num_trained, "num_useful": num_useful})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The data of one step, in an order that does not depend on timing, before any sharding."""

    step: int
    places: int
    """Groups a step has room for; filtered and failed groups leave their place empty."""
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    """In (group index, sample, segment) order; behind them those of ``replayed``."""
    replayed: tuple[Group, ...] = ()
    """Groups of earlier steps whose successes are trained once more; they have no place."""

    @property
    def num_tokens(self) -> int:
        """Trained tokens: the divisor of a token mean."""
        return sum(row.num_trained for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a learner says after a step."""

    version: int
    """Steps the weights now contain."""
    updates: int
    """Optimizer steps taken since the start of the run."""
    metrics: Mapping[str, float]
    rows: tuple[Row, ...] = ()
    """The batch's rows as they were used: with the advantages that the learner gave them, and without the tokens that
    no applied update has seen. Empty: the batch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """Identity of published weights. (lineage, version) never names two weights."""

    lineage: int
    version: int
    updates: int
    fingerprint: str
    parent: int | None
    digests: Mapping[str, str] = field(default_factory=lambda: _EMPTY, compare=False, repr=False)
    """Tensor name -> digest, what the fingerprint is made of; empty if nobody has kept them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A new lineage of weights: from some version on they are others than those of its parent."""

    lineage: int
    parent: int
    first: int
    """The first version that differs; those before it are the parent's."""
    kind: str
    """`ROLLBACK`, or `REMADE`: recorded batches were learned again and gave other bits."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands between two transactions: what a resume needs to know beside weights and training state."""

    steps: int
    """Steps completed."""
    published: VersionRecord | None
    """The newest weights that generators had and that still count; None before version 0."""
    branches: tuple[Branch, ...]
    """By lineage."""
    next_index: int
    """Of the next admission."""
    num_prompts: int
    """Prompts that have been asked for, in the order of the data."""
    ready: tuple[Group, ...]
    """Filled, and not used by a step."""
    unfinished: tuple[Admission, ...]
    """Admissions without a group, with the attempt that came to nothing."""
    stopped: tuple[Group, ...]
    """What is stored of some of ``unfinished``: aborted when the run was stopped, and not gone on from since."""
    consumed: Mapping[int, int]
    """Admission -> step, of the steps that the published weights do not contain."""
    last_consumed: int | None
    """The last group of the last step, or of one that was rolled back."""
    num_consumed: int
    """Groups that steps have used."""
    num_undone: int
    """Groups that steps had used which were rolled back."""
    num_failed: int
    num_expired: int
    num_filtered: int
    filtered: Mapping[int, str]
    """Admission -> reason, of those behind the last step's groups."""
    last_admissions: tuple[Admission, ...]
    """The newest ones, ended or not."""
    expired_prompts: tuple[Admission, ...]
    """Expired, and their prompts not asked again since; oldest first."""


class Event(NamedTuple):
    """One entry of the run's time line; report, watchdog, dashboard and trace export read nothing else. The one record
    that is a tuple: there are several for every rollout."""

    time: float
    """Seconds of the monotonic clock since the run's anchor."""
    role: str
    kind: str
    instance: int = 0
    admission: int | None = None
    sample: int | None = None
    segment: int | None = None
    version: int | None = None
    seconds: float | None = None
    """Duration, for kinds that span time; ``time`` is then the start."""
    numbers: Mapping[str, Any] = _EMPTY
