"""How far an evaluation is, where there is no terminal; and how numbers and paths are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearpolicy.launch import progress as module
from nearpolicy.launch.progress import progress
from nearpolicy.launch.words import count, expected_answer, place


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, 3), (3600.0, 0)])
def test_a_line_is_said_now_and_then_but_not_at_the_end(monkeypatch, every_s, lines):
    monkeypatch.setattr(module, "EVERY_S", every_s)
    said: list[str] = []
    with progress(4, said.append) as advance:
        for _ in range(4):
            advance()
    assert [line.split(" after")[0] for line in said] == [f"  {n} of 4 answers" for n in (1, 2, 3)][:lines]


def test_words():
    assert (count(1, "step"), count(0, "step"), count(1600, "sample")) == ("1 step", "0 steps", "1,600 samples")
    assert place(Path.cwd() / "runs" / "demo-1") == "runs/demo-1"
    assert place(Path("/elsewhere/runs")) == "/elsewhere/runs"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"answer_column": "final", "rewards": []}, "4"),
        ({"answer_column": None, "rewards": [{"kind": "function"}, {"answer_column": "final"}]}, "4"),
        ({"rewards": [{"answer_column": "none such"}]}, "5"),
    ],
)
def test_the_right_answer_is_found_where_the_task_says(task, expected):
    assert expected_answer(task, {"final": 4, "answer": "5"}) == expected
    assert expected_answer(task, {}) is None
