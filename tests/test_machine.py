"""What a process knows of its own memory and of those it has started."""

from __future__ import annotations

import subprocess
import sys

from nearpolicy.machine import helpers_peak_memory_mb


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


def test_freed_blocks_are_there_for_the_next_ones_without_page_faults():
    program = """
import nearpolicy.machine as machine
machine.prepare_environment()
import resource, torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25 << 20).mul(2.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(*[faults() for _ in range(12)])
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    faults = list(map(int, out.split()))
    assert faults[0] > 25_000  # 100 MB in pages of 4 KB
    assert max(faults[-4:]) < 1000
