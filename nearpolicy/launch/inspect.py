"""`nearpolicy inspect RUN`: what was sampled, how it was judged, what was made of it.

For people with colours and tables, for programs as JSON lines under the names of exported rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
from nearpolicy.launch.words import count, expected_answer
from nearpolicy.records import Finish, Outcome, Row, Segment, Verdict
from nearpolicy.store.reader import RunReader, StoredRollout
from nearpolicy.store.schema import EvaluatedSample, prompt_text
from nearpolicy.telemetry.ledger import sampled_tokens
from nearpolicy.visible import visible


def command(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    step: Annotated[int | None, typer.Option(help="Only rollouts that this step consumed; steps count from 0.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group, by its index of admission.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="Only this sample index, in each group; -1 is its greedy baseline.")
    ] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="Held-out questions in place of rollouts.")] = False,
    limit: Annotated[int, typer.Option(help="Rollouts (or questions) shown, at most.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
) -> None:
    """Show rollouts of a run: text, rewards, versions, advantages, fates."""
    if not held_out:
        inspect_run(run, step=step, group=group, sample=sample, limit=limit, as_json=as_json)
    elif (step, group, sample) == (None, None, None):
        inspect_held_out(run, limit=limit, as_json=as_json)
    else:
        raise UserError("--step, --group and --sample choose rollouts; leave them out with --held-out")


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
        tasks = {task["name"]: task for task in (run.config or {}).get("tasks", ())}
        for item in found:
            console.print(_panel(item, tasks.get(item.admission.prompt.task, {})))


def inspect_held_out(run_dir: Path, limit: int = 8, as_json: bool = False) -> None:
    """Print the first held-out questions with the answers of every version that was evaluated."""
    with RunReader(run_dir) as run:
        answers = [sample for sample in run.evaluations() if sample.mode == "accuracy"]
    questions = list(dict.fromkeys((sample.task, sample.row) for sample in answers))[:limit]
    if not questions:
        raise UserError(f"{run_dir} holds no evaluation: no question was held out, or none was answered yet")
    for task, row in questions:
        found = [sample for sample in answers if (sample.task, sample.row) == (task, row)]
        if as_json:
            for sample in found:
                print(json.dumps(dataclasses.asdict(sample), allow_nan=False))
        else:
            Console().print(_question_panel(found))


def _question_panel(answers: Sequence[EvaluatedSample]) -> Panel:
    table = Table("version", "judged", "answer", box=None, header_style="dim", pad_edge=False)
    for sample in answers:
        judged = {True: Text("right", "green"), False: Text("wrong", "red"), None: Text("not judged", "yellow")}
        table.add_row(Text(str(sample.version)), judged[sample.correct], Text(visible(sample.text)))
    first = answers[0]
    parts = Group(Text(visible(first.prompt), style="dim"), table)
    return Panel(parts, title=Text(visible(f"held-out question {first.row} · {first.task}")), title_align="left")


def rollout_as_json(item: StoredRollout) -> dict[str, Any]:
    """A rollout as one JSON object; arrays hold one list per segment."""
    segments = item.rollout.segments
    rows = [item.rows.get(place) for place in range(len(segments))]
    prompt = item.admission.prompt
    return {
        "group_id": item.admission.index,
        "sample": item.rollout.sample,
        "baseline": item.is_baseline,
        "attempt": item.admission.attempt,
        "task": prompt.task,
        "prompt_id": prompt.id,
        "prompt": prompt.text if prompt.text is not None else [dict(message) for message in prompt.messages or ()],
        "completion": item.rollout.text,
        "finish_reason": None if item.is_dropped else item.rollout.finish.value,
        "tokens_dropped": item.is_dropped,
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
    total = sampled_tokens(ledger)
    fates = ", ".join(f"{fate.value} {tokens:,}" for fate, tokens in sorted(ledger.items(), key=lambda kv: -kv[1]))
    head = Text(f"{visible(run.name)}\n", style="bold")
    head.append(f"{count(len(run.steps()), 'step')}, {count(total, 'sampled token')}\n", style="not bold")
    return head.append(f"fates: {fates or 'none yet'}", style="not bold dim")


def _panel(item: StoredRollout, task: Mapping[str, Any]) -> Panel:
    prompt = item.admission.prompt
    reward = "no reward" if item.reward is None else f"reward {item.reward:g}"
    where = f"step {item.step}" if item.step is not None else "no step"
    which = "greedy baseline" if item.is_baseline else f"sample {item.rollout.sample}"
    title = f"group {item.admission.index} · {which} · {where} · {reward}"
    attempt = f" · attempt {item.admission.attempt}" if item.admission.attempt else ""
    answer = expected_answer(task, prompt.columns)
    expected = [] if answer is None else [Text.assemble(("expected answer: ", "dim"), visible(answer))]
    parts = [
        Text(visible(prompt_text(prompt)), style="dim"),
        Text(visible(item.rollout.text)),
        *expected,
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
    if item.is_dropped:
        table.add_row(Text("tokens", style="dim"), Text("dropped (store.retention: drop)"))
    several = len(item.rollout.segments) > 1
    for place, segment in enumerate(item.rollout.segments):
        read, sampled = count(len(segment.context_ids), "prompt token"), f"{segment.num_sampled:,} sampled"
        lines = {
            f"segment {place}" if several else "tokens": f"{read}, {sampled}, ended by {_END[segment.finish]}",
            "versions": runs(segment.versions[segment.mask].tolist()) + " (weights that sampled them)",
            "log-prob": _mean_logprob(segment),
        }
        if not segment.mask.all():  # what an environment wrote stands between
            lines["sampled"] = runs(segment.mask.astype(int).tolist()) + " (1: by the policy, 0: by the environment)"
        if place in item.rows:
            row = item.rows[place]
            lines |= {"in the loss": _in_the_loss(row), "advantage": _spread(row.advantages[row.trained])}
        for name, value in lines.items():
            table.add_row(Text(name, style="dim"), Text(value))
    return table


_END = {
    Finish.STOP: "a stop",
    Finish.LENGTH: "the length limit",
    Finish.ABORTED: "an abort",
    Finish.FAILED: "a failure",
}


def _in_the_loss(row: Row) -> str:
    """Which sampled tokens the loss counts."""
    trained, sampled = int(row.trained.sum()), row.segment.num_sampled
    if trained in (0, sampled):
        which = "all sampled tokens" if trained else "none"
    else:
        which = f"{trained} of {count(sampled, 'sampled token')}: {runs(row.trained.astype(int).tolist())}"
    return which if not trained or row.advantages.any() else f"{which}, but their advantage is 0"


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
