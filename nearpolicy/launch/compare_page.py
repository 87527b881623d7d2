"""How a comparison of objectives is shown: tables in the terminal, a page with charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpolicy.launch.words import count
from nearpolicy.telemetry.report_page import Chart, escape, page
from nearpolicy.visible import visible

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the tables; a value that is not there is a dash."""

    heading: str
    value: Callable[[Row], float | None]
    form: str
    meaning: str

    def cell(self, row: Row) -> str:
        value = self.value(row)
        return "-" if value is None else self.form.format(value)


def _of(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if row["importance_sampling"] is None else row["importance_sampling"][name]


COLUMNS = (
    Column("loss", lambda row: row["loss"], "{:.4g}", "of the update, with its regularisers"),
    Column("grad norm", lambda row: row["gradient_norm"], "{:.4g}", "length of the update's gradient, before clipping"),
    Column(
        "ESS",
        lambda row: row["ess"],
        "{:.3f}",
        "effective sample size of the tokens' ratios of these weights to the policy that sampled, as a share",
    ),
    Column(
        "weight",
        lambda row: row["weight_mean"],
        "{:.3f}",
        "mean weight of the correction; 1 where loss or advantage carries the ratio itself",
    ),
    Column(
        "clipped",
        lambda row: row["clipped_share"],
        "{:.1%}",
        "tokens that the loss clips or leaves outside its trust region. Losses that compare with the start of the "
        "step clip nothing here, where the policy is still at its start",
    ),
    Column(
        "rejected",
        lambda row: row["rejected_share"],
        "{:.1%}",
        "tokens that the correction takes out of sum and divisor",
    ),
)
"""What an objective says of the batch."""

AGAINST_IS = (
    Column("cosine", lambda row: row["cosine_to_importance_sampling"], "{:.3f}", "between the two gradients"),
    Column("bias", _of("bias"), "{:.3f}", "length of their difference on the batch's own groups"),
    Column("95 % from", _of("bias_low"), "{:.3f}", "lower end of the middle 95 % of the bias over resampled groups"),
    Column("to", _of("bias_high"), "{:.3f}", "upper end of it"),
    Column("variance", _of("variance"), "{:.3g}", "over updates of the batch's size, drawn from its groups"),
    Column("of IS", _of("reference_variance"), "{:.3g}", "the variance of importance sampling itself"),
)
"""How its gradient differs from that of full importance sampling (IS)."""

IS = (
    "Full importance sampling: the same advantages and divisor, whole-sequence weights without a cap, no KL and no "
    "entropy in the loss. Unbiased for the gradient of these advantages; bias and variance are relative to the length "
    "of its gradient, and to the square of that."
)


def print_table(result: Mapping[str, Any]) -> None:
    """What a person reads in a terminal, or in a file that the terminal is sent to."""
    _print(headline(result))
    rows = result["objectives"]
    names = _numbered(rows)
    for title, columns in (("objective", COLUMNS), ("to importance sampling", AGAINST_IS)):
        cells = [[column.cell(row) for column in columns] for row in rows.values()]
        _print("", *_table([title, *(column.heading for column in columns)], names, cells))
    cosines = [["-" if c is None else f"{c:.3f}" for c in others.values()] for others in result["cosines"].values()]
    _print("", *_table(["cosine between gradients", *map(str, range(1, len(rows) + 1))], names, cosines))
    for name, row in rows.items():
        if parts := row["gradient_norm_by_part"]:
            norms = ", ".join(f"{part} {_shown(norm, '{:.3g}')}" for part, norm in parts.items())
            _print(f"{name}: gradient norm of {norms}")
    _print("columns: docs/objectives.md, Comparing")


def print_training(result: Mapping[str, Any]) -> None:
    """What became of each objective in training."""
    trained = result["trained"]
    _print(_training_headline(trained))
    _print(*_table(["objective", *_TRAINED], _numbered(trained), [_trained_cells(found) for found in trained.values()]))


def _print(*lines: str) -> None:
    for line in lines:
        print(visible(line))


NAME_WIDTH = 25
"""Longer names are cut: a table of six columns fits 80 characters."""


def _numbered(names: Mapping[str, Any]) -> list[str]:
    """``1 recorded``, ``2 loss=pg``: what a table calls the objectives, so that cut names are still told apart."""
    numbered = [f"{number} {name}" for number, name in enumerate(names, start=1)]
    return [name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…" for name in numbered]


def _table(headings: Sequence[str], names: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned text; a terminal that is too narrow wraps them, and nothing is left out."""
    lines = [list(headings), *([name, *row] for name, row in zip(names, cells, strict=True))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def headline(result: Mapping[str, Any]) -> str:
    """What was compared on what."""
    staleness = result["staleness"]
    return (
        f"{result['run']}, step {result['step']} under version {result['weights']}: {result['groups']} groups, "
        f"{result['tokens']} trained tokens, staleness {staleness['mean']:g} (at most {staleness['max']}), "
        f"{result['gradients']} gradients"
    )


_TRAINED = ("held out before", "after", "right", "entropy", "loss", "grad norm")


def _training_headline(trained: Mapping[str, Any]) -> str:
    steps = next(iter(trained.values()))["steps"]
    return (
        f"Trained on {count(len(steps), 'recorded step')} from step {steps[0]['step']} on; entropy, loss and gradient "
        "norm are those of the last one"
    )


def _trained_cells(found: Mapping[str, Any]) -> list[str]:
    before, after = (found["held_out"][when] for when in ("before", "after"))
    last = found["steps"][-1]
    return [
        _shown(before.get("accuracy"), "{:.1%}"),
        _shown(after.get("accuracy"), "{:.1%}"),
        f"{after['correct']:g} of {after['count']}" if after else "-",
        _shown(last.get("policy/entropy"), "{:.3f}"),
        _shown(last.get("policy/loss"), "{:.4g}"),
        _shown(last.get("policy/grad_norm"), "{:.3g}"),
    ]


def comparison_page(result: Mapping[str, Any]) -> str:
    """One HTML page with everything inside."""
    rows = result["objectives"]
    charts, sections = [_trade_off(rows)], []
    if trained := result.get("trained"):
        charts += _training(trained)
        cells = [[name, *_trained_cells(found)] for name, found in trained.items()]
        sections = [(_training_headline(trained), _html_table(["objective", *_TRAINED], cells))]
    for title, columns in (("Objectives", COLUMNS), ("Against full importance sampling (IS)", AGAINST_IS)):
        cells = [[name, *(column.cell(row) for column in columns)] for name, row in rows.items()]
        legend = "".join(f"<li><b>{escape(c.heading)}</b>: {escape(c.meaning)}</li>" for c in columns)
        note = f"<p class=note>{escape(IS)}</p>" if columns is AGAINST_IS else ""
        table = _html_table(["objective", *(column.heading for column in columns)], cells)
        sections.append((title, f"{note}{table}<ul class=note>{legend}</ul>"))
    return page(
        title=f"Objectives on {result['run']}",
        subtitle=headline(result),
        alarms=[],
        cards=[],
        charts=[chart for chart in charts if chart is not None],
        timeline=None,
        sections=[
            *sections,
            ("Cosine between gradients", _matrix(result["cosines"])),
            ("What the objectives are", _settings(result["settings"])),
        ],
    )


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _settings(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings in which the objectives differ."""
    keys = [key for key in next(iter(settings.values())) if len({str(of[key]) for of in settings.values()}) > 1]
    told = [
        [name, ", ".join(f"{key}={of[key]}" for key in keys if of[key] is not None)] for name, of in settings.items()
    ]
    return _html_table(["objective", "settings that are not the same in all"], told)


def _trade_off(rows: Mapping[str, Any]) -> Chart | None:
    bias, variance = _of("bias"), _of("variance")
    traces = [
        {
            "x": [bias(row)],
            "y": [variance(row)],
            "name": name,
            "mode": "markers",
            "marker": {"size": 10},
            "palette": place,
        }
        for place, (name, row) in enumerate(rows.items())
        if row["importance_sampling"] is not None
    ]
    note = "relative variance over relative bias, against full importance sampling"
    return Chart(title="Bias and variance", note=note, traces=traces, x_title="bias") if traces else None


def _matrix(cosines: Mapping[str, Mapping[str, float | None]]) -> str:
    """Every gradient against every other, the darker the more alike."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *cosines))
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(map(_shaded, others.values())) + "</tr>"
        for name, others in cosines.items()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shaded(cosine: float | None) -> str:
    if cosine is None:
        return "<td>-</td>"
    return f'<td style="background: rgba(70, 110, 230, {max(0.0, cosine) * 0.35:.3f})">{cosine:.3f}</td>'


def _training(trained: Mapping[str, Any]) -> list[Chart]:
    charts = []
    for title, metric in (
        ("Entropy", "policy/entropy"),
        ("Gradient norm", "policy/grad_norm"),
        ("Loss", "policy/loss"),
    ):
        traces = [
            {
                "x": [line["step"] for line in found["steps"]],
                "y": [line.get(metric) for line in found["steps"]],
                "name": name,
                "mode": "lines+markers",
                "palette": place,
            }
            for place, (name, found) in enumerate(trained.items())
        ]
        charts.append(Chart(title=title, note="while training on the recorded steps", traces=traces))
    accuracies = [
        {
            "x": ["before", "after"],
            "y": [found["held_out"][when]["accuracy"] for when in ("before", "after")],
            "name": name,
            "mode": "lines+markers",
            "palette": place,
        }
        for place, (name, found) in enumerate(trained.items())
        if found["held_out"]["before"]
    ]
    held_out = Chart(title="Held-out accuracy", traces=accuracies, x_title="", share=True)
    return [*charts, held_out] if accuracies else charts
