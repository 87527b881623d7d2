"""What isolation costs: short programs in the sandbox against a bare interpreter, and how far limits are overshot.

    python -m benchmarks.sandbox [--quick] [--isolation namespaces] [--runs 10000]

Both sides start ``pass`` (and ``print(6 * 7)``, whose output is checked) as often, as many at a time as there are
cores: ours in a warm worker behind every wall, theirs as ``python -I -S -c``, unprotected. Processor time counts all
that a run causes: in this process, in the worker and in the run. Overshoot is how long a run lived beyond its limit,
for programs that sleep and for programs that compute. Then --runs executions (1,000 with --quick), after which there
must be no process, no zombie, no descriptor more than before. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.pairs import ratios
from nearpolicy.verifier.sandbox.bubblewrap import Bubblewrap
from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.runs import Limits, Run
from nearpolicy.verifier.sandbox.zygotes import interpreter

PASS = Run(kind="program", program=b"pass")
SHORT = Run(kind="program", program=b"print(6 * 7)")
CORES = os.cpu_count() or 1


async def _ours(sandbox: Any, runs: int) -> float:
    async def some() -> None:
        for _ in range(runs // CORES):
            ended = await sandbox.run(PASS)
            if ended.failure is not None or ended.status != 0:
                raise SystemExit(f"a run failed: {ended}")

    begin = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(CORES)))
    return time.perf_counter() - begin


async def _bare(runs: int) -> float:
    async def some() -> None:
        for _ in range(runs // CORES):
            process = await asyncio.create_subprocess_exec(interpreter(), "-I", "-S", "-c", "pass")
            await process.wait()

    begin = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(CORES)))
    return time.perf_counter() - begin


def _cpu_s() -> float:
    """Of this process, of the children it has waited for, and of the workers that live, with what these waited for."""
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    tick = os.sysconf("SC_CLK_TCK")
    for pid in _workers():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / tick
    return total


def _workers() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"nearpolicy.verifier.sandbox" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _zombies() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            count += entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
    return count


async def _overshoot(sandbox: Any, runs: int) -> dict[str, float]:
    """Seconds beyond the limit, 99th percentile and largest, of runs that sleep and that compute."""
    found = {}
    for name, program, limits in (
        ("wall", b"import time; time.sleep(60)", Limits(cpu_s=5, wall_s=0.3)),
        ("cpu", b"while True: pass", Limits(cpu_s=0.3, wall_s=20)),
    ):
        beyond: list[float] = []

        async def some(program: bytes = program, limits: Limits = limits, beyond: list[float] = beyond) -> None:
            for _ in range(runs // CORES):
                ended = await sandbox.run(Run(kind="program", program=program, limits=limits))
                beyond.append(ended.wall_s - limits.wall if limits.wall < 1 else ended.cpu_s - limits.cpu_s)

        await asyncio.gather(*(some() for _ in range(CORES)))
        found[f"{name}_p99_s"] = round(statistics.quantiles(beyond, n=100)[98], 4)
        found[f"{name}_max_s"] = round(max(beyond), 4)
    return found


async def measured(isolation: str, pairs: int, runs: int, many: int) -> dict[str, Any]:
    sandbox = Bubblewrap(CORES) if isolation == "bubblewrap" else Workers(isolation, CORES)
    short = await sandbox.run(SHORT)
    if short.stdout != b"42\n":
        raise SystemExit(f"the program printed {short.stdout!r}")
    await _ours(sandbox, runs), await _bare(runs)
    ours, bare, cpu = [], [], {"ours": 0.0, "bare": 0.0}
    for pair in range(pairs):
        for side in ("ours", "bare") if pair % 2 == 0 else ("bare", "ours"):
            before = _cpu_s()
            seconds = await (_ours(sandbox, runs) if side == "ours" else _bare(runs))
            (ours if side == "ours" else bare).append(seconds)
            cpu[side] += _cpu_s() - before
    latency = []
    for _ in range(100):
        begin = time.perf_counter()
        await sandbox.run(PASS)
        latency.append(time.perf_counter() - begin)
    result = {
        "isolation": isolation,
        "cores": CORES,
        "comparisons": {"short programs against a bare interpreter": ratios(ours, bare) | {"equal_results": True}},
        "runs_per_s": round(runs / statistics.median(ours), 1),
        "runs_per_s_bare": round(runs / statistics.median(bare), 1),
        "cpu_ms_a_run": round(1000 * cpu["ours"] / pairs / runs, 2),
        "cpu_ms_a_run_bare": round(1000 * cpu["bare"] / pairs / runs, 2),
        "median_wall_ms_alone": round(1000 * statistics.median(latency), 2),
        "overshoot": await _overshoot(sandbox, 20 if pairs < 5 else 100),
    }
    zombies, descriptors = _zombies(), len(os.listdir("/proc/self/fd"))
    workers, held = len(_workers()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await _ours(sandbox, many)
    result["after_many"] = {
        "runs": many,
        "processes_more": len(_workers()) - workers,
        "zombies_more": _zombies() - zombies,
        "descriptors_more": len(os.listdir("/proc/self/fd")) - descriptors,
        "memory_more_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024, 1),
    }
    if isinstance(sandbox, Workers):
        await sandbox.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--isolation", choices=["namespaces", "landlock", "bubblewrap"], default="namespaces")
    parser.add_argument("--runs", type=int, default=10_000)
    arguments = parser.parse_args()
    pairs, many = (2, min(1000, arguments.runs)) if arguments.quick else (5, arguments.runs)
    print(json.dumps(asyncio.run(measured(arguments.isolation, pairs, 200, many))))


if __name__ == "__main__":
    main()
