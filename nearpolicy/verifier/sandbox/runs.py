"""What is asked of a sandbox, and what it knows afterwards. Plain data; what it means is decided in `grading`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

OnFrame = Callable[[bytes], Awaitable[bytes]]
"""Called with each frame of a run of test code; what it returns is sent back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one run. Processor time decides; the wall limit is a backstop."""

    cpu_s: float = 5.0
    wall_s: float | None = None
    """Default: twice ``cpu_s`` and 2."""
    memory_mib: int = 512
    """Address space beyond what the interpreter holds."""
    output_kib: int = 1024
    """Of stdout, and of a result."""
    processes: int = 1
    """More than 1: the run may start others; each has the limits of memory and processor time for itself."""

    @property
    def wall(self) -> float:
        return self.wall_s if self.wall_s is not None else 2 * self.cpu_s + 2


STDERR_KEPT = 64 * 1024
STDERR_CAP = 16 * 1024 * 1024
"""stderr is read and thrown away between these; beyond, it counts as output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program and one input."""

    kind: str
    """A form of `harness`: program, call, tests, together, command."""
    program: bytes
    stdin: bytes = b""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of that form."""
    limits: Limits = Limits()
    packages: bool = False
    """Whether it needs more than the standard library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended. Of a failure nothing else says anything about the program."""

    status: int = 0
    """Exit status; minus the number of a signal."""
    stdout: bytes = b""
    stderr: bytes = b""
    frame: bytes | None = None
    """The first result that was sent, of those forms that send one."""
    stopped: str | None = None
    """Which limit we ended it for: cpu, wall, output."""
    failure: str | None = None
    """Why it could not be run, or was lost, or was starved; nothing that a program can cause."""
    starved: bool = False
    """The failure is that it waited for a processor instead of computing."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mib: float = 0.0


class Sandbox(Protocol):
    """Runs programs that nobody trusts."""

    async def run(self, run: Run, on_frame: OnFrame | None = None) -> Ended: ...

    async def close(self) -> None: ...
