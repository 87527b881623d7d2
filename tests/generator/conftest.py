"""Lets these tests use the tiny models of `tests/models/families.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Every test begins as a role of the product does; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
