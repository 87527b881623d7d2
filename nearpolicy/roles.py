"""Who handles the records: one Protocol per role, and the small values their calls carry.

The pipeline knows roles only through this module; `nearpolicy.launch` builds the real ones. Calls that cross from the
control plane (asyncio) into a role are coroutines, so that a role may live in a thread, a process or an actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nearpolicy.records import (
    Admission,
    Batch,
    Event,
    Fate,
    Finish,
    Group,
    Prompt,
    Rollout,
    Row,
    Segment,
    StepReport,
    Verdict,
    VersionRecord,
    all_chosen,
    read_only,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of the distribution that remains after all of it."""

    temperature: float = 1.0
    """0 takes the most likely token (evaluation and greedy baselines; nothing of it is trained)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    record_support: bool = False
    """Give with each completion the tokens that could be drawn at each of its positions: extras ``support_sizes`` [T]
    and, one after another, ``support_ids``."""
    stop: tuple[str, ...] = ()
    """Strings; a completion ends with the token that completes one of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begun:
    """What a sample has become before it is asked for: it goes on behind these tokens, which keep what is said of
    them. One that has ended with its last token comes back as it is."""

    token_ids: np.ndarray
    """[T] int32."""
    logprobs: np.ndarray
    """[T] float32 under the distribution really sampled from."""
    versions: np.ndarray
    """[T] int32 weights that sampled each token."""
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    """As those of the `Completion`."""

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32), ("versions", np.int32)):
            object.__setattr__(self, name, read_only(getattr(self, name), dtype))
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) > 1:
            raise ValueError(f"tokens, log-probabilities and versions must have one length, found {sorted(lengths)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """``n`` independent completions of one token sequence."""

    id: str
    """Unique within a run."""
    token_ids: np.ndarray
    """[P] int32."""
    sampling: Sampling
    n: int
    seed: int
    admission: int
    """Admission index; with seed, sample, turn, position and purpose it decides the random numbers."""
    turn: int = 0
    purpose: str = "rollout"
    """rollout, baseline, evaluation or probe: a part of the random key, and the ledger it is counted in (none for a
    probe, which also starts before requests that wait)."""
    policy: str = "policy"
    version: int | None = None
    """Start only under this version; None takes the newest."""
    begun: Mapping[int, Begun] = field(default_factory=dict)
    """By sample: those that go on from something. Only for a generator that is ``resumable``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished sequence of a request."""

    request: str
    sample: int
    token_ids: np.ndarray
    """[T] int32, a chosen stop token included."""
    logprobs: np.ndarray
    """[T] float32 under the distribution really sampled from."""
    versions: np.ndarray
    """[T] int32 weights that sampled each token."""
    finish: Finish
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    reason: str = ""
    """Set when the finish is FAILED."""
    text: str | None = None
    """The tokens up to their stop, decoded, where the tokens stay elsewhere."""

    def fetched(self) -> Completion:
        """With the tokens here; waits for them."""
        arrays = {name: np.asarray(getattr(self, name)) for name in ("token_ids", "logprobs", "versions")}
        return replace(self, **arrays, extras={name: np.asarray(values) for name, values in self.extras.items()})

    def decoded(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Its text, by whoever has it."""
        return decode(self.token_ids) if self.text is None else self.text

    def rollout(self, context_ids: np.ndarray, text: str, numerics: str) -> Rollout:
        """One turn after ``context_ids``, every token of it chosen by the policy. ``text``: the tokens, decoded."""
        segment = Segment(
            context_ids=context_ids,
            token_ids=self.token_ids,
            mask=all_chosen(len(self.token_ids)),
            behavior_logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
            extras=self.extras,
        )
        return Rollout(sample=self.sample, segments=(segment,), text=text, numerics=numerics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a generator can promise; a recipe that needs more is refused."""

    numerics: str
    """exact or fast."""
    seeded: bool
    batch_invariant: bool
    resumable: bool
    """Goes on with samples that have begun before (`Request.begun`)."""
    in_flight_update: bool
    prefix_cache: bool
    adapters: bool
    """Takes weights of which only the adapter is sent."""
    proof: str
    """How it shows its weights: fingerprint, probe or none."""
    returns_token_ids: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """All that a run trains, where that is a low-rank change of some matrices: W becomes W + scaling * B @ A."""

    scaling: float
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Canonical name of W [out, in] -> A [rank, in], B [out, rank]."""
    digests: Mapping[str, tuple[str, str]]
    """xxh3-128 of the bytes of A and B."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shipment."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it."""
    offset: int
    """In bytes, where tensors lie one after another."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """Where the tensors of one version are, for a receiver in another process: small, and may be pickled."""

    transport: str
    lineage: int
    version: int
    entries: tuple[Entry, ...]
    digests: Mapping[str, str]
    """xxh3-128 of the bytes of each entry."""
    place: Any
    """What the receiver of this transport needs to get at them."""
    scaling: float | None = None
    """Of an adapter; set if its factors are all that is sent, as ``NAME.lora_A`` and ``NAME.lora_B``."""

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Weights on their way from learner to generators, under canonical Hugging Face names."""

    record: VersionRecord
    tensors: Mapping[str, torch.Tensor]
    """All of them; none where only the adapter is sent, which a generator applies to the model that it was loaded
    with."""
    digests: Mapping[str, str]
    """xxh3-128 of the bytes of each tensor that the generator computes with afterwards, tied tensors once."""
    adapter: Adapter | None = None
    """Set if nothing but an adapter is trained; it is contained in `tensors` already."""
    shipment: Shipment | None = None
    """Set where the tensors are not here: what a receiver turns into them, in the process of the generator."""

    @property
    def nbytes(self) -> int:
        """Of what is sent."""
        if self.shipment is not None:
            return self.shipment.nbytes
        sent = list(self.tensors.values())
        if not sent and self.adapter is not None:
            sent = [factor for pair in self.adapter.factors.values() for factor in pair]
        return sum(tensor.nbytes for tensor in sent)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What one rank holds of a tensor: a box in it."""

    tensor: torch.Tensor
    """The piece; without elements on a rank that holds none of it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Offset of the piece in the whole, by dimension."""


class Generator(Protocol):
    """Samples completions of requests under one version of the weights at a time."""

    def submit(self, request: Request) -> AsyncIterator[Completion]:
        """Completions in the order they end; each sample exactly once, also when it fails or is aborted."""
        ...

    async def abort(self, request_ids: Iterable[str]) -> None: ...

    async def pause(self) -> None:
        """No token is sampled after this returns, until `resume`."""
        ...

    async def sleep(self) -> None:
        """`pause`, and give the memory of keys and values back until `resume`. What runs goes on from its tokens."""
        ...

    async def resume(self) -> None: ...

    async def load(self, weights: Weights) -> Mapping[str, str]:
        """Compute under these weights from now on; returns the digests of the memory computed from."""
        ...

    def capabilities(self) -> Capabilities: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy one replica is, and what it has done since it began."""

    slots: int
    """Sequences that it decodes at once."""
    running: int = 0
    """Sequences that have sampled a token and go on."""
    waiting: int = 0
    """Sequences that have not started."""
    kv_tokens: int | None = None
    """Positions of keys and values that it has memory for; None if it does not say."""
    sampled: int = 0
    """Tokens."""
    busy_s: float = 0.0
    """Time in which it computed."""
    at: float = 0.0
    """When this was so, by the monotonic clock of its machine: differences alone mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A request, and the replica that it goes to."""

    ticket: int
    """Names this placement: a request that is issued again, here or elsewhere, has another one."""
    replica: int
    """Of the member, from 0."""
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a member has to tell since it was asked last."""

    completions: Sequence[tuple[int, Completion]] = ()
    """With their tickets, in the order they ended at each replica."""
    loads: Mapping[int, Load] = field(default_factory=dict)
    """By replica; those that did not change may be left out."""
    events: Sequence[tuple[int, str, Mapping[str, Any]]] = ()
    """Replica, kind and fields of what is told to the time line."""


class Member(Protocol):
    """One or several generators behind calls that carry many requests at once: an actor of a cluster, say.

    One caller has it. Whatever these calls raise means that the member is lost, with all that runs on it, except
    `load`: after a load that failed it samples nothing until another one succeeds.
    """

    name: str
    num_replicas: int
    """Each has room and weights of its own, and takes requests on its own."""

    async def submit_many(self, placed: Sequence[Placed]) -> None:
        """Take these on. A request that cannot be carried out comes back as failed completions."""
        ...

    async def abort_many(self, tickets: Sequence[int]) -> None:
        """What is unfinished of these comes back as aborted, with what it has sampled."""
        ...

    async def collect(self, spacing_s: float) -> Told:
        """Waits until there is something to tell, or a bound of its own has passed: the answer is then empty, but for
        the loads. Never more than one call at a time.

        Completions are gathered until ``spacing_s`` after the answer before, unless nothing else runs: then nothing
        is worth waiting for."""
        ...

    async def pause(self) -> None: ...

    async def sleep(self) -> None:
        """`pause`, and give the memory of keys and values back until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def load(self, weights: Weights) -> Mapping[str, str]:
        """As `Generator.load`, in every replica; the digests that all of them show."""
        ...

    def capabilities(self) -> Capabilities:
        """Of the weakest replica."""
        ...


class Verifier(Protocol):
    """Judges completions. Failures come back as verdicts, never as exceptions or numbers."""

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        """One verdict per reward source of the prompt's task. ``admission``: whose rollout it is, for the time line."""
        ...


class Environment(Protocol):
    """Turns an admission into a group: generate and verify, perhaps over several turns."""

    async def run(self, admission: Admission) -> Group:
        """Failures are data: the group says so and this does not raise."""
        ...

    def give_up(self, admission: int, reason: str) -> None:
        """This admission, which is running, is not wanted any more: it returns soon, with what it has sampled."""
        ...

    async def stop(self) -> None:
        """The run is over: what is running returns soon, with what it has sampled."""
        ...


class PromptSource(Protocol):
    """Prompts by admission index, a pure function of (seed, index), so that resume needs only a number."""

    def prompt(self, index: int) -> Prompt | None:
        """The prompt of this admission, or None if the data ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The right to run one admission; given back by fill, retire or expire."""

    admission: Admission


class RolloutQueue(Protocol):
    """Holds groups between environments and learner, none older than the bound when consumed."""

    num_failed: int
    """Groups given up as failed since the start of the run."""
    num_filtered: int
    """Groups left out for their rewards, and replaced by later ones, since the start of the run."""
    num_expired: int
    """Groups given up beyond the bound since the start of the run."""

    async def reserve(self) -> Slot | None:
        """Waits while generation is far enough ahead; None when no admission is left."""
        ...

    def fill(self, slot: Slot, group: Group) -> None: ...

    async def peek(self, count: int, known: int) -> Sequence[Group]:
        """The first groups of the next ``take(count)``, as far as they are sure; waits until they are more than
        ``known``, or until `take` would return. The groups stay in the queue."""
        ...

    async def take(self, count: int) -> Sequence[Group]:
        """The next ``count`` groups; fewer only when no admission is left. A `UserError` if all that comes fails."""
        ...

    def complete(self, step: int) -> None:
        """The learner has finished the step that consumed the last `take`."""
        ...

    def expire(self) -> None:
        """Groups beyond the bound are given up: they end as expired and free their slots."""
        ...

    def close(self) -> None:
        """The run is over: `reserve` gives None, and groups that wait for a step, or are filled later, are aborted."""
        ...

    def retire(self, version: int) -> None:
        """Weights that contain ``version`` steps are published: the slots of those steps are free."""
        ...


class Learner(Protocol):
    """Holds the weights that change."""

    async def learn_ahead(self, rows: Sequence[Row]) -> None:
        """Begin the coming step with the rows of its first groups, all that are known so far; `step` gets them first in
        its batch. What is learnt is the same, to the bit, as without this."""
        ...

    async def step(self, batch: Batch) -> StepReport: ...

    async def weights(self, record_parent: int | None) -> Weights: ...

    async def save(self, path: str) -> None:
        """A checkpoint folder: Hugging Face files, and the full training state beside them."""
        ...


class WeightSync(Protocol):
    """Makes every generator hold and prove a version."""

    async def publish(self) -> VersionRecord: ...


class RunStore(Protocol):
    """The durable record of a run. Calls return at once; the writer commits in order, in its own thread."""

    def admitted(self, admission: Admission) -> None: ...

    def filled(self, group: Group) -> None: ...

    def consumed(self, batch: Batch, report: StepReport, fates: Mapping[tuple[int, int], Mapping[Fate, int]]) -> None:
        """``fates``: (admission index, sample) -> fate -> tokens, for every group the step used up."""
        ...

    def discarded(self, group: Group, fate: Fate, reason: str) -> None: ...

    def retried(self, group: Group, fate: Fate = Fate.FAILED, reason: str | None = None) -> None:
        """An attempt has come to nothing (``reason``: the group's failure), and the admission goes on as its next
        one."""
        ...

    def published(self, record: VersionRecord, wall_s: float) -> None: ...

    def event(self, event: Event) -> None: ...

    def flush(self) -> None:
        """Returns when everything said so far is committed."""
        ...

    def close(self) -> None: ...


class Telemetry(Protocol):
    """Takes events and step metrics."""

    def event(self, role: str, kind: str, **fields: Any) -> None: ...

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
