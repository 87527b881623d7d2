"""Helper processes that live for the whole session; one that a test has killed is replaced."""

from __future__ import annotations

import pytest
from far import Far

_helpers: list[Far] = []


@pytest.fixture(scope="session")
def _ends_helpers():
    yield
    for helper in _helpers:
        helper.close()


@pytest.fixture
def helpers(_ends_helpers):
    """Three processes."""
    _helpers[:] = [helper for helper in _helpers if helper.alive]
    _helpers.extend(Far() for _ in range(3 - len(_helpers)))
    return list(_helpers)
