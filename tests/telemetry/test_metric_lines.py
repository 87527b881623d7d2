"""Metrics: means over what their names say (K55), lines any parser takes (K56)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from synthetic_run import make_run

from nearpolicy.errors import RunFolderError
from nearpolicy.launch.report import write_report
from nearpolicy.store.reader import RunReader
from nearpolicy.telemetry.metrics import METRICS, Mean, MetricsWriter, unknown_names


def strict(line: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("cuts", [[(6, 0.1), (2, 0.5)], [(2, 0.5), (3, 0.1), (0, math.nan), (3, 0.1)], [(8, 0.2)]])
def test_k55_a_mean_is_over_tokens_whatever_the_micro_batches(cuts):
    kl = Mean()
    for tokens, mean in cuts:
        kl.add(mean, weight=tokens)
    assert kl.value == pytest.approx(0.2, abs=1e-15)


def test_means_of_shards_merge_and_sums_may_be_given():
    left, right = Mean(), Mean()
    left.add_sum(0.6, weight=6)
    right.add_sum(1.0, weight=2)
    left.merge(right)
    assert left.value == pytest.approx(0.2)


def test_a_mean_over_nothing_is_not_zero():
    assert Mean().value is None


def test_k56_a_bad_value_is_null_and_named_and_spoils_nothing_else(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(3, {"reward/mean": 0.5, "policy/kl_reference": math.nan, "policy/grad_norm": np.float32("inf")})
    writer.close()
    line = strict((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("time") > 0
    assert line == {
        "step": 3,
        "reward/mean": 0.5,
        "policy/kl_reference": None,
        "policy/grad_norm": None,
        "not_finite": {"policy/kl_reference": "nan", "policy/grad_norm": "inf"},
    }


def test_k56_every_line_of_a_run_is_strict_json(tmp_path):
    folder = make_run(tmp_path, bad_steps=(1, 2))
    lines = [strict(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [bool(line.get("not_finite")) for line in lines] == [False, True, True, False]


def test_what_is_no_number_is_refused_by_name(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="metric 'reward/mean' is None"):
        writer.write(0, {"reward/mean": None})
    writer.close()


def test_a_line_torn_by_kill_is_cut_off_and_skipped_by_readers(tmp_path):
    folder = make_run(tmp_path, steps=2)
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "reward/me')
    assert [line["step"] for line in RunReader(folder.path).metrics()] == [0, 1]
    writer = MetricsWriter(folder.metrics)
    writer.write(2, {"reward/mean": 1.0})
    writer.close()
    assert [strict(line)["step"] for line in folder.metrics.read_text().splitlines()] == [0, 1, 2]


def test_lines_of_one_step_are_merged_and_a_repeated_step_replaces(tmp_path):
    folder = make_run(tmp_path, steps=1)
    folder.metrics.unlink()
    writer = MetricsWriter(folder.metrics)
    writer.write(0, {"reward/mean": math.nan, "policy/loss": math.inf})
    writer.write(0, {"evaluation/sums/accuracy": 0.5})
    writer.write(0, {"reward/mean": 0.25})
    writer.close()
    (line,) = RunReader(folder.path).metrics()
    assert (line["reward/mean"], line["evaluation/sums/accuracy"]) == (0.25, 0.5)
    assert line["not_finite"] == {"policy/loss": "inf"}


def test_names_are_canonical_or_found_out(tmp_path):
    run = RunReader(make_run(tmp_path, steps=1).path)
    logged = set(run.metrics()[0]) - {"step", "time", "not_finite"}
    assert unknown_names(logged) == []
    good = ["reward/exact/mean", "task/sums/reward", "evaluation/sums/pass@8", "verifier/exact/failed_share"]
    bad = ["reward/avg", "loss", "evaluation/accuracy", "Reward/mean"]
    assert unknown_names(good + bad) == bad
    assert all(meaning for meaning in METRICS.values())


@pytest.mark.parametrize(
    "line", [b"{", b"\xff", b"[1]", b"5", b"{}", b'{"step": "x"}', b'{"step": 1, "not_finite": 3}', b"[" * 10_000]
)
def test_a_broken_line_inside_is_named_by_its_number(tmp_path, line):
    folder = make_run(tmp_path)
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(b"".join([*lines[:2], line + b"\n", *lines[2:]]))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl line 3 is not a line of metrics .*; remove that line"):
        write_report(folder.path)


def test_a_broken_summary_is_named(tmp_path):
    folder = make_run(tmp_path)
    folder.summary.write_text("{")
    with pytest.raises(RunFolderError, match=r"summary\.json cannot be read: .*; remove it"):
        write_report(folder.path)
