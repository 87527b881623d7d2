"""What runs next, decided without tensors: sequences, their prompts, and the pages they hold.

A request of ``n`` samples has one `PromptState`: the prompt is computed once, and every sample then starts from its
pages (full pages shared, the unfinished last page copied). Samples that find no room wait beside it. When pages run
out, the youngest sequence gives its pages back and is computed again later from its prefix; with exact numerics its
bits do not change. A sequence alone always fits, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from nearpolicy.generator.kv import PagePool, Span
from nearpolicy.generator.sampling import sequence_key
from nearpolicy.models.attention import PAGE
from nearpolicy.roles import Request


@dataclass(eq=False)
class Sequence:
    """One sample of a request: what it has become so far."""

    request: Request
    sample: int
    prompt: list[int]
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    support: list[np.ndarray] = field(default_factory=list)
    """Per token the ids that could be drawn, where the request asks for them."""
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    """Positions whose keys and values are in the pages; 0 while it waits."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def token(self, position: int) -> int:
        return self.prompt[position] if position < len(self.prompt) else self.tokens[position - len(self.prompt)]


@dataclass(eq=False)
class PromptState:
    """A request whose samples have not all started: the prompt's pages, and its samples that wait."""

    request: Request
    prompt: list[int]
    waiting: deque[Sequence]
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    logits: object | None = None
    """The prompt's last logits [1, V], once they are computed."""

    def token(self, position: int) -> int:
        return self.prompt[position]

    @property
    def length(self) -> int:
        return len(self.prompt)


Work = Sequence | PromptState


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence or prompt to compute in this pass."""

    work: Work
    span: Span

    @property
    def completes(self) -> bool:
        """Whether the work's last known token is among them, so that its logits give the next one."""
        return self.span.start + self.span.length == self.work.length


@dataclass(eq=False)
class Start:
    """Samples that take their first token from a prompt's logits."""

    logits: object
    samples: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): pages to copy before the next forward pass."""


class Scheduler:
    """Chooses the tokens of each forward pass; keeps every sequence in exactly one place until it is finished."""

    def __init__(self, pool: PagePool, max_running: int, prefill_chunk: int) -> None:
        self.pool = pool
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._prompts: deque[PromptState] = deque()
        self._preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order they started: the last is the youngest."""
        self.accepts_new = True
        """False while a publication waits for the running ones to end."""
        self.version = 0
        """Requests pinned to another version do not start."""

    @property
    def is_idle(self) -> bool:
        return not (self._prompts or self._preempted or self.running)

    @property
    def has_work(self) -> bool:
        """Whether a pass would do anything; not so while all that is left waits for a version still to come."""
        return self.has_started_work or any(self._may_start(p) or self._is_outdated(p) for p in self._prompts)

    @property
    def has_started_work(self) -> bool:
        """Sequences that have sampled at least one token and are not finished."""
        return bool(self.running or self._preempted)

    def add(self, request: Request) -> None:
        prompt = request.token_ids.tolist()
        samples = deque(Sequence(request, i, prompt, sequence_key(request, i)) for i in range(request.n))
        self._prompts.append(PromptState(request, prompt, samples))

    def fits(self, request: Request) -> bool:
        """Whether one sequence of full length fits into all pages, beside nothing else."""
        return pages_for(len(request.token_ids) + request.sampling.max_tokens) <= self.pool.num_pages

    def remove(self, request_ids: set[str]) -> list[Sequence]:
        """Take every unfinished sequence of these requests out and free what they hold."""
        removed: list[Sequence] = []
        for prompt in [p for p in self._prompts if p.request.id in request_ids]:
            self._prompts.remove(prompt)
            self.pool.release(prompt.pages)
            removed.extend(prompt.waiting)
        for place in (self._preempted, self.running):
            for sequence in [s for s in place if s.request.id in request_ids]:
                place.remove(sequence)
                self._drop_pages(sequence)
                removed.append(sequence)
        return removed

    def remove_outdated(self) -> list[Sequence]:
        """Take out the samples that wait for a version older than the present one: they can never start."""
        removed: list[Sequence] = []
        for prompt in [p for p in self._prompts if self._is_outdated(p)]:
            self._prompts.remove(prompt)
            self.pool.release(prompt.pages)
            removed.extend(prompt.waiting)
        return removed

    def preempt_all(self) -> None:
        """Forget all keys and values (the weights change): everything is computed again from its tokens."""
        for sequence in (*self.running, *self._preempted):  # a waiting one may be half computed again
            self._drop_pages(sequence)
        self._preempted.extendleft(reversed(self.running))
        self.running.clear()
        self.forget_prompts()

    def forget_prompts(self) -> None:
        for prompt in self._prompts:
            self.pool.release(prompt.pages)
            prompt.pages, prompt.stored, prompt.logits = [], 0, None

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_pages(sequence)

    def start_ready(self) -> list[Start]:
        """Samples that start now from prompts whose logits are there."""
        started = []
        for prompt in [p for p in self._prompts if p.logits is not None and self._may_start(p)]:
            start = Start(prompt.logits)
            while prompt.waiting and prompt.logits is not None and self._can_start(prompt):
                start.samples.append(self._fork(prompt, start.copies))
            if start.samples:
                started.append(start)
        return started

    def release_spent(self) -> None:
        """Give back the pages of prompts whose samples have all started; call after the copies are made."""
        for prompt in [p for p in self._prompts if not p.waiting]:
            self._prompts.remove(prompt)
            self.pool.release(prompt.pages)

    def plan(self) -> list[Piece]:
        """The pieces of the next forward pass: one token of every running sequence, then chunks of prefixes."""
        pieces = []
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted by an older one
                continue
            if self._make_room(sequence):
                pieces.append(Piece(sequence, Span(sequence.stored, 1, sequence.pages)))
        pieces = [p for p in pieces if p.work in self.running]
        budget = self._prefill_chunk
        for work in self._prefill_candidates():
            if budget <= 0:
                break
            length = min(work.length - work.stored, budget)
            needed = pages_for(work.stored + length) - len(work.pages)
            if not self.pool.can_allocate(needed):
                if pieces or self.running:
                    break  # wait for somebody to finish
                while not self.pool.can_allocate(needed) and self._reclaim(besides=work):
                    pass
                if not self.pool.can_allocate(needed):
                    break
            work.pages.extend(self.pool.allocate(needed))
            pieces.append(Piece(work, Span(work.stored, length, work.pages)))
            budget -= length
        return pieces

    def computed(self, piece: Piece) -> None:
        """The piece's keys and values are stored; a prefix that is whole again runs."""
        piece.work.stored += piece.span.length
        if isinstance(piece.work, Sequence) and piece.work in self._preempted and piece.completes:
            self._preempted.remove(piece.work)
            self.running.append(piece.work)

    def _prefill_candidates(self) -> list[Work]:
        """Interrupted sequences first (they hold up their group), then prompts in order of arrival.

        Prompts are computed only as far ahead as their samples can start: a queue of prompts that took all pages would
        leave none for the sequences that should decode together.
        """
        room = self._max_running - len(self.running)
        interrupted = list(self._preempted)[: max(0, room)]
        room = min(room - len(interrupted), self.pool.num_free)
        prompts: list[Work] = []
        for prompt in self._prompts:
            if room <= 0 and (self.running or interrupted or prompts):
                break
            if self._may_start(prompt):
                if prompt.logits is None:
                    prompts.append(prompt)
                room -= len(prompt.waiting)
        return [*interrupted, *prompts]

    def _may_start(self, prompt: PromptState) -> bool:
        return self.accepts_new and prompt.request.version in (None, self.version)

    def _is_outdated(self, prompt: PromptState) -> bool:
        return prompt.request.version is not None and prompt.request.version < self.version

    def _can_start(self, prompt: PromptState) -> bool:
        if len(self.running) + len(self._preempted) >= self._max_running:
            return False
        return self._hands_over(prompt) or self.pool.can_allocate(1 if prompt.length % PAGE else 0)

    def _hands_over(self, prompt: PromptState) -> bool:
        """Whether the next sample takes the prompt's own pages: the last one does, and one that has no other way."""
        return len(prompt.waiting) <= 1 or (not self.has_started_work and not self.pool.can_allocate(1))

    def _fork(self, prompt: PromptState, copies: list[tuple[int, int]]) -> Sequence:
        """Start the next sample; ``waiting`` no longer holds it."""
        full = prompt.length // PAGE
        hands_over = self._hands_over(prompt)
        sequence = prompt.waiting.popleft()
        if hands_over:
            sequence.pages, prompt.pages = prompt.pages, []
            prompt.stored, prompt.logits = 0, None  # samples that still wait have it computed again
        else:
            sequence.pages = self.pool.share(prompt.pages[:full])
            if prompt.length % PAGE:
                own = self.pool.allocate(1)
                copies.append((prompt.pages[full], own[0]))
                sequence.pages.extend(own)
        sequence.stored = prompt.length
        self.running.append(sequence)
        return sequence

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for the sequence's next position, taken from the youngest if there is no other."""
        while pages_for(sequence.stored + 1) > len(sequence.pages):
            if self.pool.can_allocate(1):
                sequence.pages.extend(self.pool.allocate(1))
            elif not self._reclaim(besides=sequence):
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False
        return True

    def _reclaim(self, besides: Work) -> bool:
        """Take the pages of the newest work that is not running; it will be computed again."""
        for work in (*reversed(self._prompts), *reversed(self._preempted)):
            if work.pages and work is not besides:
                self.pool.release(work.pages)
                work.pages, work.stored = [], 0
                if isinstance(work, PromptState):
                    work.logits = None
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_pages(sequence)
        self._preempted.appendleft(sequence)

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.stored = [], 0


def pages_for(length: int) -> int:
    """Pages that ``length`` positions take."""
    return -(-length // PAGE)
