"""What of a machine decides how a run goes, tried where it can be tried, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path

from nearpolicy.launch.findings import Finding, info, note, ok, wrong

LEAST_MEMORY_MB, LEAST_DISK_MB = 2000, 2000
"""What the demo needs of either, about."""
_COLLAPSED = 0.7
"""Of one thread's pace, that several threads reach at least beside a busy process."""


def machine(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    from nearpolicy.machine import num_cores

    yield info("kernel", f"{platform.system()} {platform.release()}, {platform.machine()}, python "
               f"{platform.python_version()}, user {'root' if os.getuid() == 0 else 'ordinary'}")  # fmt: skip
    yield info("cores", str(num_cores()))
    yield from memory(Path("/proc/meminfo"))
    yield from disk(_cache_folder(), Path.cwd())
    yield large_pages()
    yield from thread_settings(environment)


def memory(source: Path) -> Iterator[Finding]:
    try:
        fields = dict(line.split(":", 1) for line in source.read_text(encoding="utf-8").splitlines())
        total, free = (int(fields[name].split()[0]) / 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / 2**20
        yield info("memory", f"{total:,.0f} MB")
        return
    said = f"{free:,.0f} MB of {total:,.0f} are free"
    if free < LEAST_MEMORY_MB:
        yield note(
            "memory", f"{said}; the demo takes more. Close what holds it; nearpolicy check says what a run needs"
        )
    else:
        yield ok("memory", said)


def disk(*folders: Path) -> Iterator[Finding]:
    """Of models (the cache) and of runs (here); one line where both are on one disk."""
    seen: dict[int, str] = {}
    for folder, what in zip(folders, ("models", "runs"), strict=True):
        there = next(each for each in (folder, *folder.parents) if each.exists())
        if (device := there.stat().st_dev) in seen:
            continue
        seen[device] = what
        free = shutil.disk_usage(there).free / 2**20
        said = f"{free:,.0f} MB free for {what} ({folder})"
        if not os.access(there, os.W_OK):
            yield wrong("disk", f"{folder} cannot be written to; set NEARPOLICY_CACHE or run.dir to another folder")
        elif free < LEAST_DISK_MB:
            yield note("disk", f"{said}; a checkpoint of the demo takes 1.6 GB. Make room, or use another folder")
        else:
            yield ok("disk", said)


def _cache_folder() -> Path:
    """As `nearpolicy.models.loading.cache_dir`, which loads torch."""
    return Path(os.environ.get("NEARPOLICY_CACHE") or Path.home() / ".cache" / "nearpolicy") / "models"


def large_pages() -> Finding:
    from nearpolicy.machine import has_large_pages

    if has_large_pages():
        return ok("large pages", "given to a process that asks (transparent_hugepage)")
    return note(
        "large pages",
        "not to be had; freed memory is kept instead, which costs memory and a little time. As root: echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled",
    )


def thread_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that a person has set, after `prepare_environment` has filled in the rest."""
    policy = environment.get("OMP_WAIT_POLICY", "")
    if policy.lower() == "passive":
        yield ok("OMP_WAIT_POLICY", "passive: threads that wait leave their core to others")
    else:
        yield note("OMP_WAIT_POLICY", f"{policy or 'not set'}: threads spin while they wait, and engine and learner "
                   "slow each other down several times. Unset it, nearpolicy sets passive")  # fmt: skip
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in environment:
            yield info(name, f"{environment[name]}; roles set their own number, generator.threads and learner.threads")
    for name in ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "KMP_AFFINITY"):
        if environment.get(name, "false").lower() not in ("false", ""):
            yield note(name, f"{environment[name]}: threads of engine and learner may share one core; unset it")
    if platform.machine() in ("x86_64", "AMD64"):
        from nearpolicy.machine import strict_mkl_branch

        wanted, found = strict_mkl_branch(), environment.get("MKL_CBWR")
        if wanted is not None and (found is None or "STRICT" not in found):
            yield note("MKL_CBWR", f"{found or 'not set'}: exact numerics need a strict branch here. Set {wanted}, or "
                       "unset it")  # fmt: skip


# What torch is needed for


def computing() -> Iterator[Finding]:
    """Accelerator, rows of products, threads beside a busy process."""
    yield accelerator()
    yield invariance()
    yield from _threads()


def accelerator() -> Finding:
    import torch

    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{each.name} ({each.total_memory / 2**20:,.0f} MB)" for each in found)
        return note("GPU", f"{names}; a run takes the first one, with fast numerics. It is not what this project is "
                    "tested on; hide it (CUDA_VISIBLE_DEVICES=) for exact numerics on the CPU")  # fmt: skip
    if any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")):
        return note("GPU", f"the system has one and this torch ({torch.__version__}) cannot use it; install the build "
                    "for it, or go on with the CPU")  # fmt: skip
    return ok("GPU", f"none: everything runs on the CPU (torch {torch.__version__})")


def invariance() -> Finding:
    """On the shapes of SmolLM2-135M and of a small Qwen; a model's own are probed with --model and in every run."""
    from nearpolicy.machine import num_cores
    from nearpolicy.models.numerics import probe

    shapes = [(576, 576), (576, 192), (576, 1536), (1536, 576), (896, 4864), (4864, 896)]
    return invariance_said(probe(shapes, [(64, 64)], num_cores()))


def invariance_said(found) -> Finding:
    if found is None:
        return note(
            "batch invariance",
            "rows of a product depend on their neighbours: exact numerics are not to be had, and run.numerics: exact "
            "is refused. With fast, the gap between engine and learner is measured and corrected",
        )
    threads = f"up to {found.max_threads} thread{'s' * (found.max_threads > 1)}"
    return ok("batch invariance", f"rows of products stand alone from {found.min_rows} rows a thread on, {threads}: "
              "exact numerics are to be had")  # fmt: skip


def _threads() -> Iterator[Finding]:
    from nearpolicy.machine import num_cores

    cores = num_cores()
    if cores == 1:
        yield info("threads", "one core: engine and learner take turns")
        return
    alone, beside = _paces(cores)
    yield thread_paces(cores, alone, beside)


def thread_paces(cores: int, alone: Mapping[int, float], beside: Mapping[int, float]) -> Finding:
    """Threads -> products a second, with the machine to itself and beside one busy process."""
    gain, kept = alone[cores] / alone[1], beside[cores] / beside[1]
    said = f"{cores} threads are {gain:.1f} times as fast as one, beside a busy process {kept:.1f} times"
    if kept < _COLLAPSED:
        return note("threads", f"{said}: they collapse. Leave OMP_WAIT_POLICY at passive, and give engine and learner "
                    "one thread each (generator.threads, learner.threads) where others use the machine")  # fmt: skip
    if gain < 1.2:
        return note("threads", f"{said}: something else uses the cores, or they are not whole ones")
    return ok("threads", said)


def _paces(cores: int) -> tuple[dict[int, float], dict[int, float]]:
    """Of products of the size that a small model decodes with."""
    import torch

    x, weight, before = torch.randn(64, 576), torch.randn(1536, 576), torch.get_num_threads()

    def pace(threads: int, seconds: float = 0.12) -> float:
        torch.set_num_threads(threads)
        torch.nn.functional.linear(x, weight)
        begin, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            torch.nn.functional.linear(x, weight)
            count += 1
        return count / spent

    try:
        alone = {threads: pace(threads) for threads in (1, cores)}
        neighbour = subprocess.Popen([sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"],
                                     stdout=subprocess.PIPE)  # fmt: skip
        try:
            neighbour.stdout.readline()  # it runs
            beside = {threads: pace(threads) for threads in (1, cores)}
        finally:
            neighbour.kill()
            neighbour.communicate()
    finally:
        torch.set_num_threads(before)
    return alone, beside


# Packages


def packages() -> Iterator[Finding]:
    """Against the ranges that this package asks for and, in a checkout, the versions that it is tested with."""
    from nearpolicy import __version__

    yield info("nearpolicy", __version__)
    try:
        wanted = metadata.requires("nearpolicy") or []
    except metadata.PackageNotFoundError:
        yield note("packages", "nearpolicy is not installed, so nothing says what it needs: pip install -e .")
        return
    yield from versions(wanted, _tested(Path(__file__).parents[2] / "constraints.txt"), _installed)
    yield from engines()


def versions(wanted, tested: Mapping[str, str], installed) -> Iterator[Finding]:
    """``wanted``: requirements as in a package's metadata. ``installed``: name -> version, or None."""
    from packaging.requirements import Requirement

    fine, others = 0, []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None:  # extras
            continue
        found = installed(requirement.name)
        if found is None:
            yield wrong(requirement.name, f"is missing; pip install '{requirement}'")
        elif not requirement.specifier.contains(found, prereleases=True):
            yield wrong(requirement.name, f"{found} is here and {requirement.specifier} is needed; pip install "
                        f"'{requirement}'")  # fmt: skip
        else:
            fine += 1
            known = tested.get(_plain(requirement.name))
            if known is not None and known != found.partition("+")[0]:
                others.append(f"{requirement.name} {found} ({known})")
    said = f"{fine} packages in the ranges that are needed"
    if others:
        yield note("packages", f"{said}; tested with other versions, in brackets: {', '.join(others)}")
    else:
        yield ok("packages", said + (", at the versions that are tested" if tested else ""))


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _tested(file: Path) -> dict[str, str]:
    """Of a checkout; nothing where the package is installed without one."""
    if not file.is_file():
        return {}
    lines = (line.partition("==") for line in file.read_text(encoding="utf-8").splitlines())
    return {_plain(name): version.strip() for name, equals, version in lines if equals}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def engines() -> Iterator[Finding]:
    yield ok("engine embedded", "part of nearpolicy; what runs use")
    if util.find_spec("vllm") is not None:
        yield info("engine vllm", f"{_installed('vllm') or 'of unknown version'} is installed; no run uses it yet")
