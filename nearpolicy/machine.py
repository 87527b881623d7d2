"""Settings of the process that must stand before torch loads. This module imports nothing heavy.

Two environment variables decide what the rest of the system can promise on a CPU:

- ``OMP_WAIT_POLICY=passive``: a spinning two-thread pool beside one busy process is several times slower than one
  thread.
- ``MKL_CBWR=<branch>,STRICT`` on Intel processors: MKL's strict conditional reproducibility makes every row of a
  product independent of the number of rows and of the thread count, at no measurable cost here. Without it AVX-512
  kernels switch at 16 rows and split the inner dimension over threads. Other vendors do not offer the strict branches;
  there the kernels happen to be independent from four rows per thread up, and `nearpolicy.models.numerics` measures it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_KEPT, _LARGEST_KEPT_OF_LARGE_PAGES = 1 << 30, 32 << 20


def prepare_environment() -> None:
    """Set what must be set before torch loads; values a user has already chosen stay."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    branch = strict_mkl_branch()
    if branch is not None:
        os.environ.setdefault("MKL_CBWR", branch)
    if has_large_pages():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for them, for blocks of 2 MB and more
        keep_freed_memory(_LARGEST_KEPT_OF_LARGE_PAGES)
    else:
        keep_freed_memory(_LARGEST_KEPT)


def has_large_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Whether the kernel backs memory with pages of 2 MB for a process that asks."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def keep_freed_memory(largest: int) -> None:
    """Have the allocator keep blocks that are freed, up to ``largest`` bytes each, for the next one of their size.

    glibc gives memory back to the kernel at once, and fresh memory costs a page fault every 4 KB: an elementwise
    operation on the logits of 512 tokens took three times as long as on memory that is there. With pages of 2 MB there
    are so few faults that the largest blocks need not be kept.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another C library has its own ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, largest)
        mallopt(_M_TRIM_THRESHOLD, largest)
        mallopt(_M_ARENA_MAX, 1)  # what one role's thread has freed serves the others


def collect_garbage_rarely() -> Callable[[], None]:
    """For a process that directs a run, once it is set up: look for cycles of garbage every 50,000 objects, not every
    700, and leave alone what is there now.

    Thousands of groups in flight are millions of objects that are no garbage, and hardly any belongs to a cycle:
    looking took 45 % of the controller's time (`python -m benchmarks.control`). What is returned undoes it. Where a
    process leaves objects alone already, it does with the same ones before, meanwhile and after."""
    import gc

    before, has_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    if not has_frozen:
        gc.freeze()
    gc.set_threshold(50_000, 20, 20)

    def as_before() -> None:
        gc.set_threshold(*before)
        if not has_frozen:
            gc.unfreeze()

    return as_before


def prepared_too_late() -> bool:
    """Whether torch was loaded before `prepare_environment` could have an effect."""
    return "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ


def strict_mkl_branch() -> str | None:
    """The strict reproducibility branch of this processor, or None where MKL has none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if "GenuineIntel" not in text:
        return None
    flags = _cpu_flags(text)
    if "avx512f" in flags:
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in flags else None


def bfloat16_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16 numbers itself."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_flags(text))


def _cpu_flags(cpuinfo: str) -> list[str]:
    return next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])


def num_cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends.

    Without this, a process inside a long call would outlive it: a closed pipe is noticed only between calls.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def signal_name(number: int) -> str:
    """``SIGKILL`` and so on; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def peak_memory_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def helpers_peak_memory_mb() -> list[float]:
    """Largest resident sizes so far, in MiB, of the processes that this one has started and that are alive."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it ended in the meantime
            fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
            if int(fields["PPid"]) == os.getpid():
                found.append(int(fields["VmHWM"].split()[0]) / 1024)
    return found


def adopt_orphans() -> None:
    """Have processes whose parents end become children of this one, and not of the system's first process."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Processes below this one, as they are now; where there is no /proc, none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found
