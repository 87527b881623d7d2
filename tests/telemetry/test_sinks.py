"""Sinks: refused early with what to install, and never able to stop a run."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from nearpolicy.errors import UserError
from nearpolicy.telemetry.sinks import SINKS, Sinks, open_sinks, require_sinks


class Remembers:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step, metrics) -> None:
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


class Breaks(Remembers):
    def log(self, step, metrics) -> None:
        super().log(step, metrics)
        raise ConnectionError("no route")


def test_a_failing_sink_is_reported_once_and_stops_nothing(caplog):
    good, bad = Remembers(), Breaks()
    sinks = Sinks({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sinks.log(step, {"reward/mean": 0.5})
        sinks.close()
    assert [step for step, _ in good.seen] == [0, 1, 2] and good.closed
    assert [step for step, _ in bad.seen] == [0]
    assert [record.getMessage().count("sink bad failed") for record in caplog.records] == [1]


@pytest.mark.parametrize("name", [name for name in SINKS if importlib.util.find_spec(name) is None])
def test_a_missing_package_is_named_with_its_extra(name, tmp_path):
    with pytest.raises(UserError, match=rf"pip install 'nearpolicy\[{name}\]'"):
        require_sinks([name])


def test_an_unknown_sink_is_named_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="'tensorbord'; did you mean tensorboard"):
        require_sinks(["tensorbord"])


def test_a_sink_that_cannot_start_closes_those_that_have(monkeypatch, tmp_path):
    good = Remembers()

    def cannot(run_dir, config):
        raise RuntimeError("no account")

    for name, start in {"good": lambda run_dir, config: good, "bad": cannot}.items():
        monkeypatch.setitem(SINKS, name, start)
    with pytest.raises(RuntimeError, match="no account"):
        open_sinks(["good", "bad"], tmp_path, {})
    assert good.closed
