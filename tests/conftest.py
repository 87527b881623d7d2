"""Before anything loads torch: the settings of the process, and a cache of tiny models that nobody else sees."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from nearpolicy.machine import prepare_environment

prepare_environment()
if "NEARPOLICY_CACHE" not in os.environ:
    os.environ["NEARPOLICY_CACHE"] = tempfile.mkdtemp(prefix="nearpolicy-tests-")
    atexit.register(shutil.rmtree, os.environ["NEARPOLICY_CACHE"], ignore_errors=True)
