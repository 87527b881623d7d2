"""``nearpolicy doctor``: what this machine offers, tried and not believed, and what to do about what it lacks; with
``--model`` whether a model can be trained here as it is.

Exit status 1 if a line says WRONG: a run would be wrong, or could not be. 2 for a model that is not there.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from nearpolicy.errors import ConfigError, ModelError
from nearpolicy.launch.findings import Finding, show
from nearpolicy.launch.words import section
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.verifier.sandbox.ladder import Opened

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
    model: Annotated[
        str | None,
        typer.Option(help="Examine this model instead: a folder, package:NAME or random:FAMILY, as model.path."),
    ] = None,
    numerics: Annotated[
        str | None, typer.Option(help="exact or fast, as run.numerics; with --model.", show_default=False)
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option(help="What programs may import, as verifier.packages (default: numpy).")
    ] = None,
) -> None:
    """Examine this machine, or a model on it. Exit status 1 if something would make a run wrong."""
    if numerics is not None and (model is None or numerics not in ("exact", "fast")):
        raise ConfigError(f"--numerics {numerics}: write exact or fast, beside --model")
    if model is not None and package:
        raise ConfigError("--package belongs to the machine, which is examined without --model; leave one of them out")
    found = _machine(package or ["numpy"]) if model is None else _model(model, numerics)
    wrong = [finding.label for finding in found if finding.verdict == "wrong"]
    notes = sum(finding.verdict == "note" for finding in found)
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
        raise typer.Exit(1)
    print("nothing is wrong" + (f"; {notes} line{'s' * (notes > 1)} worth reading (note)" if notes else ""))


def _machine(packages: list[str]) -> list[Finding]:
    from nearpolicy.launch import doctor_machine as of

    found = (
        show("machine", of.machine()) + show("packages and engines", of.packages()) + show("computing", of.computing())
    )
    section("isolation of programs (verifier.isolation)", asyncio.run(_isolation(packages)))
    return found


def _model(path: str, numerics: str | None) -> list[Finding]:
    import torch

    from nearpolicy.launch import doctor_model as of
    from nearpolicy.machine import num_cores
    from nearpolicy.models.config import ModelConfig
    from nearpolicy.models.device import pick_device
    from nearpolicy.models.loading import load_policy, resolve

    try:
        path = ModelConfig(path=path).path
    except ValueError as error:
        raise ConfigError(f"--model {path}: {error}") from None
    try:
        folder = resolve(path)
        renderer = of.renderer_of(folder)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "--model", 1)) from None
    found = show(f"text of {path}", of.text(renderer))
    torch.set_num_threads(num_cores())
    policy = load_policy(folder, torch.float32, pick_device(), known_to_fit=True)
    fit = of.fitness(policy, path)
    found += show("weights", chain([fit], of.tied(policy)))
    if fit.verdict == "wrong":
        return found  # there is nothing to compare
    mode, rule, said = of.numerics_of(policy, numerics)
    sides = of.Sides.of(folder, policy, mode, rule)
    try:
        return found + show("engine and learner", chain([said], of.agreement(sides, renderer)))
    finally:
        sides.close()


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
