"""Before anything loads torch: the settings of the process, and a cache of tiny models that nobody else sees."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from nearpolicy.machine import prepare_environment

prepare_environment()
# A shell starts background jobs with Ctrl-C ignored, and their children inherit it: they would not stop when sent one.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("unhurried", deadline=None)  # whatever else the machine does
settings.load_profile("unhurried")


def _own_cache() -> None:
    """A cache for this session, which a killed test may leave torn without harm; what was made from packages before
    (the real model of the large tests, minutes and half a gigabyte) is linked into it."""
    real = Path(os.environ.get("NEARPOLICY_CACHE") or Path.home() / ".cache" / "nearpolicy") / "models"
    own = Path(tempfile.mkdtemp(prefix="nearpolicy-tests-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    (own / "models").mkdir()
    for model in real.glob("llm-*"):
        (own / "models" / model.name).symlink_to(model)
    os.environ["NEARPOLICY_CACHE"] = str(own)


_own_cache()


@pytest.fixture(autouse=True)
def _ctrl_c_as_ever():
    """`nearpolicy train` in this process takes Ctrl-C over for good; the next test finds it as usual."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


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
