"""``report.html``: one file that shows a run, and needs nothing else, no network included.

What is drawn is decided here, from a `RunReader`; how it looks is decided in `report_page`. A chart appears when the
run has its metric. Values that were not finite are marked where they occurred and raise an alarm at the top.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from nearpolicy.records import Event, Fate
from nearpolicy.store.schema import prompt_text
from nearpolicy.telemetry.ledger import sampled_tokens
from nearpolicy.telemetry.report_page import Chart, escape, page, shown

if TYPE_CHECKING:
    from nearpolicy.store.reader import RunReader, StoredRollout
    from nearpolicy.store.schema import EvaluatedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPoint:
    """One held-out number of one version; the interval is None where none is to be had (pass@k)."""

    task: str
    measure: str
    """accuracy, pass@8, ..."""
    version: int
    value: float
    interval: tuple[float, float] | None
    count: str
    """What it was measured on, for people."""


@dataclass(frozen=True, slots=True)
class _Curves:
    """A chart of metrics over steps: which names, what they are called in the legend."""

    title: str
    metrics: Mapping[str, str]
    """Regular expression over metric names -> legend; ``\\1`` is its first group."""
    note: str = ""
    note_if_zero: str = ""
    """Takes the note's place when every value is exactly 0 and that is worth a word."""
    bounded: bool = False
    """Draw `queue.max_staleness` as a line."""
    share: bool = False
    """The values lie between 0 and 1."""
    once: bool = False
    """A curve equal to one above it is named in the note and not drawn again."""


_CHARTS = (
    _Curves(
        "Reward",
        {
            r"reward/mean": "reward",
            r"reward/baseline_mean": "greedy baseline",
            r"reward/([^/]+)/mean": r"\1",
            r"task/([^/]+)/reward": r"task \1",
        },
        once=True,
    ),
    _Curves("Completion length", {r"completion/length_mean": "mean", r"completion/length_max": "longest"}, "tokens"),
    _Curves("Entropy", {r"policy/entropy": "entropy"}, "nats per token"),
    _Curves(
        "Log-probability gap",
        {
            r"mismatch/logprob_diff_mean": "mean",
            r"mismatch/logprob_diff_p99": "99 %",
            r"mismatch/logprob_diff_max": "max",
        },
        "between the policy that sampled and the learner's at the start of the step, absolute, in nats",
        note_if_zero="0 on every token of every step: nothing was stale, and engine and learner agree bit for bit",
    ),
    _Curves("KL from the reference", {r"policy/kl_reference": "KL"}, "nats per token"),
    _Curves("KL behind the log-probability gap", {r"mismatch/kl": "KL"}, "nats per token, k3 estimate"),
    _Curves(
        "Staleness", {r"staleness/mean": "mean", r"staleness/max": "largest"}, "steps, when consumed", bounded=True
    ),
    _Curves("Gradient norm", {r"policy/grad_norm": "norm"}, "before clipping"),
    _Curves("Learning rate", {r"learner/learning_rate": "learning rate"}),
    _Curves("Loss", {r"policy/loss": "loss"}),
    _Curves(
        "Values of the critic", {r"critic/value_mean": "value", r"critic/target_mean": "target"}, "means over tokens"
    ),
    _Curves(
        "Explained variance", {r"critic/explained_variance": "critic"}, "of the targets, by values at the step's start"
    ),
    _Curves(
        "Shares",
        {
            r"reward/zero_variance_share": "groups without signal",
            r"completion/truncated_share": "truncated",
            r"policy/clip_low_share": "clipped low",
            r"policy/clip_high_share": "clipped high",
        },
        share=True,
    ),
    _Curves("Throughput", {r"throughput/tokens_per_s": "tokens"}, "consumed tokens per second"),
)

_KINDS = {
    # kind -> (name in the legend, place in the palette; None is the colour of waiting)
    "prefill": ("prefill", 1),
    "decode": ("decode", 0),
    "swap": ("swap weights", 4),
    "verify": ("verify", 2),
    "annotate": ("annotate", 5),
    "forward_backward": ("forward and backward", 3),
    "optim": ("optimizer", 6),
    "checkpoint": ("checkpoint", 7),
    "export": ("export", 8),
    "load": ("load", 9),
    "compare": ("compare fingerprints", 10),
    "evaluate": ("evaluate", 11),
    "idle": ("idle", None),
}
_LANES = ("generator", "verifier", "queue", "learner", "sync", "evaluate")
_MAX_BARS = 2000
"""Bars across the time line; shorter gaps between like spans are closed."""


def render_report(run: RunReader, held_out: Sequence[HeldOutPoint]) -> str:
    """The whole page. Works on a run that is still being written: it shows what is there."""
    metrics = run.metrics()
    charts = [_held_out_chart(held_out)] if held_out else []
    charts += [chart for curves in _CHARTS if (chart := _curves_chart(curves, metrics, run.config)) is not None]
    events = list(run.events())
    spans = _spans(events)
    window = _training(events, spans) if spans else (0.0, 0.0)
    timeline = _timeline(spans, window) if spans else None
    return page(
        title=run.name,
        subtitle=_subtitle(run),
        alarms=_alarms(metrics),
        cards=_cards(run, metrics, held_out),
        charts=charts,
        timeline=timeline,
        sections=[
            ("What monitors saw", _monitors_table(events)),
            ("Where the tokens went", _ledger_table(run.ledger())),
            ("What the roles waited for", _idle_table(spans, window)),
            _answers(run),
            ("Run", _facts(run)),
        ],
    )


# Metrics over steps.


def _curves_chart(curves: _Curves, metrics: Sequence[Mapping[str, Any]], config: Any) -> Chart | None:
    names = _matching(curves.metrics, metrics)
    if not names:
        return None
    traces, marks, values, again = [], {}, [], []
    for place, (name, legend) in enumerate(names.items()):
        known = [line for line in metrics if name in line]
        steps, of_name = [line["step"] for line in known], [line[name] for line in known]
        values += [value for value in of_name if value is not None]
        mode = "lines+markers" if len(steps) <= 40 else "lines"
        if curves.once and any((trace["x"], trace["y"]) == (steps, of_name) for trace in traces):
            again.append(legend)
            continue
        traces.append({"x": steps, "y": of_name, "name": legend, "mode": mode, "palette": place})
        marks |= {line["step"]: f"{legend} {line['not_finite'][name]}" for line in known if line[name] is None}
    note = curves.note_if_zero if curves.note_if_zero and values and not any(values) else curves.note
    if again:
        note = f"{' and '.join(again)}: the same curve"
    bound = _bound(config) if curves.bounded else None
    if bound is not None:
        steps = traces[0]["x"]
        traces.append({"x": steps, "y": [bound] * len(steps), "name": "bound", "mode": "lines", "dash": "dot"})
    return Chart(title=curves.title, note=note, traces=traces, marks=marks, share=curves.share)


def _matching(patterns: Mapping[str, str], metrics: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Metric name -> legend, in the order of the patterns."""
    present = sorted({name for line in metrics for name in line})
    found: dict[str, str] = {}
    for pattern, legend in patterns.items():
        found |= {
            name: m.expand(legend) for name in present if name not in found and (m := re.fullmatch(pattern, name))
        }
    return found


def _bound(config: Any) -> int | None:
    queue = config.get("queue") if isinstance(config, Mapping) else None
    return queue.get("max_staleness") if isinstance(queue, Mapping) else None


def _held_out_chart(points: Sequence[HeldOutPoint]) -> Chart:
    by_curve: dict[tuple[str, str], list[HeldOutPoint]] = defaultdict(list)
    for point in points:
        by_curve[point.task, point.measure].append(point)
    several = len({task for task, _ in by_curve}) > 1
    traces = []
    for place, ((task, measure), curve) in enumerate(by_curve.items()):
        trace: dict[str, Any] = {
            "x": [point.version for point in curve],
            "y": [point.value for point in curve],
            "text": [point.count for point in curve],
            "name": f"{task} {measure}" if several else measure,
            "mode": "lines+markers",
            "palette": place,
        }
        if all(point.interval for point in curve):
            above = [point.interval[1] - point.value for point in curve if point.interval]
            below = [point.value - point.interval[0] for point in curve if point.interval]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        else:
            trace["dash"] = "dash"
        traces.append(trace)
    note = "bars: 95 % Wilson interval"
    return Chart(title="Held-out accuracy", note=note, traces=traces, share=True, x_title="version")


def _alarms(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    steps: dict[str, list[str]] = defaultdict(list)
    for line in metrics:
        for name, word in line.get("not_finite", {}).items():
            steps[name].append(f"{line['step']} ({word})")
    return [
        f"{name} was not finite at step{'s' if len(at) > 1 else ''} {', '.join(at[:12])}"
        + (f" and {len(at) - 12} more" if len(at) > 12 else "")
        for name, at in sorted(steps.items())
    ]


# The time line.


@dataclass(frozen=True, slots=True)
class _Span:
    lane: str
    kind: str
    start: float
    end: float
    cause: str


def _spans(events: Iterable[Event]) -> list[_Span]:
    """Everything that took time, by lane and start; instances get lanes of their own where a role has several."""
    timed = [event for event in events if event.seconds is not None and event.kind in _KINDS]
    instances: dict[str, set[int]] = defaultdict(set)
    for event in timed:
        instances[event.role].add(event.instance)
    spans = [
        _Span(
            f"{event.role} {event.instance}" if len(instances[event.role]) > 1 else event.role,
            event.kind,
            event.time,
            event.time + (event.seconds or 0.0),
            str(event.numbers.get("cause", "")),
        )
        for event in timed
    ]
    return sorted(spans, key=lambda span: (span.lane, span.start))


def _training(events: Iterable[Event], spans: Sequence[_Span]) -> tuple[float, float]:
    """Begin and end of training: the first admission, and the last work of learner or publication. Evaluations before
    and after it are not in it."""
    admitted = [event.time for event in events if event.kind == "admit"]
    worked = [s.end for s in spans if s.lane.split()[0] in ("learner", "sync") and s.kind != "checkpoint"]
    begin, end = min(admitted, default=0.0), max(worked, default=0.0)
    return (begin, end) if end > begin else (0.0, max(span.end for span in spans))


def _timeline(spans: Sequence[_Span], window: tuple[float, float]) -> Chart:
    total = max(span.end for span in spans)
    lanes = sorted({span.lane for span in spans}, key=_lane_order, reverse=True)  # plotly draws upwards
    shares = {lane: "" if lane == "evaluate" else _percent(_busy_share(spans, lane, window)) for lane in lanes}
    labels = {lane: f"{lane}  {shares[lane]}".strip() for lane in lanes}
    scale, unit = (60.0, "minutes") if total > 600 else (1.0, "seconds")
    by_kind: dict[str, list[_Span]] = defaultdict(list)
    for span in _joined(spans, gap=total / _MAX_BARS):
        by_kind[span.kind].append(span)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [labels[span.lane] for span in by_kind[kind]],
            "base": [round(span.start / scale, 4) for span in by_kind[kind]],
            "x": [round((span.end - span.start) / scale, 4) for span in by_kind[kind]],
            "text": [span.cause or name for span in by_kind[kind]],
            "palette": colour,
        }
        for kind, (name, colour) in _KINDS.items()
        if kind in by_kind
    ]
    note = f"{unit} since the start; beside a role: the share of training time in which it worked; drag to zoom"
    return Chart(title="Time line", note=note, traces=traces, x_title=unit, lanes=[labels[lane] for lane in lanes])


def _lane_order(lane: str) -> tuple[int, str]:
    role = lane.split()[0]
    return (_LANES.index(role) if role in _LANES else len(_LANES), lane)


def _busy_share(spans: Sequence[_Span], lane: str, window: tuple[float, float]) -> float:
    """Share of the window covered by at least one span that is not waiting. Spans of a lane come ordered by start."""
    begin, end = window
    busy, covered = 0.0, begin
    for span in spans:
        if span.lane == lane and span.kind != "idle":
            busy += max(0.0, min(span.end, end) - max(span.start, covered))
            covered = max(covered, span.end)
    return busy / (end - begin) if end > begin else 0.0


def _percent(share: float) -> str:
    """Whole per cent; what happened at all is never 0%."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _joined(spans: Sequence[_Span], gap: float) -> list[_Span]:
    """Like spans of a lane with less than ``gap`` between them become one, so that hours of a run stay drawable."""
    last: dict[tuple[str, str, str], _Span] = {}
    joined: list[_Span] = []
    for span in spans:
        key = (span.lane, span.kind, span.cause)
        before = last.get(key)
        if before is not None and span.start - before.end <= gap:
            last[key] = _Span(span.lane, span.kind, before.start, max(before.end, span.end), span.cause)
            continue
        if before is not None:
            joined.append(before)
        last[key] = span
    return joined + list(last.values())


# Head, tables, samples.


def _subtitle(run: RunReader) -> str:
    config = run.config if isinstance(run.config, Mapping) else {}
    model = (config.get("model") or {}).get("path", "")
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.wall_anchor))
    return " · ".join(part for part in (str(model), f"started {started}", _numerics(run)) if part)


def _numerics(run: RunReader) -> str:
    first = next(iter(run.rollouts(limit=1)), None)
    return f"{first.rollout.numerics} numerics" if first is not None else ""


def _cards(
    run: RunReader, metrics: Sequence[Mapping[str, Any]], held_out: Sequence[HeldOutPoint]
) -> list[tuple[str, str, str]]:
    """(name, value, remark) for the head of the page."""
    summary = run.summary() or {}
    cards = [(f"held-out {measure}", *change) for measure, change in _changes(held_out).items()]
    cards.append(("steps", str(len(run.steps())), f"{len(run.versions())} versions"))
    if summary:
        cards.append(("wall time", _duration(summary["wall_s"]), "training"))
        cards.append(("peak memory", f"{summary['peak_memory_mb'] / 1024:.1f} GB", "main process"))
    ledger = run.ledger()
    sampled = sampled_tokens(ledger)
    trained = ledger.get(Fate.TRAINED, 0)
    if sampled:
        cards.append(("sampled tokens", f"{sampled:,}", f"{trained / sampled:.0%} trained"))
    largest = _finite(metrics, "staleness/max")
    if largest:
        bound = _bound(run.config)
        cards.append(("staleness", f"{max(largest):g}", "largest" + (f", bound {bound}" if bound is not None else "")))
    differences = _finite(metrics, "mismatch/logprob_diff_max")
    if differences:
        remark = "bit for bit" if max(differences) == 0 else "largest, in nats"
        cards.append(("log-prob gap", f"{max(differences):.2g}", remark))
    return cards


def _changes(points: Sequence[HeldOutPoint]) -> dict[str, tuple[str, str]]:
    """For each measure: what it is in the last version, and what it was in the first."""
    curves: dict[str, list[HeldOutPoint]] = defaultdict(list)
    several = len({point.task for point in points}) > 1
    for point in points:
        curves[f"{point.task} {point.measure}" if several else point.measure].append(point)
    return {
        name: (
            f"{curve[-1].value:.1%}",
            f"from {curve[0].value:.1%}" if len(curve) > 1 else f"version {curve[0].version}",
        )
        for name, curve in curves.items()
    }


def _finite(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in metrics if line.get(name) is not None]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _monitors_table(events: Sequence[Event]) -> str:
    """Alarms, what was found behind them, and what was done about them; empty if there was nothing."""
    kinds = {"alarm": "text", "diagnosis": "text", "rollback": "reason", "pause": "reason"}
    rows = [
        f"<tr><td class=num>{_duration(event.time)}</td><td>{event.kind}</td>"
        f"<td>{escape(event.numbers.get(kinds[event.kind], ''))}</td>"
        f"<td>{escape(event.numbers.get('action', ''))}</td></tr>"
        for event in events
        if event.kind in kinds
    ]
    head = "<tr><th class=num>after<th>what<th><th>action</tr>"
    return f"<table>{head}{''.join(rows)}</table>" if rows else ""


def _ledger_table(ledger: Mapping[Fate, int]) -> str:
    total = sampled_tokens(ledger)
    if not total:
        return ""
    rows = [
        f"<tr><td>{fate.value.replace('_', ' ')}</td><td class=num>{ledger[fate]:,}</td>"
        f"<td class=num>{ledger[fate] / total:.1%}</td>"
        f"<td class=bar><i style='width:{100 * ledger[fate] / total:.2f}%'></i></td></tr>"
        for fate in sorted(ledger, key=lambda fate: -ledger[fate])
        if fate is not Fate.REPLAYED
    ]
    head = "<tr><th>fate<th class=num>tokens<th class=num>share<th></tr>"
    apart = ""
    if again := ledger.get(Fate.REPLAYED):
        apart = f"<tr><td>replayed</td><td class=num>{again:,}</td><td>once more<td></tr>"
    return (
        f"<table>{head}{''.join(rows)}<tr class=sum><td>sampled</td><td class=num>{total:,}</td><td><td></tr>{apart}"
        "</table>"
    )


def _idle_table(spans: Sequence[_Span], window: tuple[float, float]) -> str:
    """During training; outside it nobody waits for anybody."""
    begin, end = window
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        waited = min(span.end, end) - max(span.start, begin)
        if span.kind == "idle" and waited > 0:
            seconds[span.lane, span.cause or "not said"] += waited
    if not seconds:
        return ""
    total = end - begin
    rows = [
        f"<tr><td>{escape(lane)}</td><td>{escape(cause.replace('_', ' '))}</td><td class=num>{took:.1f} s</td>"
        f"<td class=num>{took / total:.1%}</td><td class=bar><i style='width:{100 * took / total:.2f}%'></i></td></tr>"
        for (lane, cause), took in sorted(seconds.items(), key=lambda item: (_lane_order(item[0][0]), -item[1]))
    ]
    head = "<tr><th>role<th>waited for<th class=num>time<th class=num>share of training<th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _answers(run: RunReader, count: int = 8) -> tuple[str, str]:
    """Heading and body: held-out questions under the first and the last version that were evaluated; without two
    evaluations, rollouts of the first and the last step."""
    samples = [sample for sample in run.evaluations() if sample.sample == 0 and sample.mode == "accuracy"]
    versions = sorted({(sample.lineage, sample.version) for sample in samples})
    if len(versions) < 2:
        heading = "Rollouts of the first and the last step" if len(run.steps()) > 1 else "Rollouts of the first step"
        return heading, _first_last_rollouts(run)
    first = {(s.task, s.row): s for s in samples if (s.lineage, s.version) == versions[0]}
    last = {(s.task, s.row): s for s in samples if (s.lineage, s.version) == versions[-1]}
    both = [key for key in first if key in last]
    # Evenly through the set, so that nobody can suspect a choice.
    chosen = both[:: max(1, len(both) // count)][:count]
    head = f"<tr><th>question<th>version {versions[0][1]}<th>version {versions[-1][1]}</tr>"
    rows = [
        f"<tr><td><pre>{shown(first[k].prompt)}</pre></td>{_answer(first[k])}{_answer(last[k])}</tr>" for k in chosen
    ]
    note = f"<p class=note>{len(chosen)} of {len(both)} held-out questions, evenly through the set</p>"
    return "The same questions before and after", f"{note}<table class=samples>{head}{''.join(rows)}</table>"


def _answer(sample: EvaluatedSample) -> str:
    word, style = {True: ("right", "good"), False: ("wrong", "bad"), None: ("not judged", "mute")}[sample.correct]
    return f"<td><span class='tag {style}'>{word}</span><pre>{shown(sample.text)}</pre></td>"


def _first_last_rollouts(run: RunReader, count: int = 4) -> str:
    steps = [record.step for record in run.steps()]
    if not steps:
        return ""
    shown_steps = [steps[0], steps[-1]] if len(steps) > 1 else steps
    columns = [list(islice(run.rollouts(step=step), count)) for step in shown_steps]
    head = f"<tr>{''.join(f'<th>step {step}' for step in shown_steps)}</tr>"
    rows = [
        f"<tr>{''.join(f'<td>{_rollout(item)}</td>' for item in items)}</tr>" for items in zip(*columns, strict=False)
    ]
    return f"<table class=samples>{head}{''.join(rows)}</table>"


def _rollout(item: StoredRollout) -> str:
    question = prompt_text(item.admission.prompt)
    reward = "no reward" if item.reward is None else f"reward {item.reward:g}"
    reward += ", greedy baseline" if item.is_baseline else ""
    return f"<span class='tag mute'>{reward}</span><pre>{shown(question)}</pre><pre>{shown(item.rollout.text)}</pre>"


def _facts(run: RunReader) -> str:
    versions = run.versions()
    lines = []
    if versions:
        newest = versions[-1]
        lines.append(f"newest weights: version {newest.version}, fingerprint <code>{escape(newest.fingerprint)}</code>")
    if run.packages:
        lines.append(escape(", ".join(f"{name} {number}" for name, number in run.packages.items())))
    config = escape(json.dumps(run.config, indent=2, ensure_ascii=True, default=str))
    text = "".join(f"<p>{line}</p>" for line in lines)
    return f"{text}<details><summary>resolved recipe</summary><pre>{config}</pre></details>"
