"""``nearpolicy doctor``: what this machine offers, tried and not believed, and what to do about what it lacks."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from nearpolicy.launch.words import section
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.verifier.sandbox.ladder import Opened

Lines = Iterator[tuple[str, str]]
RUNS = 20
"""That are timed."""
_ISOLATIONS = {
    "namespaces": "namespaces of the kernel and all of landlock; may write files",
    "landlock": "Landlock, a filter of system calls, limits; no writable folder",
    "bubblewrap": "namespaces by bwrap and an interpreter for each run; the slow reference",
}
_REMEDIES = {
    "namespaces": "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, or "
    "kernel.apparmor_restrict_unprivileged_userns=0), or run as root with CAP_SYS_ADMIN",
    "landlock": "use Linux 5.13 or newer with Landlock among its security modules",
    "bubblewrap": "install bubblewrap if you want the reference path; nothing else needs it",
}


def command(
    package: Annotated[
        list[str] | None, typer.Option(help="What programs may import, as verifier.packages (default: numpy).")
    ] = None,
) -> None:
    """Examine this machine."""
    section("machine", _machine())
    section("isolation of programs (verifier.isolation)", asyncio.run(_isolation(package or ["numpy"])))


def _machine() -> Lines:
    from nearpolicy.launch.sizes import versions
    from nearpolicy.machine import num_cores

    yield "cores", str(num_cores())
    yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGESIZE') / 2**20:,.0f} MB"
    yield "kernel", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "user", "root" if os.getuid() == 0 else "ordinary"
    yield "python", platform.python_version()
    yield "packages", ", ".join(f"{name} {version}" for name, version in versions().items())


async def _isolation(packages: list[str]) -> list[tuple[str, str]]:
    from nearpolicy.verifier.sandbox.ladder import LADDER, attacked

    lines, chosen = [], None
    for name, what in _ISOLATIONS.items():
        begin = time.perf_counter()
        found = await attacked(name, workers=1, packages=packages)
        if isinstance(found, str):
            lines.append((name, visible(f"not to be had: {found}; {_REMEDIES[name]}")))
            continue
        ready = time.perf_counter() - begin
        try:
            seconds = await _timed(found)
        finally:
            await found.close()
        if isinstance(seconds, str):
            lines.append((name, visible(f"FAILS: a program cannot be run: {seconds}")))
            continue
        if found.escapes:
            lines.append((name, f"FAILS: a program {', '.join(found.escapes)}"))
            continue
        chosen = chosen or (name if name in LADDER else None)
        median = 1000 * statistics.median(seconds)
        lines.append((name, f"withstands; ready in {ready:.2f} s, {median:.1f} ms a run; {what}"))
    none = "none: rewards of the kind code are refused, unless isolation is none or remote"
    return [*lines, ("auto takes", chosen or none)]


async def _timed(opened: Opened) -> list[float] | str:
    """The seconds of some runs; or why one of them failed."""
    from nearpolicy.verifier.sandbox.runs import Run

    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        ended = await opened.run(Run(kind="program", program=b"pass"))
        if ended.failure is not None or ended.status != 0 or ended.stopped is not None:
            return ended.failure or ended.stopped or f"status {ended.status}"
        seconds.append(time.perf_counter() - begin)
    return seconds
