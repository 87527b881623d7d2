"""`telemetry.profile`: what Perfetto is given."""

from __future__ import annotations

import json

from nearpolicy.telemetry.events import Recorder
from nearpolicy.telemetry.trace import Trace


class Ticks:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Store:
    def event(self, event) -> None:
        pass


def recorded(tmp_path, steps: int = 1):
    clock = Ticks()
    recorder = Recorder(
        Store(), wall_anchor=1e12, trace=Trace(tmp_path / "trace.json", steps), clock=clock
    )  # an anchor ahead of the wall clock: time starts at 0
    return recorder, clock


def test_every_decode_step_phase_and_wait_is_there_with_its_start_and_length_in_microseconds(tmp_path):
    recorder, clock = recorded(tmp_path)
    for _ in range(3):
        clock.now += 0.5
        recorder.event("generator", "decode_step", batch=4, context_sum=9, ms=250.0, sampled=4, running=4, version=0)
    clock.now += 1.0
    recorder.event("learner", "forward_backward", seconds=0.75, version=0)
    recorder.event("learner", "idle", seconds=0.25, cause="no batch")
    recorder.log_step(0, {})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("decode_step", 0.25e6, 0.25e6),
        ("decode_step", 0.75e6, 0.25e6),
        ("decode_step", 1.25e6, 0.25e6),
        ("forward_backward", 1.75e6, 0.75e6),
        ("idle", 2.25e6, 0.25e6),
    ]
    assert next(e for e in events if e["name"] == "idle")["args"]["cause"] == "no batch"
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["tid"]] for e in events if e["ph"] == "X"} == {"generator", "learner", "learner (1)"}
    assert [e["name"] for e in events if e["ph"] == "i"] == ["step 0"]


def test_work_that_overlaps_lies_on_tracks_of_its_own(tmp_path):
    recorder, clock = recorded(tmp_path)
    clock.now += 2.0
    recorder.event("verifier", "verify", seconds=2.0, queue_s=0.0, scored=1, abstained=0, failed=0)
    recorder.event("verifier", "verify", seconds=1.0, queue_s=0.0, scored=1, abstained=0, failed=0)
    clock.now += 1.0
    recorder.event("verifier", "verify", seconds=0.5, queue_s=0.0, scored=1, abstained=0, failed=0)
    recorder.close()
    spans = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert spans[0]["tid"] != spans[1]["tid"]
    assert spans[2]["tid"] == spans[0]["tid"]


def test_nothing_is_collected_after_so_many_steps(tmp_path):
    recorder, clock = recorded(tmp_path, steps=2)
    for step in range(4):
        clock.now += 1.0
        recorder.event("learner", "optim", seconds=0.5, version=step)
        recorder.log_step(step, {})
    recorder.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["version"] for e in events if e["name"] == "optim"] == [0, 1]
