"""Actors are killed at random while runs go on: nothing lost, nothing twice, the bound kept, the same bits."""

from __future__ import annotations

from pathlib import Path

import chaos_ray
import pytest


def killed(folder: Path, kills: int, seed: int) -> chaos_ray.Tally:
    tally = chaos_ray.disturbed(folder, kills, seed)
    assert sum(tally.kills.values()) == kills and tally.bit_equal >= 1
    return tally


@pytest.mark.timeout(600)
def test_ten_actors_are_killed_and_runs_end_as_undisturbed_ones_do(actors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    killed(tmp_path, 10, seed=3)


@pytest.mark.large
@pytest.mark.timeout(3600)
def test_fifty_actors_are_killed(actors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tally = killed(tmp_path, 50, seed=5)
    assert {"generator", "learner", "verifier", "controller"} <= tally.kills.keys()
