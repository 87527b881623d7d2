"""One pool of rank processes for all of the learner's tests."""

from __future__ import annotations

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool()
    yield pool
    pool.close()
