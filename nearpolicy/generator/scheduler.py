"""What runs next, decided without tensors: prefixes to compute, sequences that decode, and the pages they hold.

A request of ``n`` samples is one `Prefix`, its prompt, computed once; every sample then starts from its full pages,
which are shared, and a copy of the unfinished last one. A sequence that was interrupted is a prefix again, of its
prompt and what it has sampled, for one sample; so is one that comes with tokens that were sampled before. Full pages
are found by their tokens, so that a prompt that begins like an earlier one is computed from where they part. When pages
run out, the youngest sequence gives its own back and is computed again later; with exact numerics its bits do not
change. A sequence alone always fits, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nearpolicy.generator.pages import Budget, RowPages, SharedPages, page_tokens, pages_for
from nearpolicy.generator.sampling import sequence_key
from nearpolicy.models.attention import PAGE
from nearpolicy.roles import Request

PROBE = "probe"
"""Purpose of requests that somebody stands still for: they start before others that wait."""


@dataclass(eq=False)
class Sequence:
    """One sample of a request: what it has become so far."""

    request: Request
    sample: int
    prompt: list[int]
    key: int
    law: tuple[Any, ...]
    """What decides how its tokens are drawn: sequences of one law are drawn together."""
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    support: list[np.ndarray] = field(default_factory=list)
    """Per token the ids that could be drawn, where the request asks for them."""
    shared: list[int] = field(default_factory=list)
    """The full pages of the prefix it started from."""
    rows: list[int] = field(default_factory=list)
    """Where the pages behind them lie; empty while it waits."""
    room: int = 0
    """Positions that its pages hold."""
    stored: int = 0
    """Positions whose keys and values are in the pages."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


def begin(request: Request, sample: int) -> Sequence:
    """A sample as it comes: empty, or with what it has become before."""
    sampling, prompt = request.sampling, request.token_ids.tolist()
    law = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.record_support)
    sequence = Sequence(request, sample, prompt, sequence_key(request, sample), law, sampling.max_tokens)
    if (begun := request.begun.get(sample)) is not None:
        sequence.tokens, sequence.logprobs = begun.token_ids.tolist(), begun.logprobs.tolist()
        sequence.versions = begun.versions.tolist()
        if sampling.record_support:
            ends = begun.extras["support_sizes"].cumsum()[:-1]
            sequence.support = np.split(begun.extras["support_ids"], ends) if sequence.tokens else []
    return sequence


@dataclass(eq=False)
class Prefix:
    """Tokens to compute, and the samples that start behind them."""

    request: Request
    tokens: list[int]
    waiting: deque[Sequence]
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    place: int = SharedPages.ROOT
    """Of the last full page that is computed, in the tree of prefixes."""
    logits: object | None = None
    """Behind the last token [1, V], once they are computed."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    def forget(self) -> None:
        self.pages, self.stored, self.place, self.logits = [], 0, SharedPages.ROOT, None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of a prefix to compute in this pass."""

    prefix: Prefix
    start: int
    length: int

    @property
    def completes(self) -> bool:
        """Whether the prefix's last token is among them, so that its logits give the next one."""
        return self.start + self.length == self.prefix.length


@dataclass(frozen=True, slots=True)
class Plan:
    """What one forward pass computes: the last token of every decoding sequence, in the order of their rows, then
    chunks of prefixes."""

    decoding: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]


@dataclass(eq=False)
class Start:
    """Samples that take their next token from a prefix's logits."""

    logits: object
    samples: list[Sequence]


class Scheduler:
    """Chooses the tokens of each forward pass; keeps every sequence in exactly one place until it is finished."""

    def __init__(self, num_pages: int, max_running: int, prefill_chunk: int, max_length: int | None = None) -> None:
        """``max_length``: of prompt and completion together; None for what all pages hold."""
        self.max_pages = num_pages if max_length is None else min(num_pages, pages_for(max_length))
        self.budget = Budget(num_pages)
        self.prefix_pages = SharedPages(self.budget)
        self.rows: RowPages[Sequence] = RowPages(self.budget, max_running, self.max_pages)
        self.max_running = max_running
        """Sequences that decode at once."""
        self._prefill_chunk = prefill_chunk
        self._prompts: deque[Prefix] = deque()
        self._interrupted: deque[Prefix] = deque()
        self.running: list[Sequence] = []
        """In the order they started: the last is the youngest."""
        self.accepts_new = True
        """False while a publication waits for the running ones to end."""
        self.version = 0
        """Requests pinned to another version do not start."""

    @property
    def is_idle(self) -> bool:
        return not (self._prompts or self._interrupted or self.running)

    @property
    def has_work(self) -> bool:
        """Whether a pass would do anything; not so while all that is left waits for a version still to come."""
        return self.has_started_work or any(self._may_start(p) or self._is_outdated(p) for p in self._prompts)

    @property
    def has_started_work(self) -> bool:
        """Sequences that have sampled at least one token and are not finished."""
        return bool(self.running or self._interrupted)

    def add(self, request: Request, without: Container[int] = ()) -> None:
        """``without``: samples that have ended before they came."""
        samples = [begin(request, sample) for sample in range(request.n) if sample not in without]
        for sample in [s for s in samples if s.tokens]:
            self._interrupted.append(Prefix(request, sample.prompt + sample.tokens, deque([sample])))
        if new := deque(s for s in samples if not s.tokens):
            place = self._prompts.appendleft if request.purpose == PROBE else self._prompts.append
            place(Prefix(request, request.token_ids.tolist(), new))

    def waiting(self, request_id: str) -> list[Sequence]:
        """Samples of a request that have not started."""
        return [s for prefix in self._prompts if prefix.request.id == request_id for s in prefix.waiting]

    def pages_in_use(self) -> set[int]:
        """Numbers of all pages whose content may be read again."""
        own = {page for sequence in self.running for page in self.rows.pages_of(sequence)}
        return own | self.prefix_pages.in_use()

    def fits(self, request: Request) -> bool:
        """Whether one sequence of full length fits into all pages, beside nothing else."""
        return pages_for(len(request.token_ids) + request.sampling.max_tokens) <= self.max_pages

    def remove(self, request_ids: set[str]) -> list[Sequence]:
        """Take every unfinished sequence of these requests out and free what they hold."""
        removed: list[Sequence] = []
        for place in (self._prompts, self._interrupted):
            for prefix in [p for p in place if p.request.id in request_ids]:
                place.remove(prefix)
                self._give_back(prefix)
                removed.extend(prefix.waiting)
        for sequence in [s for s in self.running if s.request.id in request_ids]:
            self.finish(sequence)
            removed.append(sequence)
        return removed

    def remove_outdated(self) -> list[Sequence]:
        """Take out the samples that wait for a version older than the present one: they can never start."""
        removed: list[Sequence] = []
        for prefix in [p for p in self._prompts if self._is_outdated(p)]:
            self._prompts.remove(prefix)
            self._give_back(prefix)
            removed.extend(prefix.waiting)
        return removed

    def interrupt_all(self) -> None:
        """Forget all keys and values: everything is computed again from its tokens."""
        for sequence in reversed(list(self.running)):
            self._interrupt(sequence)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Forget what was computed and has not started; what decodes keeps its keys and values."""
        for prefix in (*self._interrupted, *self._prompts):
            self._give_back(prefix)
        self.prefix_pages.forget_all()

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_pages(sequence)

    def plan(self) -> Plan:
        """The next forward pass: one token of every running sequence, then chunks of prefixes."""
        for sequence in [s for s in self.running if s.stored == s.room]:
            if sequence in self.running:  # not interrupted by an older one
                self._make_room(sequence)
        decoding = tuple(self.rows.levels[0])
        return Plan(decoding, tuple(self._chunks(anything_runs=bool(decoding))))

    def _chunks(self, anything_runs: bool) -> Iterator[Chunk]:
        budget = self._prefill_chunk
        computing: set[tuple[int, bytes]] = set()
        """Full pages that this pass computes: who needs the same one waits and finds it."""
        for prefix in self._candidates():
            if budget <= 0:
                return
            following = self._reuse(prefix)
            if following is not None and following in computing:
                continue
            length = min(prefix.length - prefix.stored, budget)
            needed = pages_for(prefix.stored + length) - len(prefix.pages)
            if not anything_runs:
                while needed > self.budget.free and self._reclaim(besides=prefix):
                    pass
            if needed > self.budget.free:
                return  # wait for somebody to finish
            prefix.pages.extend(self.prefix_pages.allocate(needed))
            if following is not None:
                computing.add(following)
            anything_runs = True
            budget -= length
            yield Chunk(prefix, prefix.stored, length)

    def _reuse(self, prefix: Prefix) -> tuple[int, bytes] | None:
        """Take over the pages that others have computed; returns the name of the next full page, if there is one.

        The last token is always left to compute: its logits are what starts the samples.
        """
        while (following := self._next_full_page(prefix)) is not None:
            found = self.prefix_pages.find(*following) if prefix.stored % PAGE == 0 else None
            if found is None or (self.budget.free == 0 and not self.prefix_pages.is_held(found[1])):
                return following
            prefix.place, page = found
            prefix.pages += self.prefix_pages.share([page])
            prefix.stored += PAGE
        return None

    def _next_full_page(self, prefix: Prefix) -> tuple[int, bytes] | None:
        page = prefix.stored // PAGE
        return (prefix.place, page_tokens(prefix.tokens, page)) if (page + 1) * PAGE < prefix.length else None

    def computed(self, chunk: Chunk, logits: object | None) -> None:
        """The chunk's keys and values are stored; ``logits`` of a prefix that is whole now."""
        prefix = chunk.prefix
        before, prefix.stored = prefix.stored // PAGE, chunk.start + chunk.length
        for page in range(before, prefix.stored // PAGE):
            tokens = page_tokens(prefix.tokens, page)
            prefix.place = self.prefix_pages.remember(prefix.place, tokens, prefix.pages[page])
        if chunk.completes:
            prefix.logits = logits

    def start_ready(self) -> list[Start]:
        """Samples that start now behind prefixes whose logits are there."""
        started = []
        for place in (self._interrupted, self._prompts):
            for prefix in [p for p in place if p.logits is not None and self._may_go_on(p)]:
                logits, samples = prefix.logits, []
                while prefix.waiting and prefix.logits is not None and self._can_start(prefix):
                    samples.append(self._start(prefix))
                if samples:
                    started.append(Start(logits, samples))
                if not prefix.waiting:
                    place.remove(prefix)
                    self._give_back(prefix)
        return started

    def _candidates(self) -> list[Prefix]:
        """Interrupted sequences first (they hold up their group), then prompts in order of arrival.

        Prompts are computed only as far ahead as their samples can start: a queue of prompts that took all pages would
        leave none for the sequences that should decode together.
        """
        room = self.max_running - len(self.running)
        chosen = [p for p in list(self._interrupted)[: max(0, room)] if p.logits is None]
        room = min(room - len(chosen), self.budget.free)
        for prompt in self._prompts:
            if room <= 0 and (self.running or chosen):
                break
            if self._may_start(prompt):
                if prompt.logits is None:
                    chosen.append(prompt)
                room -= len(prompt.waiting)
        return chosen

    def _may_go_on(self, prefix: Prefix) -> bool:
        return bool(prefix.waiting[0].tokens) or self._may_start(prefix)

    def _may_start(self, prompt: Prefix) -> bool:
        return self.accepts_new and prompt.request.version in (None, self.version)

    def _is_outdated(self, prompt: Prefix) -> bool:
        return prompt.request.version is not None and prompt.request.version < self.version

    def _can_start(self, prefix: Prefix) -> bool:
        ahead = 0 if prefix.waiting[0].tokens else len(self._interrupted)
        if len(self.running) + ahead >= self.max_running:
            return False
        return self._hands_over(prefix) or self.budget.free >= (1 if prefix.length % PAGE else 0)

    def _hands_over(self, prefix: Prefix) -> bool:
        """Whether the next sample takes the prefix's own pages: the last one does, and one that has no other way."""
        return len(prefix.waiting) <= 1 or (not self.has_started_work and self.budget.free == 0)

    def _start(self, prefix: Prefix) -> Sequence:
        """Start the next sample; ``waiting`` no longer holds it."""
        full = prefix.length // PAGE
        sequence, hands_over = prefix.waiting[0], self._hands_over(prefix)
        prefix.waiting.popleft()
        unfinished = prefix.pages[full] if prefix.length % PAGE else None
        sequence.shared = self.prefix_pages.share(prefix.pages[:full])
        if hands_over:
            self._give_back(prefix)  # samples that still wait have it computed again
        sequence.stored, sequence.room = prefix.length, full * PAGE
        if unfinished is not None:
            self._append_page(sequence, content_of=unfinished)
        self.running.append(sequence)
        return sequence

    def _make_room(self, sequence: Sequence) -> None:
        """A page for the sequence's next position, taken from the youngest if there is no other."""
        while sequence.stored == sequence.room:
            if self.budget.free:
                self._append_page(sequence)
            elif not self._reclaim(besides=None):
                youngest = self.running[-1]
                self._interrupt(youngest)
                if youngest is sequence:
                    return

    def _append_page(self, sequence: Sequence, content_of: int | None = None) -> None:
        self.rows.append(sequence, content_of)
        sequence.room += PAGE

    def _reclaim(self, besides: Prefix | None) -> bool:
        """Take the pages of the newest prefix; it will be computed again."""
        for prefix in (*reversed(self._prompts), *reversed(self._interrupted)):
            if prefix.pages and prefix is not besides:
                self._give_back(prefix)
                return True
        return False

    def _interrupt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_pages(sequence)
        tokens = sequence.prompt + sequence.tokens
        self._interrupted.appendleft(Prefix(sequence.request, tokens, deque([sequence])))

    def _drop_pages(self, sequence: Sequence) -> None:
        self.prefix_pages.release(sequence.shared)
        self.rows.drop(sequence)
        sequence.shared, sequence.stored, sequence.room = [], 0, 0

    def _give_back(self, prefix: Prefix) -> None:
        self.prefix_pages.release(prefix.pages)
        prefix.forget()
