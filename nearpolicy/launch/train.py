"""``nearpolicy train``: run a recipe to its end, one line per step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.launch.interrupts import INTERRUPTED, leave, obey, say
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.launch.session import Session
    from nearpolicy.launch.supervised import Supervised
    from nearpolicy.store.folder import RunFolder


def command(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe.", show_default=False)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value", show_default=False)] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="A run folder: go on where that run ended, however it ended.", show_default=False),
    ] = None,
) -> None:
    """Train a recipe; writes a run folder. Ctrl-C ends after the step in progress, twice at once."""
    from nearpolicy.launch.check import refuse
    from nearpolicy.launch.report import write_report
    from nearpolicy.launch.sizes import memory_warning
    from nearpolicy.launch.supervised import Supervised, session_of
    from nearpolicy.launch.words import place

    config, folder = _asked_for(recipe, overrides or [], resume)
    shape = refuse(config, makes_run=folder is None)
    if shape is not None and (warning := memory_warning(config, shape)) is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    watch = StepLine(config.run.steps)
    run = Supervised(session_of(config=config, folder=folder, resumes=folder is not None, say=_say, on_step=watch))
    obey(partial(_interrupted, run))
    summary = run.run()
    assert run.session.folder is not None  # made by then
    report = write_report(run.session.folder.path)
    print(closing_words(summary))
    print(f"report: {place(report)}")
    folder = run.session.folder
    if run.session.stop_requested and _steps_done(folder) < run.session.config.run.steps:
        print(f"go on with: nearpolicy train --resume {place(folder.path)}")
        sys.exit(INTERRUPTED)


def _asked_for(recipe: Path | None, overrides: list[str], resume: Path | None) -> tuple[RunConfig, RunFolder | None]:
    """What to train, and the folder of the run if it goes on."""
    from nearpolicy.config import load_recipe
    from nearpolicy.errors import ConfigError, RunFolderError
    from nearpolicy.launch.resume import resumed_config
    from nearpolicy.launch.why import let_go
    from nearpolicy.store.folder import RunFolder

    if resume is None:
        if recipe is None:
            raise ConfigError("name a recipe to train, such as recipes/demo.yaml, or a run with --resume")
        return load_recipe(recipe, overrides), None
    if recipe is not None and "=" not in str(recipe):
        raise ConfigError(f"{recipe}: a run is taken up with its own recipe; name none beside --resume")
    folder = RunFolder(resume.resolve())
    config = resumed_config(folder, ([str(recipe)] if recipe is not None else []) + overrides)
    if not let_go(folder):
        raise RunFolderError(f"{resume} is being written by another process; wait for it, or stop it")
    done = _steps_done(folder)
    if done > config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: {resume} has done {done} steps already; ask for more, or for none"
        )
    if folder.summary.exists() and done == config.run.steps:
        raise RunFolderError(f"{resume} is finished: all of its {done} steps are done, and it is summed up")
    return config, folder


def _steps_done(folder: RunFolder) -> int:
    from nearpolicy.store.reader import RunReader

    with RunReader(folder.path) as run:
        return len(run.steps())


def _say(text: str) -> None:
    print(visible(text), flush=True)


def _interrupted(run: Supervised) -> None:
    """The first Ctrl-C. Before version 0 is published there is nothing that would be worth waiting for."""
    from nearpolicy.launch.session import NOTHING_CHANGED

    session = run.session
    if not session.begun and not session.opening:
        what = NOTHING_CHANGED if session.resumes else "stopping before the first step; nothing is kept"
        leave(f"{what} (press Ctrl-C again to stop at once)")
    end_soon(session)


def end_soon(session: Session) -> None:
    """Have the run end after the step it is in, and say so."""
    session.stop()
    early = "before the run goes on" if session.resumes else "before the first step; nothing is kept"
    when = "after this step" if session.begun else early
    say(f"stopping {when}; press Ctrl-C again to stop at once")


class StepLine:
    """Prints what a person wants to see of each step."""

    COLUMNS = (
        ("reward", "reward/mean", "{:.3f}", 6),
        ("no signal", "reward/zero_variance_share", "{:.2f}", 9),
        ("length", "completion/length_mean", "{:.1f}", 6),
        ("entropy", "policy/entropy", "{:.3f}", 7),
        ("grad", "policy/grad_norm", "{:.3g}", 7),
        ("logp gap", "mismatch/logprob_diff_max", "{:.2g}", 8),
        ("stale", "staleness/max", "{:.0f}", 5),
        ("wait", "time/wait_s", "{:.1f}", 5),
        ("took", "time/step_s", "{:.1f}", 5),
    )
    """Title, metric, format, width; 80 characters with the step and its version. docs/metrics.md explains them."""

    def __init__(self, total: int) -> None:
        self._total = total

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 20 == 0:
            print(" ".join(["step version", *(f"{title:>{width}}" for title, _, _, width in self.COLUMNS)]))
        cells = [
            f"{form.format(metrics[name]) if name in metrics else '-':>{width}}"
            for _, name, form, width in self.COLUMNS
        ]
        version = f"{step + 1}/{self._total}"
        print(" ".join([f"{step:>4} {version:>7}", *cells]), flush=True)


def _peaks_by_kind(summary: Mapping[str, Any]) -> str:
    """``learner 812 MB, generator 640 MB``: of each kind of role that had processes of its own, the largest."""
    largest: dict[str, float] = {}
    for role, size in summary.get("roles_peak_memory_mb", {}).items():
        kind = role.rpartition(" ")[0]
        largest[kind] = max(size, largest.get(kind, 0.0))
    return ", ".join(f"{kind} {size:,.0f} MB" for kind, size in largest.items())


def closing_words(summary: Mapping[str, Any]) -> str:
    """The few lines a person reads at the end."""
    from nearpolicy.evaluate.metrics import wilson_interval
    from nearpolicy.launch.words import count
    from nearpolicy.records import Fate
    from nearpolicy.telemetry.ledger import ledger_table

    steps = count(summary["steps"], "step")
    if summary.get("resumed_after"):
        steps += f", {summary['steps'] - summary['resumed_after']} of them"
    lines = [
        f"{steps} in {summary['wall_s']:.0f} s of training (set-up {summary['setup_s']:.0f} s), "
        f"peak memory {summary['peak_memory_mb']:.0f} MB, numerics {summary['numerics']}"
    ]
    if peaks := _peaks_by_kind(summary):
        lines.append(f"peak memory of other processes: {peaks}")
    for when in ("before", "after"):
        found = summary["held_out"][when]
        if not found:
            continue
        missing = f", {found['not_judged']} not judged" if found["not_judged"] else ""
        if not found["count"]:
            lines.append(f"held out {when + ':':<7} no answer could be judged{missing}")
        else:
            low, high = wilson_interval(found["correct"], found["count"])
            passes = "".join(f", {k.replace('_at_', '@')} {v:.3f}" for k, v in found.items() if k.startswith("pass"))
            lines.append(
                f"held out {when + ':':<7} {found['accuracy']:.1%} ({found['correct']} of {found['count']}, "
                f"95 % interval {low:.1%} to {high:.1%}){passes}{missing}"
            )
    ledger = {Fate(name): tokens for name, tokens in summary["ledger"].items()}
    lines += ledger_table(
        ledger, undone=summary["undone_tokens"], lost_groups=summary["lost_groups"], seconds=summary["steps_s"]
    )
    return "\n".join(lines)
