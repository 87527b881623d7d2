"""HumanEval and MBPP: every reference solution passes, and what is changed in it fails where the tests can tell.

The data are not part of this project: they are looked for at ../shared/data, or where NEARPOLICY_DATA says.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.code_tasks import judged

ROOT = Path(__file__).parents[3]
NOT_SPLIT = {"MBPP/367", "MBPP/533", "MBPP/596", "MBPP/601", "MBPP/927"}
"""Rows whose tests hand over a class or a type, or look inside one."""


@pytest.fixture
def data() -> Path:
    folder = Path(os.environ.get("NEARPOLICY_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "humaneval").is_dir() or not (folder / "mbpp").is_dir():
        pytest.skip(f"no humaneval and mbpp at {folder}; set NEARPOLICY_DATA to a folder that holds them")
    return folder


def faults(found: dict, least_killed: float) -> list[str]:
    wrong = []
    for name in ("HumanEval", "MBPP"):
        result = found[name]
        wrong += [f"{row}: {why}" for row, why in result["not passed"].items() if row not in NOT_SPLIT]
        wrong += [f"{result['flips']} verdicts of {name} changed"] if result["flips"] else []
        for kind, counts in result["mutants"].items():
            killed = 1 - counts.get("passed", 0) / sum(counts.values())
            wrong += [f"{name}, {kind}: only {killed:.0%} of the mutants fail"] if killed < least_killed else []
            wrong += [f"{name}, {kind}: {counts}"] if counts.get("sandbox_failure") else []
    return wrong


def test_a_sample_of_reference_solutions_passes_and_most_mutants_fail(data):
    assert faults(asyncio.run(judged(data, 40, 1, together=False)), least_killed=0.5) == []


@pytest.mark.large
@pytest.mark.timeout(1800)
def test_all_reference_solutions_pass_the_others_at_the_weaker_trust_and_mutants_fail(data):
    found = asyncio.run(judged(data, 1, 1, together=True))
    assert faults(found, least_killed=0.8) == []
    assert set(found["MBPP"]["passed at the weaker trust"]) == NOT_SPLIT == set(found["MBPP"]["not passed"])


@pytest.mark.large
@pytest.mark.timeout(3000)
def test_no_verdict_changes_in_twenty_repeats_under_load(data):
    found = asyncio.run(judged(data, 8, 20, together=False))
    assert faults(found, least_killed=0.7) == []
