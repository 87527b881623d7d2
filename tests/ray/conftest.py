"""One Ray for the whole test run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from forked_workers import begun_ray


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    with begun_ray():
        gc.collect()
        gc.freeze()  # each run looks for garbage when it begins, and needs not look at all modules again
        yield
        gc.unfreeze()


@pytest.fixture
def actors(ray_here) -> None:
    """Runs find Ray begun, and leave it so."""
