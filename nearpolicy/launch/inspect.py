"""`nearpolicy inspect RUN`: what was sampled, how it was judged, what was made of it.

For people with colours and tables, for programs as JSON lines under the names of exported rollouts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nearpolicy.errors import UserError
from nearpolicy.records import Outcome, Segment, Verdict
from nearpolicy.store.reader import RunReader, StoredRollout
from nearpolicy.store.schema import prompt_text
from nearpolicy.visible import visible


def command(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    step: Annotated[int | None, typer.Option(help="Only rollouts that this step consumed; steps count from 0.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group, by its index of admission.")] = None,
    sample: Annotated[int | None, typer.Option(help="Only this sample index, in each group.")] = None,
    limit: Annotated[int, typer.Option(help="Rollouts shown, at most.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
) -> None:
    """Show rollouts of a run: text, rewards, versions, mask, advantages, fate."""
    inspect_run(run, step=step, group=group, sample=sample, limit=limit, as_json=as_json)


def inspect_run(
    run_dir: Path,
    step: int | None = None,
    group: int | None = None,
    sample: int | None = None,
    limit: int = 8,
    as_json: bool = False,
) -> None:
    """Print rollouts of a run: those of a step, of a group (admission index), of a place in the group, or the first."""
    with RunReader(run_dir) as run:
        found = list(run.rollouts(step=step, group=group, sample=sample, limit=limit))
        if not found:
            raise UserError(_nothing_found(run, step, group, sample))
        if as_json:
            for item in found:
                # Pure ASCII and strict, so that any parser takes it, whatever was sampled.
                print(json.dumps(rollout_as_json(item), allow_nan=False))
            return
        console = Console()
        console.print(_overview(run))
        for item in found:
            console.print(_panel(item))


def rollout_as_json(item: StoredRollout) -> dict[str, Any]:
    """A rollout as one JSON object; arrays hold one list per segment."""
    segments = item.rollout.segments
    rows = [item.rows.get(place) for place in range(len(segments))]
    prompt = item.admission.prompt
    return {
        "group_id": item.admission.index,
        "sample": item.rollout.sample,
        "attempt": item.admission.attempt,
        "task": prompt.task,
        "prompt_id": prompt.id,
        "prompt": prompt.text if prompt.text is not None else [dict(message) for message in prompt.messages or ()],
        "completion": item.rollout.text,
        "finish_reason": item.rollout.finish.value,
        "prompt_ids": [segment.context_ids.tolist() for segment in segments],
        "completion_ids": [segment.token_ids.tolist() for segment in segments],
        "completion_mask": [segment.mask.astype(int).tolist() for segment in segments],
        "trained_mask": [None if row is None else row.trained.astype(int).tolist() for row in rows],
        "behavior_logprobs": [_numbers(segment.behavior_logprobs) for segment in segments],
        "versions": [segment.versions.tolist() for segment in segments],
        "advantage": [None if row is None else _numbers(row.advantages) for row in rows],
        "reward": item.reward,
        "rewards": {source: verdict.value for source, verdict in item.verdicts.items()},
        "outcomes": {source: verdict.outcome.value for source, verdict in item.verdicts.items()},
        "step": item.step,
        "fates": {fate.value: tokens for fate, tokens in item.fates.items()},
        "reason": item.reason,
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _nothing_found(run: RunReader, step: int | None, group: int | None, sample: int | None) -> str:
    asked = {"step": step, "group": group, "sample": sample}
    what = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    steps, admissions = run.steps(), run.admissions()
    held = [f"steps {steps[0].step} to {steps[-1].step}" if steps else "no finished step"]
    held.append(f"groups {admissions[0].index} to {admissions[-1].index}" if admissions else "no admission")
    return f"{run.folder.path} has no rollout{' of ' + what if what else ''}; it holds {' and '.join(held)}"


def _overview(run: RunReader) -> Text:
    ledger = run.ledger()
    total = sum(ledger.values())
    fates = ", ".join(f"{fate.value} {tokens:,}" for fate, tokens in sorted(ledger.items(), key=lambda kv: -kv[1]))
    head = Text(visible(run.name), style="bold")
    return head.append(f"  {len(run.steps())} steps, {total:,} sampled tokens ({fates})", style="not bold dim")


def _panel(item: StoredRollout) -> Panel:
    prompt = item.admission.prompt
    reward = "no reward" if item.reward is None else f"reward {item.reward:g}"
    where = f"step {item.step}" if item.step is not None else "no step"
    title = f"group {item.admission.index} · sample {item.rollout.sample} · {where} · {reward}"
    attempt = f" · attempt {item.admission.attempt}" if item.admission.attempt else ""
    parts = [
        Text(visible(prompt_text(prompt)), style="dim"),
        Text(visible(item.rollout.text)),
        _verdict_table(item),
        _segment_table(item),
        _fate_line(item),
    ]
    return Panel(Group(*parts), title=Text(title + attempt), title_align="left", subtitle=Text(visible(prompt.task)))


def _verdict_table(item: StoredRollout) -> Table:
    table = Table("source", "outcome", "value", "parts and reason", box=None, header_style="dim", pad_edge=False)
    for source, verdict in item.verdicts.items():
        style = {Outcome.SCORED: "green", Outcome.FAILED: "red"}.get(verdict.outcome, "yellow")
        value = "" if verdict.value is None else f"{verdict.value:g}"
        table.add_row(Text(visible(source)), Text(verdict.outcome.value, style), Text(value), Text(_remarks(verdict)))
    return table


def _remarks(verdict: Verdict) -> str:
    parts = [f"{name} {value:g}" for name, value in verdict.parts.items()]
    return visible(", ".join(parts + ([verdict.reason] if verdict.reason else [])))


def _segment_table(item: StoredRollout) -> Table:
    table = Table.grid(padding=(0, 2))
    for place, segment in enumerate(item.rollout.segments):
        size = f"{len(segment.context_ids)} read, {len(segment.token_ids)} tokens, {segment.finish.value}"
        lines = {
            f"segment {place}": size,
            "versions": runs(segment.versions[segment.mask].tolist()),
            "mask": runs(segment.mask.astype(int).tolist()),
            "log-prob": _mean_logprob(segment),
        }
        if place in item.rows:
            row = item.rows[place]
            lines |= {
                "trained": runs(row.trained.astype(int).tolist()),
                "advantage": _spread(row.advantages[row.trained]),
            }
        for name, value in lines.items():
            table.add_row(Text(name, style="dim"), Text(value))
    return table


def _mean_logprob(segment: Segment) -> str:
    return f"{segment.behavior_logprobs[segment.mask].mean():.3f} on average" if segment.mask.any() else ""


def _spread(values: np.ndarray) -> str:
    if not len(values):
        return ""
    low, high = float(values.min()), float(values.max())
    return f"{low:+.3f}" if low == high else f"{low:+.3f} to {high:+.3f}"


def _fate_line(item: StoredRollout) -> Text:
    fates = ", ".join(f"{fate.value} {tokens}" for fate, tokens in item.fates.items()) or "no tokens"
    reason = f" ({item.reason})" if item.reason else ""
    return Text(visible(f"fate: {fates}{reason}"), style="dim")


def runs(values: Sequence[int]) -> str:
    """Equal neighbours counted: 3 3 3 4 is ``3×3 4×1``."""
    return " ".join(_runs(values)) if len(values) else ""


def _runs(values: Sequence[int]) -> Iterator[str]:
    return (f"{value}×{len(list(same))}" for value, same in groupby(values))
