"""One Ray for the whole test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_actors import WarmCluster, begin_ray


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    ray = begin_ray()
    yield
    WarmCluster.pool.clear()
    WarmCluster.records.clear()
    ray.shutdown()


@pytest.fixture
def actors(ray_here, monkeypatch) -> type[WarmCluster]:
    monkeypatch.setattr("nearpolicy.launch.ray.runtime.Cluster", WarmCluster)
    return WarmCluster
