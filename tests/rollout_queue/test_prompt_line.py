"""Whose turn it is to be asked."""

from __future__ import annotations

import pytest

from nearpolicy.records import Admission, Prompt
from nearpolicy.rollout_queue.prompts import Asked, PromptLine

PROMPTS = [Prompt(id=str(place), task="t", text="?") for place in range(5)]


class Data:
    def prompt(self, index: int) -> Prompt | None:
        return PROMPTS[index] if index < len(PROMPTS) else None


def admission(index: int, place: int) -> Admission:
    return Admission(index=index, prompt=PROMPTS[place], seed=0, version=0, prompt_index=place)


def left_of(line: PromptLine) -> list[int]:
    """Places in the data of all that come."""
    found = []
    while (asked := line.next()) is not None:
        assert asked.prompt is PROMPTS[asked.place]
        found.append(asked.place)
    assert not line.has_next
    return found


@pytest.mark.parametrize("requeues", [True, False])
def test_what_has_expired_is_asked_first_and_with_its_own_place(requeues):
    line = PromptLine(Data(), requeues=requeues)
    for index in range(3):
        line.admitted(index, line.next())
    line.finished(0)
    line.expired(2)
    line.expired(1)
    assert left_of(line) == ([2, 1, 3, 4] if requeues else [3, 4])
    assert not line.may_come_again


@pytest.mark.parametrize("requeues", [True, False])
def test_a_run_that_goes_on_asks_what_it_would_have_asked(requeues):
    line = PromptLine(Data(), requeues=requeues)
    line.restore(3, unfinished=[admission(7, 2)], expired=[admission(5, 1), admission(6, 0)])
    assert line.may_come_again is requeues
    line.admitted(8, Asked(4, PROMPTS[4]))
    line.expired(7)
    line.finished(8)
    assert left_of(line) == ([1, 0, 2, 3, 4] if requeues else [3, 4])
