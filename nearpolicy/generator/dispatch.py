"""Which replica a request goes to: a function of what is known, without time, tasks or calls.

A request goes where it is expected to end first: (tokens that are still to come there + its own) / measured rate.
Tokens still to come are an estimate. What has been placed and has not started counts the length that is expected of any
sequence; what runs counts what is expected of a sequence that has come so far already. So a replica full of stragglers
counts as loaded, though they are few, and gets no more than its share; one of a faster device gets more.

    room      a replica takes on a little more than it decodes at once, and waits for none: what nobody has room for is
              held back, and goes to whoever has room first
    prefix    a later turn, or the same prompt again, goes where its prefix is, unless it would end much later there
    version   a request goes to replicas that hold the newest weights, one that is pinned to those that hold its version

All replicas stand in arrays, so that a decision costs the same for 8 as for 256.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from nearpolicy.roles import Load, Request

AHEAD = 1.25
"""Sequences that a replica is given, as a multiple of those it decodes at once: it goes on while it is asked."""
PREFILL = 0.1
"""What a token of a prompt costs, in sampled tokens."""
PATIENCE = 0.5
"""How much later than elsewhere, as a share, a request may end where its prefix is."""
REMEMBERED = 65_536
"""Prefixes whose place is known."""
SMOOTHING, AT_LEAST_BUSY_S = 0.3, 0.05
"""Weight of a new measurement of a rate, and how long a replica has to have worked for one."""


class Lengths:
    """How long sequences turn out, and what that says of one that goes on. Old ones count less and less."""

    PER_DOUBLING = 8
    HALVED_AFTER = 4096
    REFRESH = 64

    def __init__(self) -> None:
        size = 32 * self.PER_DOUBLING
        self._counts, self._sums = [0.0] * size, [0.0] * size
        self._counts_behind, self._sums_behind = [0.0] * (size + 1), [0.0] * (size + 1)
        self._num = self._counted_at = 0
        self.longest = 1
        """That any sequence may become."""

    def add(self, length: int) -> None:
        place = self._place(length)
        self._counts[place] += 1
        self._sums[place] += length
        self._num += 1
        if self._num % self.HALVED_AFTER == 0:
            self._counts = [count / 2 for count in self._counts]
            self._sums = [total / 2 for total in self._sums]
        if self._num - self._counted_at >= min(self.REFRESH, self._num // 16):
            self._counted_at = self._num
            self._counts_behind = [*itertools.accumulate(reversed(self._counts), initial=0.0)][::-1]
            self._sums_behind = [*itertools.accumulate(reversed(self._sums), initial=0.0)][::-1]

    def expected(self, so_far: float) -> float:
        """Length of a sequence that has ``so_far`` tokens and goes on. Half of the longest there may be before any has
        ended; of one that is longer than all before, as much again."""
        if not self._num:
            return max(self.longest / 2, 2 * so_far)
        place = self._place(so_far) + 1 if so_far else 0
        count = self._counts_behind[place]
        return max(self._sums_behind[place] / count, so_far + 1) if count else 2 * so_far

    def _place(self, length: float) -> int:
        return min(len(self._counts) - 1, int(self.PER_DOUBLING * math.log2(1 + length)))


@dataclass(slots=True)
class _Replica:
    """What the arrays do not hold."""

    base: Load | None = None
    """The report from which the next rate is measured."""
    ended_there: int = 0
    """Sampled tokens of the sequences that have ended."""
    measured_at: float = 0.0
    """How many sequences ran when the rate was measured."""


class Dispatch:
    """Knows every replica by a number that is not used again while it is there."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self.newest: int | None = None
        """Version that requests without a pin are started under; None until some replica has shown one."""
        self._replicas: list[_Replica | None] = []
        self._holds = np.zeros(0, np.int64)
        self._takes, self._settled = np.zeros(0, bool), np.zeros(0, bool)
        self._placed, self._limit = np.zeros(0), np.zeros(0)
        self._kv, self._kv_limit = np.zeros(0), np.zeros(0)
        self._to_come, self._rate = np.zeros(0), np.zeros(0)
        self._prefixes: dict[Hashable, tuple[int, int]] = {}

    def add(self) -> int:
        """A replica that holds no version yet; its number."""
        if None in self._replicas:
            number = self._replicas.index(None)
            self._replicas[number] = _Replica()
        else:
            number = len(self._replicas)
            self._replicas.append(_Replica())
            for name in ("_holds", "_takes", "_settled", "_placed", "_limit", "_kv", "_kv_limit", "_to_come", "_rate"):
                values = getattr(self, name)
                setattr(self, name, np.append(values, np.zeros(1, values.dtype)))
        self._holds[number], self._takes[number], self._settled[number] = -1, True, True
        self._placed[number] = self._kv[number] = self._to_come[number] = self._rate[number] = 0.0
        self._limit[number] = self._kv_limit[number] = np.inf
        return number

    def remove(self, number: int) -> None:
        self._replicas[number] = None
        self._takes[number] = False
        self._prefixes = {key: place for key, place in self._prefixes.items() if place[0] != number}

    def holds(self, number: int, version: int | None) -> None:
        """The replica has shown this version of the lineage that counts; None: of none."""
        self._holds[number] = -1 if version is None else version

    def takes(self, number: int, takes: bool) -> None:
        """Whether it gets requests at all."""
        self._takes[number] = takes

    def settled(self, number: int, settled: bool) -> None:
        """Whether what it gets now starts under the version that it holds, for sure."""
        self._settled[number] = settled

    def serves(self, version: int | None) -> bool:
        """Whether anybody could start a request that is pinned to ``version`` (None: to nothing), with room or not."""
        return bool(self._eligible(version).any())

    def choose(self, request: Request) -> int | None:
        """The replica that this request goes to; None if nobody who may take it has room."""
        tokens = self._tokens(request)
        may = self._eligible(request.version) & (self._placed < self._limit) & (self._kv < self._kv_limit)
        ends = self._ends(tokens + PREFILL * len(request.token_ids))
        ends[~may] = np.inf
        best = int(ends.argmin()) if len(ends) else 0
        if not len(ends) or not may[best]:
            return None
        number, known = self._prefix_of(request)
        if number is None or number == best or not may[number]:
            return best
        saved = PREFILL * min(known, len(request.token_ids)) / self._rates()[number]
        return number if ends[number] - saved <= (1 + PATIENCE) * ends[best] else best

    def placed(self, number: int, request: Request) -> None:
        """The request is on its way there."""
        tokens, prompt = self._tokens(request), len(request.token_ids)
        self._placed[number] += request.n
        self._kv[number] += tokens + prompt
        self._to_come[number] += tokens + PREFILL * prompt
        for key in _prefix_keys(request):
            self._prefixes.pop(key, None)  # to the end of the row
            self._prefixes[key] = number, prompt
        while len(self._prefixes) > REMEMBERED:
            del self._prefixes[next(iter(self._prefixes))]

    def ended(self, number: int, request: Request, sampled: int, length: int, *, whole: bool) -> None:
        """One of its samples has come back, with ``length`` tokens, ``sampled`` of them drawn there; ``whole``: it has
        come to its own end."""
        share = self._tokens(request) / request.n
        left = self._placed[number] = max(0.0, self._placed[number] - 1)
        # Estimates move between placing and ending; what is left over goes when nothing is there.
        self._kv[number] = max(0.0, self._kv[number] - share - len(request.token_ids) / request.n) if left else 0.0
        self._to_come[number] = max(0.0, self._to_come[number] - share) if left else 0.0
        self._replicas[number].ended_there += sampled
        if whole:
            self.lengths.add(length)

    def observe(self, number: int, load: Load) -> None:
        """What the replica says of itself, after all that had come back before was told by `ended`."""
        replica = self._replicas[number]
        self._limit[number] = max(1.0, AHEAD * load.slots)
        self._kv_limit[number] = np.inf if load.kv_tokens is None else load.kv_tokens
        self._measure(number, replica, load)
        running = min(load.running, self._placed[number])
        if not running:
            replica.ended_there = load.sampled
        each = max(0.0, load.sampled - replica.ended_there) / max(1.0, running)
        left = self.lengths.expected(each) - each
        unstarted = self._placed[number] - running
        self._to_come[number] = running * left + unstarted * self.lengths.expected(0.0)

    def rate(self, number: int) -> float:
        """Tokens a second, as far as it is known: else what others do."""
        return float(self._rates()[number])

    def to_come(self, number: int) -> float:
        """Tokens that are still to be sampled there."""
        return float(self._to_come[number])

    def _measure(self, number: int, replica: _Replica, load: Load) -> None:
        """The rate while it works. Fewer sequences at once make fewer tokens a second: that says nothing of how fast
        the replica is, so a lower rate counts only where about as many ran as before, all the time."""
        base = replica.base
        if base is None or load.sampled < base.sampled or load.busy_s < base.busy_s:
            replica.base = load
            return
        if load.busy_s - base.busy_s < AT_LEAST_BUSY_S:
            return
        found, known = (load.sampled - base.sampled) / (load.busy_s - base.busy_s), self._rate[number]
        at = min(base.running, load.running)
        steady = at >= 0.8 * max(base.running, load.running)
        replica.base = load
        if not found or (found < known and not (steady and at >= 0.8 * replica.measured_at)):
            return
        weight = SMOOTHING if known else 1.0
        self._rate[number] += weight * (found - known)
        replica.measured_at += weight * (at - replica.measured_at)

    def _eligible(self, version: int | None) -> np.ndarray:
        if version is not None:
            return self._takes & self._settled & (self._holds == version)
        if self.newest is None:
            return np.zeros(len(self._takes), bool)
        return self._takes & (self._holds == self.newest)

    def _rates(self) -> np.ndarray:
        known = self._rate > 0
        if known.all():
            return self._rate
        return np.where(known, self._rate, self._rate[known].mean() if known.any() else 1.0)

    def _ends(self, tokens: float) -> np.ndarray:
        return (self._to_come + tokens) / self._rates()

    def _tokens(self, request: Request) -> float:
        """That it is expected to sample."""
        longest = request.sampling.max_tokens
        self.lengths.longest = max(self.lengths.longest, longest)
        return request.n * min(longest, self.lengths.expected(0.0))

    def _prefix_of(self, request: Request) -> tuple[int | None, int]:
        for key in _prefix_keys(request):
            if key in self._prefixes:
                return self._prefixes[key]
        return None, 0


def _prefix_keys(request: Request) -> tuple[Hashable, Hashable]:
    """What its prefix is known by: the episode that it goes on with, and the prompt."""
    of_training = request.purpose in ("rollout", "baseline")
    return (of_training, request.admission), hash(request.token_ids.tobytes())
