"""`nearpolicy report RUN`: write the run's ``report.html``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearpolicy.errors import RunFolderError
from nearpolicy.evaluate.metrics import HeldOutScore, held_out_scores
from nearpolicy.launch.words import place
from nearpolicy.store.reader import RunReader
from nearpolicy.telemetry.report import HeldOutPoint, render_report


def command(run: Annotated[Path, typer.Argument(help="The run folder.")]) -> None:
    """Write the run's report: one HTML file with everything inside."""
    print(place(write_report(run).resolve()))


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run folder, whole or not at all, and return its path. The run may still go on."""
    with RunReader(run_dir) as run:
        text = render_report(run, held_out_points(run))
        draft = run.folder.report.with_suffix(".html.tmp")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(run.folder.report)
        except OSError as error:
            raise RunFolderError(f"{run.folder.report} cannot be written: {error}") from error
        return run.folder.report


def held_out_points(run: RunReader) -> list[HeldOutPoint]:
    """Accuracy with its interval, and pass@k at the largest k that the samples allow, for every evaluation of a run."""
    points = [point for score in held_out_scores(run.evaluations()) if (point := _point(score)) is not None]
    return sorted(points, key=lambda point: (point.task, point.measure, point.version))


def _point(score: HeldOutScore) -> HeldOutPoint | None:
    questions = len(score.questions)
    if not score.count:
        return None
    if score.mode == "accuracy":
        measure, value, interval = "accuracy", score.accuracy, score.interval
        count = f"{score.correct} of {score.count}"
    else:
        k = min(judged for judged, _ in score.questions)
        measure, value, interval = f"pass@{k}", score.pass_at(k), None
        count = f"{questions} questions, {score.count} samples"
    if score.unjudged:
        count += f", {score.unjudged} not judged"
    assert value is not None  # count > 0, and k is no more than any question has
    return HeldOutPoint(
        task=score.task, measure=measure, version=score.version, value=value, interval=interval, count=count
    )
