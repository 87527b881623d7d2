"""Before anything loads torch: the settings of the process, and a cache of tiny models that nobody else sees."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

import pytest

from nearpolicy.machine import prepare_environment

prepare_environment()
if "NEARPOLICY_CACHE" not in os.environ:
    os.environ["NEARPOLICY_CACHE"] = tempfile.mkdtemp(prefix="nearpolicy-tests-")
    atexit.register(shutil.rmtree, os.environ["NEARPOLICY_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _one_thread():
    """Every test begins as a role of the product does; tests of threads set their own number."""
    torch = sys.modules.get("torch")
    if torch is None:  # a test of the torch-free half
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
