"""Whose turn it is to be asked: prompts whose groups have expired, and then those of the data, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from nearpolicy.records import Admission, Prompt
from nearpolicy.roles import PromptSource


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and where it stands in the data."""

    place: int
    prompt: Prompt

    @classmethod
    def of(cls, admission: Admission) -> Asked:
        return cls(admission.place, admission.prompt)


class PromptLine:
    """The prompts of one run; with ``requeues`` those of groups that expire come again."""

    def __init__(self, source: PromptSource, *, requeues: bool) -> None:
        self._source = source
        self._requeues = requeues
        self._again: deque[Asked] = deque()
        """Of groups that have expired."""
        self._next_place = 0
        """In the data, of the next prompt that nobody has asked for."""
        self._has_ended = False
        self._unfinished: dict[int, Asked] = {}
        """By admission: of those that run or are ready, where their prompts may come again."""

    @property
    def has_next(self) -> bool:
        """As far as one knows: that the data are at their end shows when they are asked."""
        return bool(self._again) or not self._has_ended

    @property
    def may_come_again(self) -> bool:
        """Whether groups run or wait whose prompts are asked once more if they expire."""
        return bool(self._unfinished)

    def next(self) -> Asked | None:
        if self._again:
            return self._again.popleft()
        prompt = self._source.prompt(self._next_place)
        if prompt is None:
            self._has_ended = True
            return None
        self._next_place += 1
        return Asked(self._next_place - 1, prompt)

    def admitted(self, index: int, asked: Asked) -> None:
        if self._requeues:
            self._unfinished[index] = asked

    def expired(self, index: int) -> None:
        if self._requeues:
            self._again.append(self._unfinished.pop(index))

    def finished(self, index: int) -> None:
        """Whatever became of its group, it did not expire."""
        self._unfinished.pop(index, None)

    def restore(self, num_asked: int, unfinished: Iterable[Admission], expired: Iterable[Admission]) -> None:
        """Stand where a run stood that had asked for so many prompts of the data."""
        self._next_place = num_asked
        if self._requeues:
            self._unfinished = {admission.index: Asked.of(admission) for admission in unfinished}
            self._again.extend(map(Asked.of, expired))
