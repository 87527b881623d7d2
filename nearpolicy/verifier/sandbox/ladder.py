"""Which isolation there is: asked for by name, or the strongest that withstands an attack of ours. Never a silent step
down: what was tried, and why it does not do, is in the error."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nearpolicy.errors import VerifierError
from nearpolicy.verifier.sandbox import bubblewrap, syscalls
from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.probe import escapes
from nearpolicy.verifier.sandbox.runs import Ended, OnFrame, Run, Sandbox

LADDER = ("namespaces", "landlock")
"""From the strongest down; what `auto` may choose from."""
UNISOLATED = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A sandbox in use, and what stands behind its name."""

    sandbox: Sandbox
    isolation: str
    escapes: tuple[str, ...] = ()
    """What the check got done; only ever of an isolation of `none`."""
    passed_over: tuple[str, ...] = ()
    """Stronger ones that are not to be had here, and why."""

    async def run(self, run: Run, on_frame: OnFrame | None = None) -> Ended:
        return await self.sandbox.run(run, on_frame)

    async def close(self) -> None:
        await self.sandbox.close()


async def opened(
    isolation: str, *, workers: int, packages: Sequence[str], allow_unisolated: bool, url: str | None = None
) -> Opened:
    """A sandbox that has withstood the check; a ``remote`` one that answers, behind ``url``.

    Raises `VerifierError` if there is none, with all that was tried.
    """
    if isolation == "remote":
        from nearpolicy.verifier.sandbox.remote import Remote

        remote = Remote(str(url), workers)
        try:
            await remote.check()
        except BaseException:
            await remote.close()
            raise
        return Opened(sandbox=remote, isolation=isolation)
    tried: list[str] = []
    for name in LADDER if isolation == "auto" else (isolation,):
        found = await attacked(name, workers=workers, packages=packages)
        if isinstance(found, str):
            tried.append(f"{name}: {found}")
        elif not found.escapes or (name == UNISOLATED and allow_unisolated):
            return replace(found, passed_over=tuple(tried))
        else:
            await found.close()
            tried.append(f"{name}: a program {', '.join(found.escapes)}")
    raise VerifierError(
        f"programs cannot be isolated on this machine ({'; '.join(tried)}). `nearpolicy doctor` explains each. "
        f"Run where user namespaces or Landlock are allowed, or name a remote sandbox; only for programs that you "
        f"trust as your own: verifier.isolation=none with verifier.allow_unisolated=true"
    )


async def attacked(isolation: str, *, workers: int, packages: Sequence[str]) -> Opened | str:
    """A sandbox and what a hostile program got done in it; or why it is not to be had."""
    if (reason := _missing(isolation)) is not None:
        return reason
    sandbox = _sandbox(isolation, workers, installed(packages))
    found = Opened(sandbox=sandbox, isolation=isolation)
    try:
        won = await escapes(sandbox, packages=bool(packages))
    except BaseException:
        await found.close()
        raise
    if isinstance(won, str):
        await found.close()
        return won
    return replace(found, escapes=tuple(won))


def _sandbox(name: str, workers: int, packages: Sequence[str]) -> Any:
    if name == "bubblewrap":
        return bubblewrap.Bubblewrap(workers, packages)
    return Workers(name, workers, packages)


def _missing(name: str) -> str | None:
    """Why an isolation is not to be had, as far as it can be told without trying."""
    if name in ("namespaces", "landlock", "bubblewrap") and not syscalls.supported():
        return "there is no filter of system calls for this processor"
    if name == "bubblewrap" and bubblewrap.available() is None:
        return "bwrap is not installed"
    if name == "landlock":
        from nearpolicy.verifier.sandbox import kernel

        if kernel.landlock_version() == 0:
            return "the kernel has no Landlock (Linux 5.13), or it is turned off"
    return None


def installed(packages: Sequence[str]) -> list[str]:
    """Folders and files that make up these packages; `VerifierError` for one that programs cannot be given."""
    found: dict[str, None] = {}
    for name in packages:
        place = _place(name)
        for top in (place.name, *sorted(_top_level(name))):
            path = place.parent / top
            if path.exists():
                found[os.fspath(path)] = None
    return list(found)


def _place(name: str) -> Path:
    """The folder of a package, or the file of a single module."""
    if "." in name:
        raise VerifierError(f"verifier.packages names {name!r}; name the whole package, {name.partition('.')[0]!r}")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise VerifierError(
            f"verifier.packages names {name!r}, which is not installed here: install it, or leave it out"
        )
    if not spec.has_location:  # its origin is a word, and as a path that would be somewhere else
        raise VerifierError(f"verifier.packages names {name!r}, which is a part of Python itself; leave it out")
    origin = Path(spec.origin)
    if not origin.exists():
        raise VerifierError(f"verifier.packages names {name!r}, which is no file but {origin}; install it unpacked")
    # Not by what else the spec says: `six` is one file, and calls itself a package once it is loaded.
    return origin.parent if origin.name.startswith("__init__.") else origin


def _top_level(package: str) -> set[str]:
    """What its distribution puts beside it: ``numpy.libs`` is where numpy's libraries lie."""
    try:
        tops = _tops(package)
    except importlib.metadata.PackageNotFoundError:
        tops = set()
    if package not in tops:  # it is called otherwise: to find out how, all that is installed is read
        owners = importlib.metadata.packages_distributions().get(package, [])
        tops = _tops(owners[0]) if owners else set()
    return {top for top in tops if top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".pth"))}


def _tops(distribution: str) -> set[str]:
    files = [Path(file) for file in importlib.metadata.files(distribution) or ()]
    return {file.parts[0] for file in files if not file.is_absolute()}
