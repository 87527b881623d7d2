"""How a comparison of objectives is shown: a table in the terminal, a page with charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearpolicy.telemetry.report_page import Chart, escape, page

COLUMNS = (
    ("loss", lambda row: row["loss"], "{:.4g}"),
    ("grad norm", lambda row: row["gradient_norm"], "{:.4g}"),
    ("ESS", lambda row: row["ess"], "{:.3f}"),
    ("weight", lambda row: row["weight_mean"], "{:.3f}"),
    ("clipped", lambda row: row["clipped_share"], "{:.1%}"),
    ("rejected", lambda row: row["rejected_share"], "{:.1%}"),
    ("cos to IS", lambda row: row["cosine_to_importance_sampling"], "{:.3f}"),
    ("bias", lambda row: _of(row, "bias"), "{:.3f}"),
    ("95 % low", lambda row: _of(row, "bias_low"), "{:.3f}"),
    ("high", lambda row: _of(row, "bias_high"), "{:.3f}"),
    ("variance", lambda row: _of(row, "variance"), "{:.3g}"),
    ("of IS", lambda row: _of(row, "reference_variance"), "{:.3g}"),
)
"""Heading, value of a row, format. Bias and variance are relative to the gradient of full importance sampling (IS)."""


def _of(row: Mapping[str, Any], name: str) -> float | None:
    return None if row["importance_sampling"] is None else row["importance_sampling"][name]


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row of the table as text; a dash where there is nothing to say."""
    values = ((value(row), form) for _, value, form in COLUMNS)
    return ["-" if value is None else form.format(value) for value, form in values]


def print_table(result: Mapping[str, Any]) -> None:
    """What a person reads in a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(headline(result))
    table = Table("objective", *(heading for heading, _, _ in COLUMNS), box=None, pad_edge=False)
    for name, row in result["objectives"].items():
        table.add_row(name, *cells(row))
    console.print(table)
    cosines = Table("cosine", *result["cosines"], box=None, pad_edge=False)
    for name, others in result["cosines"].items():
        cosines.add_row(name, *("-" if c is None else f"{c:.3f}" for c in others.values()))
    console.print(cosines)
    for name, row in result["objectives"].items():
        if parts := row["gradient_norm_by_part"]:
            console.print(
                f"{name}: gradient norm of " + ", ".join(f"{part} {norm:.3g}" for part, norm in parts.items())
            )
    for name, trained in result.get("trained", {}).items():
        console.print(f"{name}: " + _trained(trained))


def headline(result: Mapping[str, Any]) -> str:
    """What was compared on what."""
    staleness = result["staleness"]
    return (
        f"{result['run']}, step {result['step']} under version {result['weights']}: {result['groups']} groups, "
        f"{result['tokens']} trained tokens, staleness {staleness['mean']:g} (at most {staleness['max']}), "
        f"{result['gradients']} gradients"
    )


def _trained(trained: Mapping[str, Any]) -> str:
    before, after = (trained["held_out"][when] for when in ("before", "after"))
    accuracy = f"held out {before['accuracy']:.1%} -> {after['accuracy']:.1%}, " if before else ""
    last = trained["steps"][-1]
    return (
        f"{len(trained['steps'])} steps, {accuracy}loss {last['policy/loss']:.4g}, entropy {last['policy/entropy']:.3f}"
    )


def comparison_page(result: Mapping[str, Any]) -> str:
    """One HTML page with everything inside."""
    rows = result["objectives"]
    charts = [_trade_off(rows)]
    if "trained" in result:
        charts += _training(result["trained"])
    return page(
        title=f"Objectives on {result['run']}",
        subtitle=headline(result),
        alarms=[],
        cards=[],
        charts=[chart for chart in charts if chart is not None],
        timeline=None,
        sections=[
            ("Objectives", _html_table(rows)),
            ("Cosine between gradients", _matrix(result["cosines"])),
            ("What the columns say", _LEGEND),
        ],
    )


_LEGEND = """<p>Bias and variance are relative to the length, and its square, of the gradient of full importance
sampling: the same advantages and divisor, whole-sequence weights without a cap. Bias: how far the gradient is from it
on the batch's own groups, with the middle 95 % over resampled groups. Variance: over updates of the batch's size, drawn
from its groups. ESS: effective sample size of the tokens' importance weights, as a share.</p>"""


def _html_table(rows: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ("objective", *(heading for heading, _, _ in COLUMNS)))
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>"
        for name, row in rows.items()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _trade_off(rows: Mapping[str, Any]) -> Chart | None:
    traces = [
        {
            "x": [_of(row, "bias")],
            "y": [_of(row, "variance")],
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
                "x": list(range(len(found["steps"]))),
                "y": [line.get(metric) for line in found["steps"]],
                "name": name,
                "mode": "lines",
                "palette": place,
            }
            for place, (name, found) in enumerate(trained.items())
        ]
        charts.append(Chart(title=title, note="while training on the recording", traces=traces))
    accuracies = [
        {
            "x": ["before", "after"],
            "y": [found["held_out"][when].get("accuracy") for when in ("before", "after")],
            "name": name,
            "mode": "lines+markers",
            "palette": place,
        }
        for place, (name, found) in enumerate(trained.items())
    ]
    return [*charts, Chart(title="Held-out accuracy", traces=accuracies, x_title="", share=True)]
