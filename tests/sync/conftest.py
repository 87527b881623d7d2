"""Helper processes that live for the whole session; one that a test has killed is replaced."""

from __future__ import annotations

import pytest
from far import Far

_helpers: list[Far] = []


def _loads() -> None:
    import shipping_cases  # noqa: F401  (and torch with it)


@pytest.fixture(scope="session")
def _ends_helpers():
    yield
    for helper in _helpers:
        helper.close()


def _alive(count: int) -> list[Far]:
    _helpers[:] = [helper for helper in _helpers if helper.alive]
    new = [Far() for _ in range(count - len(_helpers))]
    for answer in [helper.ask(_loads) for helper in new]:  # at the same time, and before the test
        answer.result(60)
    _helpers.extend(new)
    return _helpers[:count]


@pytest.fixture
def helpers(_ends_helpers):
    """Two processes."""
    return _alive(2)


@pytest.fixture
def helper(_ends_helpers):
    """A process."""
    return _alive(1)[0]
