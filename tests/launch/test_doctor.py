"""`nearpolicy doctor`: what it says of an isolation that cannot be used after all."""

from __future__ import annotations

import asyncio

from nearpolicy.launch import doctor
from nearpolicy.verifier.sandbox import ladder
from nearpolicy.verifier.sandbox.ladder import Opened
from nearpolicy.verifier.sandbox.runs import Ended


class Fake:
    def __init__(self, ended):
        self.ended, self.closed = ended, False

    async def run(self, run, on_frame=None):
        if isinstance(self.ended, Exception):
            raise self.ended
        return self.ended

    async def close(self):
        self.closed = True


def examined(monkeypatch, ended):
    """What is said by isolation, and the sandboxes."""
    sandboxes = []

    async def attacked(isolation, **_):
        sandboxes.append(Fake(ended))
        return Opened(sandbox=sandboxes[-1], isolation=isolation)

    monkeypatch.setattr(ladder, "attacked", attacked)
    try:
        return dict(asyncio.run(doctor._isolation(["numpy"]))), sandboxes
    except RuntimeError:
        return {}, sandboxes


def test_an_isolation_whose_runs_fail_does_not_withstand(monkeypatch):
    said, sandboxes = examined(monkeypatch, Ended(failure="no more processes"))
    assert "FAILS: a program cannot be run: no more processes" in said["namespaces"]
    assert "none" in said["auto takes"] and all(each.closed for each in sandboxes)
    said, _ = examined(monkeypatch, Ended())
    assert said["namespaces"].startswith("withstands") and said["auto takes"] == "namespaces"


def test_a_sandbox_is_closed_whatever_its_runs_do(monkeypatch):
    _, sandboxes = examined(monkeypatch, RuntimeError("a mistake"))
    assert sandboxes and all(each.closed for each in sandboxes)
