"""What a process knows of its own memory and of those it has started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nearpolicy.machine import has_large_pages, helpers_peak_memory_mb


def test_helper_processes_are_counted_apart_each_with_its_peak():
    before = len(helpers_peak_memory_mb())
    program = "data = bytearray(100 << 20); del data; print('ready', flush=True); input()"
    helper = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert helper.stdout.readline() == "ready\n"
        found = helpers_peak_memory_mb()
        assert len(found) == before + 1
        assert 100 < max(found) < 1000  # the peak, though the memory is given back
    finally:
        helper.communicate("\n")
    assert len(helpers_peak_memory_mb()) == before


PROGRAM = """
import sys
import nearpolicy.machine as machine
if sys.argv[1:]:
    machine.has_large_pages = lambda: False
machine.prepare_environment()
import resource, torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25 << 20).mul(2.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(*[faults() for _ in range(12)])
"""


def page_faults(*arguments: str) -> list[int]:
    """Of an operation on 100 MB, twelve times over."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    own = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    return list(map(int, subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.split()))


def test_freed_blocks_are_there_for_the_next_ones_where_all_pages_are_small():
    faults = page_faults("without large pages")
    assert faults[0] > 25_000  # pages of 4 KB
    assert max(faults[-4:]) < 1000


@pytest.mark.skipif(not has_large_pages(), reason="the kernel has no large pages for processes that ask")
def test_large_pages_make_the_first_use_of_memory_cheap_too():
    assert max(page_faults()[1:]) < 5000


def test_what_a_process_leaves_alone_in_search_of_garbage_stays_so():
    """Whoever directs a run looks rarely; afterwards all is as before, with objects frozen before and without."""
    program = """
import gc
from nearpolicy.machine import collect_garbage_rarely
for freeze in (lambda: None, gc.freeze):
    freeze()
    before = gc.get_threshold(), gc.get_freeze_count() > 0
    undo = collect_garbage_rarely()
    assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > before[0][0]
    undo()
    assert (gc.get_threshold(), gc.get_freeze_count() > 0) == before, before
"""
    subprocess.run([sys.executable, "-c", program], check=True)
