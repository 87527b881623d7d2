"""How a report looks: one HTML page with everything inside, readable in light and dark.

Charts are plotly's, drawn by its script, which is embedded once; colours come from the page's own variables and change
with the reader's colour scheme.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plotly.offline import get_plotlyjs

from nearpolicy.visible import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart; ``traces`` are plotly's, with ``palette`` (place in the palette, None: grey) and ``dash`` beside."""

    title: str
    note: str = ""
    traces: Sequence[Mapping[str, Any]] = ()
    marks: Mapping[int, str] = field(default_factory=dict)
    """Steps at which a value was not finite -> what it was."""
    share: bool = False
    """The values lie between 0 and 1."""
    x_title: str = "step"
    lanes: Sequence[str] = ()
    """Rows of a time line, lowest first; empty for curves."""


_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}


def escape(text: str) -> str:
    """Text as it may stand in a page: no markup, nothing that acts; control characters as the pictures Unicode has."""
    return html.escape(visible(text.translate(_PICTURES)))


def shown(text: str, limit: int = 1200) -> str:
    """Escaped and cut in the middle if long."""
    if len(text) <= limit:
        return escape(text)
    half = limit // 2
    return f"{escape(text[:half])} <em>… {len(text) - limit:,} characters …</em> {escape(text[-half:])}"


def page(
    *,
    title: str,
    subtitle: str,
    alarms: Sequence[str],
    cards: Sequence[tuple[str, str, str]],
    charts: Sequence[Chart],
    timeline: Chart | None,
    sections: Sequence[tuple[str, str]],
) -> str:
    """``sections`` are (heading, HTML); empty ones are left out."""
    numbered = dict(enumerate([*charts, *([timeline] if timeline else [])]))
    data = {f"chart-{place}": asdict(chart) for place, chart in numbered.items()}
    # A tag or a comment inside a script would end it or hide the rest; JSON allows the escape.
    script_data = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    figures = "".join(_figure(place, chart) for place, chart in numbered.items() if not chart.lanes)
    wide = "".join(_figure(place, chart) for place, chart in numbered.items() if chart.lanes)
    tables = "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in sections if body)
    alarm = "".join(f"<li>{escape(line)}</li>" for line in alarms)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · Nearpolicy</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<header><p class=brand>Nearpolicy</p><h1>{escape(title)}</h1><p class=note>{escape(subtitle)}</p></header>
{f"<div class=alarm role=alert><strong>Not finite</strong><ul>{alarm}</ul></div>" if alarms else ""}
<div class=cards>{"".join(_card(*card) for card in cards)}</div>
{wide}
<div class=grid>{figures}</div>
{tables}
</main>
<script>{get_plotlyjs()}</script>
<script>const PALETTE = {PALETTE};
const CHARTS = {script_data};
{_SCRIPT}</script>
</body>
</html>
"""


def _figure(place: int, chart: Chart) -> str:
    bad = " class=bad" if chart.marks else ""
    badge = "<span class='tag bad'>not finite</span>" if chart.marks else ""
    caption = f"<figcaption><b>{escape(chart.title)}</b>{badge}<p>{escape(chart.note)}</p></figcaption>"
    height = 54 + 44 * len(chart.lanes) if chart.lanes else 240
    legend = _legend(place, chart)
    return f"<figure{bad}>{caption}{legend}<div id=chart-{place} style='height:{height}px'></div></figure>"


def _legend(place: int, chart: Chart) -> str:
    """Outside the plot, so that it never covers it; a click hides or shows what it names. One curve needs none."""
    if len(chart.traces) < 2:
        return ""
    entries = []
    for number, trace in enumerate(chart.traces):
        palette = trace.get("palette")
        waits = "--wait" if chart.lanes else "--soft"
        colour = waits if palette is None else f"--c{palette % PALETTE}"
        style = "bar" if chart.lanes else trace.get("dash", "solid")
        entries.append(
            f"<button data-chart=chart-{place} data-trace={number}><i class={style} style='--colour:var({colour})'></i>"
            f"{escape(str(trace['name']))}</button>"
        )
    return f"<div class=legend>{''.join(entries)}</div>"


def _card(name: str, value: str, remark: str) -> str:
    return f"<div class=card><p>{escape(name)}</p><b>{escape(value)}</b><small>{escape(remark)}</small></div>"


PALETTE = 12
"""Colours --c0, --c1, ... of the style sheet."""

_CSS = """
:root {
  --paper: #f6f7f9; --panel: #ffffff; --ink: #16191f; --soft: #646c7a; --line: #e3e6eb; --grid: #eceef2;
  --alarm: #c62828; --alarm-paper: #fdecec; --good: #1b7f4b; --good-paper: #e3f4ea; --wait: #d9dde4;
  --c0: #2f6fed; --c1: #e08a00; --c2: #0f9d76; --c3: #d6336c;
  --c4: #7950f2; --c5: #0b95b8; --c6: #8a4b12; --c7: #7a8f1f;
  --c8: #f0c419; --c9: #1d3f7a; --c10: #e8590c; --c11: #8e3b8e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1216; --panel: #171b21; --ink: #e8ebf0; --soft: #98a1b0; --line: #2a303a; --grid: #232932;
    --alarm: #ff7b7b; --alarm-paper: #351a1d; --good: #5fd39a; --good-paper: #15301f; --wait: #39414d;
    --c0: #6ea0ff; --c1: #ffb547; --c2: #3fcf9f; --c3: #ff7ba8;
    --c4: #a88bff; --c5: #4cc9e6; --c6: #b5794a; --c7: #b4cc55;
    --c8: #ffe066; --c9: #5b7cc4; --c10: #ff8a4c; --c11: #d687d6;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 36px 24px 72px; }
header { margin-bottom: 22px; }
.brand { margin: 0; color: var(--c0); font-weight: 650; font-size: 13px; letter-spacing: .06em;
  text-transform: uppercase; }
h1 { margin: 2px 0 2px; font-size: 30px; line-height: 1.2; letter-spacing: -.02em; }
h2 { margin: 0 0 12px; font-size: 17px; letter-spacing: -.01em; }
.note { margin: 0 0 10px; color: var(--soft); font-size: 14px; }
.alarm { margin: 0 0 18px; padding: 13px 18px; border-radius: 12px; background: var(--alarm-paper); color: var(--alarm);
  border: 1px solid var(--alarm); }
.alarm ul { margin: 4px 0 0; padding-left: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 14px; margin-bottom: 14px; }
.card, figure, section { background: var(--panel); border: 1px solid var(--line); border-radius: 14px; }
.card { padding: 14px; }
.card p { margin: 0; color: var(--soft); font-size: 12.5px; }
.card b { display: block; font-size: 20px; line-height: 1.35; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.card small { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 14px; }
figure { display: flex; flex-direction: column; margin: 0 0 14px; padding: 14px 14px 8px; min-width: 0; }
figure > div:last-child { margin-top: auto; }
.grid figure { margin: 0; }
figure.bad { border-color: var(--alarm); }
figcaption { padding: 0 4px 4px; }
figcaption .tag { margin-left: 10px; }
figcaption p { margin: 0; min-height: 1.5em; color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 0 4px 6px; }
.legend button { all: unset; display: inline-flex; align-items: center; gap: 6px; font-size: 12.5px; cursor: pointer; }
.legend button:focus-visible { outline: 2px solid var(--c0); border-radius: 4px; }
.legend button.off { opacity: .4; text-decoration: line-through; }
.legend i { width: 18px; border-top: 2px solid var(--colour); }
.legend i.dot { border-top-style: dotted; }
.legend i.dash { border-top-style: dashed; }
.legend i.bar { width: 12px; height: 12px; border: 0; border-radius: 3px; background: var(--colour); }
section { margin-top: 14px; padding: 20px 22px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sum td { color: var(--soft); }
.bar { width: 45%; vertical-align: middle; }
.bar i { display: block; height: 8px; min-width: 2px; border-radius: 4px; background: var(--c0); }
.samples { table-layout: fixed; }
.samples th:first-child:nth-last-child(3) { width: 26%; }
pre { margin: 4px 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.tag { display: inline-block; padding: 1px 8px; border-radius: 20px; font-size: 12px; font-weight: 600; }
.tag.good { color: var(--good); background: var(--good-paper); }
.tag.bad { color: var(--alarm); background: var(--alarm-paper); }
.tag.mute { color: var(--soft); background: var(--grid); }
summary { cursor: pointer; color: var(--soft); }
"""

_SCRIPT = """
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = place => place === null || place === undefined ? colour("--wait") : colour("--c" + place % PALETTE);

function trace(chart, raw) {
  const {palette, dash, ...rest} = raw;
  const waits = palette === null || palette === undefined;
  if (rest.type === "bar") {
    return {...rest, marker: {color: paint(palette), line: {width: 0}}, textposition: "none",
      hovertemplate: "%{text}<br>%{x:.2f} from %{base:.2f}<extra></extra>"};
  }
  const line = {color: waits ? colour("--soft") : paint(palette), width: 2, dash: dash || "solid"};
  const out = {...rest, type: "scatter", line, marker: {size: 5, color: line.color}, connectgaps: false,
    hovertemplate: "%{y:.4~g}" + (rest.text ? "<br>%{text}" : "")};
  if (rest.error_y) out.error_y = {...rest.error_y, color: line.color, thickness: 1.2, width: 4};
  return out;
}

function layout(chart) {
  const axis = {gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true,
    tickfont: {color: colour("--soft"), size: 12}};
  const bars = chart.lanes.length > 0;
  const steps = Object.keys(chart.marks);
  const values = chart.traces.flatMap(raw => raw.y).filter(Number.isFinite).map(Math.abs);
  const number = Math.max(...values, 0) < 1e-3 && values.some(Boolean) ? ".2~e" : "~g";
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", barmode: "overlay", bargap: 0.35,
    font: {family: "system-ui, sans-serif", color: colour("--ink"), size: 12},
    margin: {l: 8, r: 10, t: 8, b: 34}, hovermode: bars ? "closest" : "x unified",
    hoverlabel: {bgcolor: colour("--panel"), bordercolor: colour("--line"), font: {color: colour("--ink")}},
    showlegend: false,
    xaxis: {...axis, title: {text: chart.x_title, font: {size: 12, color: colour("--soft")}, standoff: 4},
      ...(bars ? {range: [0, Math.max(...chart.traces.flatMap(raw => raw.x.map((x, i) => x + raw.base[i])))]} : {})},
    yaxis: bars ? {...axis, categoryorder: "array", categoryarray: chart.lanes, fixedrange: true,
                   tickfont: {color: colour("--ink"), size: 13}, ticklabelstandoff: 8}
      : {...axis, rangemode: "tozero", tickformat: chart.share ? ".0%" : number,
         ...(chart.share ? {minallowed: 0} : {})},
    shapes: steps.map(step => ({type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1,
      line: {color: colour("--alarm"), width: 1.5, dash: "dash"}})),
    annotations: steps.map(step => ({x: step, yref: "paper", y: 0.98, text: chart.marks[step], showarrow: false,
      font: {color: colour("--alarm"), size: 11}, bgcolor: colour("--panel"), yanchor: "top"})),
  };
}

function draw() {
  for (const [id, chart] of Object.entries(CHARTS)) {
    Plotly.react(id, chart.traces.map(raw => trace(chart, raw)), layout(chart),
      {responsive: true, displaylogo: false, displayModeBar: false});
  }
}
draw();
for (const button of document.querySelectorAll(".legend button")) {
  button.onclick = () => {
    const hidden = button.classList.toggle("off");
    Plotly.restyle(button.dataset.chart, {visible: hidden ? false : true}, [Number(button.dataset.trace)]);
  };
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""
