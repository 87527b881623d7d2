"""The report: one file, nothing from outside, bad values seen, anything a model may write shown as text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from synthetic_run import CONFIG, NASTY, batch, group, make_run, trained

from nearpolicy.launch.report import write_report
from nearpolicy.records import Event, StepReport
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.writer import SqliteStore
from nearpolicy.telemetry.metrics import MetricsWriter
from nearpolicy.telemetry.report import _KINDS, _duration, _spans, _timeline, _training
from nearpolicy.telemetry.report_page import _CSS, PALETTE


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts apart from that of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag) -> None:
        self.inside = ""

    def handle_data(self, data) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text += data

    @property
    def charts(self) -> dict[str, dict]:
        (data,) = re.findall(r"const CHARTS = (.*);$", "".join(self.scripts), flags=re.M)
        return {chart["title"]: chart for chart in json.loads(data).values()}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Page:
    folder = make_run(tmp_path_factory.mktemp("runs"), steps=6, bad_steps=(2, 4))
    return Page(write_report(folder.path).read_text(encoding="utf-8"))


def test_nothing_is_fetched_from_outside(report):
    assert not [tag for tag, attributes in report.tags if {"src", "href", "srcset", "data"} & attributes.keys()]
    assert not {"link", "iframe", "img", "object"} & {tag for tag, _ in report.tags}
    assert sum(script.count("plotly.js v") > 0 for script in report.scripts) == 1


def test_the_asked_for_charts_are_there(report):
    expected = {"Reward", "Held-out accuracy", "Completion length", "Entropy", "KL from the reference"}
    expected |= {"Log-probability gap", "Staleness", "Gradient norm", "Learning rate", "Time line"}
    assert expected <= report.charts.keys()
    assert [trace["name"] for trace in report.charts["Reward"]["traces"]] == ["reward", "answer", "format"]
    (accuracy, pass_at_4) = report.charts["Held-out accuracy"]["traces"]
    assert accuracy["error_y"]["array"] and pass_at_4["name"] == "pass@4"
    assert report.charts["Staleness"]["traces"][-1] == {"x": [*range(6)], "y": [1] * 6, "name": "bound"} | {
        "mode": "lines",
        "dash": "dot",
    }
    lanes = [lane.split()[0] for lane in report.charts["Time line"]["lanes"]]
    assert lanes == ["sync", "learner", "verifier", "generator"]  # drawn upwards


def test_k56_values_that_are_not_finite_are_marked_and_raise_an_alarm(report):
    assert "policy/grad_norm was not finite at steps 2 (inf), 4 (inf)" in report.text
    assert report.charts["KL from the reference"]["marks"] == {"2": "KL nan", "4": "KL nan"}
    assert report.charts["Reward"]["marks"] == {} and None not in report.charts["Reward"]["traces"][0]["y"]


@pytest.mark.parametrize(("infinity", "word"), [(math.inf, "inf"), (-math.inf, "-inf")])
def test_one_step_with_a_good_and_two_bad_values_is_drawn_marked_and_alarmed(tmp_path, infinity, word):
    """K56: reward 0.5, KL not a number, gradient norm infinite; the page's own data is strict JSON too."""
    folder = make_run(tmp_path, steps=1)
    folder.metrics.unlink()
    writer = MetricsWriter(folder.metrics)
    writer.write(0, {"reward/mean": 0.5, "policy/kl_reference": math.nan, "policy/grad_norm": infinity})
    writer.close()
    page = Page(write_report(folder.path).read_text())
    assert page.charts["Reward"]["traces"][0]["y"] == [0.5] and page.charts["Reward"]["marks"] == {}
    assert page.charts["KL from the reference"]["marks"] == {"0": "KL nan"}
    assert page.charts["Gradient norm"]["marks"] == {"0": f"norm {word}"}
    alarms = f"Not finitepolicy/grad_norm was not finite at step 0 ({word})policy/kl_reference was not finite at step 0"
    assert alarms in page.text and any(attributes.get("role") == "alert" for _, attributes in page.tags)
    [data] = re.findall(r"const CHARTS = (.*);$", "".join(page.scripts), flags=re.M)
    json.loads(data, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_tokens_idle_causes_and_answers_are_told(report):
    for text in ("zero advantage", "in flight", "staleness bound", "no batch", "What is 0 + 3?", "resolved recipe"):
        assert text in report.text


def test_a_metric_that_was_never_finite_still_has_its_chart(tmp_path):
    folder = make_run(tmp_path, steps=2, bad_steps=(0, 1))
    charts = Page(write_report(folder.path).read_text()).charts
    assert charts["Gradient norm"]["marks"] == {"0": "norm inf", "1": "norm inf"}


def test_a_running_run_without_anything_yet_has_a_report(tmp_path):
    folder = create_run_folder("young", parent=tmp_path)
    with SqliteStore.create(folder, config=CONFIG):
        assert Page(write_report(folder.path).read_text()).charts == {}


def test_what_a_model_writes_is_text_and_never_markup(tmp_path):
    folder = create_run_folder("nasty", parent=tmp_path)
    with SqliteStore.create(folder, config={"run": {"name": NASTY}}) as store:
        for step in range(2):
            plain = group(step)
            groups = [replace(plain, rollouts=tuple(replace(rollout, text=NASTY) for rollout in plain.rollouts))]
            store.consumed(batch(step, groups), StepReport(version=1, updates=1, metrics={}), trained(groups))
    text = write_report(folder.path).read_text(encoding="utf-8")
    page = Page(text)
    assert not {"\u202e", "\x9b", "\x1b", "\x00"} & set(text)
    assert "\\ud800text" in page.text and "end\u2400of" in page.text and "</script>" in page.text
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_the_time_line_stays_small_and_shares_are_exact():
    busy = [Event(time=i * 0.01, role="generator", kind="decode", seconds=0.005) for i in range(20_000)]
    other = [Event(time=0.0, role="learner", kind="idle", seconds=100.0, numbers={"cause": "no_batch"})]
    other += [Event(time=100.0, role="learner", kind="optim", seconds=100.0, instance=0)]
    chart = _timeline(_spans(busy + other), (0.0, 200.0))
    assert chart.lanes == ["learner  50%", "generator  50%"]
    assert sum(len(trace["x"]) for trace in chart.traces) <= 2003


def test_shares_of_roles_are_of_training_time_without_the_evaluations_around_it():
    def event(kind: str, role: str, time: float, seconds: float | None = None) -> Event:
        return Event(time=time, role=role, kind=kind, seconds=seconds)

    events = [event("evaluate", "evaluate", 0.0, 100.0), event("decode", "generator", 0.0, 100.0)]
    events += [event("admit", "queue", 100.0), event("decode", "generator", 100.0, 5.0)]
    events += [event("optim", "learner", 105.0, 5.0), event("verify", "verifier", 104.0, 0.01)]
    events += [event("checkpoint", "learner", 110.0, 7.0), event("evaluate", "evaluate", 117.0, 100.0)]
    spans = _spans(events)
    window = _training(events, spans)
    assert window == (100.0, 110.0)
    assert _timeline(spans, window).lanes == ["evaluate", "learner  50%", "verifier  <1%", "generator  50%"]


def test_no_two_kinds_of_work_share_a_colour():
    colours = [colour for _, colour in _KINDS.values() if colour is not None]
    assert len(set(colours)) == len(colours) <= PALETTE
    assert all(f"--c{colour}:" in _CSS for colour in colours)


def test_a_curve_that_repeats_another_is_named_once_and_not_drawn(tmp_path):
    folder = create_run_folder("one-source", parent=tmp_path)
    with SqliteStore.create(folder, config=CONFIG):
        writer = MetricsWriter(folder.metrics)
        for step in range(3):
            same = dict.fromkeys(("reward/mean", "reward/number/mean", "task/sums/reward"), step / 3)
            writer.write(step, {**same, "staleness/mean": 1.0, "staleness/max": 1.0})
        writer.close()
        page = Page(write_report(folder.path).read_text())
    assert [trace["name"] for trace in page.charts["Reward"]["traces"]] == ["reward"]
    assert page.charts["Reward"]["note"] == "number and task sums: the same curve"
    assert [trace["name"] for trace in page.charts["Staleness"]["traces"]] == ["mean", "largest", "bound"]


def test_before_and_after_is_said_only_where_there_are_both(tmp_path, report):
    assert "The same questions before and after" in report.text
    folder = create_run_folder("two-steps", parent=tmp_path)
    with SqliteStore.create(folder, config=CONFIG) as store:
        store.consumed(batch(0, [group(0)]), StepReport(version=1, updates=1, metrics={}), trained([group(0)]))
        store.flush()
        text = Page(write_report(folder.path).read_text()).text
        assert "Rollouts of the first step" in text and "before and after" not in text
        store.consumed(batch(1, [group(1)]), StepReport(version=2, updates=2, metrics={}), trained([group(1)]))
        store.flush()
        assert "Rollouts of the first and the last step" in Page(write_report(folder.path).read_text()).text


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (425, "7 min 05 s"), (60, "1 min 00 s"), (3725, "1 h 02 min")]
)
def test_durations_are_said_in_words(seconds, said):
    assert _duration(seconds) == said


def test_instances_of_a_role_get_lanes_of_their_own(tmp_path):
    events = [Event(time=0.0, role="generator", kind="decode", seconds=1.0, instance=i) for i in (1, 0)]
    assert _timeline(_spans(events), (0.0, 1.0)).lanes == ["generator 1  100%", "generator 0  100%"]


def test_the_reader_is_all_a_report_needs(tmp_path):
    folder = make_run(tmp_path, steps=2)
    first = write_report(folder.path).read_text()
    with RunReader(folder.path) as run:
        assert run.name in first
    assert write_report(folder.path).read_text() == first
