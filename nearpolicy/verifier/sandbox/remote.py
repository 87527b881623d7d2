"""Runs on somebody else's machine: an HTTP service with the interface of SandboxFusion, ``POST URL/run_code``.

What isolates a program is the service's matter. What is kept here: one program and one input go there, expected results
stay, and the verdict is made of what comes back. The service has one channel for results, so that a call's value comes
as the last line of stdout, behind a word that is new each time; who forges it still does not know what would be right.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import httpx2

from nearpolicy.errors import VerifierError
from nearpolicy.verifier.sandbox import harness, values
from nearpolicy.verifier.sandbox.pool import CONTROL, CONTROL_ANSWER
from nearpolicy.verifier.sandbox.runs import Ended, OnFrame, Run

ATTEMPTS = 3
BACK_OFF_S = 0.5
"""Before the second attempt, twice as long before the third."""
MARGIN_S = 30.0
"""Of the service, beyond the limits of a run: it may have a queue of its own."""
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})

_DRIVER = """
import ast, atexit, builtins, contextlib, io, json, os, random, struct, sys, threading, traceback, types
_values = types.ModuleType("nearpolicy.verifier.sandbox.values")
exec({values!r}, _values.__dict__)
for _name in ("nearpolicy", "nearpolicy.verifier", "nearpolicy.verifier.sandbox"):
    sys.modules[_name] = types.ModuleType(_name)
sys.modules["nearpolicy.verifier.sandbox.values"] = sys.modules["nearpolicy.verifier.sandbox"].values = _values
_harness = types.ModuleType("nearpolicy.verifier.sandbox.harness")
exec({harness!r}, _harness.__dict__)
_harness._sent = lambda frame: print("\\n" + {word!r} + frame.decode(), flush=True) or 0
sys.exit(_harness._KINDS[{kind!r}]({program!r}, **{job!r}))
"""


class Remote:
    """A `Sandbox` behind a URL. Use `close`."""

    def __init__(self, url: str, places: int, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """``transport``: how requests travel, if not over the network."""
        self._url = url.rstrip("/") + "/run_code"
        self._places = asyncio.Semaphore(places)
        self._client = httpx2.AsyncClient(transport=transport)

    async def run(self, run: Run, on_frame: OnFrame | None = None) -> Ended:
        if run.kind in ("tests", "command"):
            return Ended(failure=f"a remote sandbox takes no runs of the kind {run.kind}")
        word = f"result-{secrets.token_hex(8)}:"
        code = run.program.decode("utf-8", "replace") if run.kind == "program" else _driver(run, word)
        asked = {
            "language": "python",
            "code": code,
            "stdin": run.stdin.decode("utf-8", "replace"),
            "run_timeout": run.limits.wall,
            "memory_limit_MB": run.limits.memory_mib,
        }
        async with self._places:
            begin = time.perf_counter()
            answer = await self._answer(asked, run.limits.wall + MARGIN_S)
        if isinstance(answer, str):
            return Ended(failure=answer)
        return _ended(answer, run, word, time.perf_counter() - begin)

    async def _answer(self, asked: dict[str, Any], limit_s: float) -> dict[str, Any] | str:
        """The service's answer, or why there is none; faults of the service are tried again, with a pause."""
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            try:
                response = await self._client.post(self._url, json=asked, timeout=limit_s)
            except httpx2.InvalidURL as error:
                return f"{self._url} is no address: {error}"
            except httpx2.HTTPError as error:
                problem = f"{self._url} cannot be reached ({type(error).__name__}: {error})"
                continue
            if response.status_code != 200:
                problem = f"{self._url} answered with status {response.status_code}"
                if response.status_code in _AGAIN:
                    continue
                return problem
            try:
                answer = response.json()
                if answer["status"] != "SandboxError" and isinstance(answer["run_result"], dict):
                    return answer["run_result"]
                problem = f"{self._url} failed to run it: {str(answer.get('message'))[:200]}"
            except (ValueError, KeyError, TypeError):
                problem = f"{self._url} answered with something that is no result of a run"
        return problem

    async def check(self) -> None:
        """`VerifierError` unless the service runs a program, now."""
        ended = await self.run(CONTROL)
        due = CONTROL_ANSWER.strip()
        if ended.failure is not None or ended.stdout.strip() != due:
            why = ended.failure or f"it printed {ended.stdout[:80]!r} where {due.decode()} was due"
            raise VerifierError(f"the remote sandbox cannot be used: {why}. Check verifier.sandbox_url")

    async def close(self) -> None:
        await self._client.aclose()


def _driver(run: Run, word: str) -> str:
    sources = {}
    for module in (values, harness):
        with open(str(module.__file__), encoding="utf-8") as file:
            sources[module.__name__.rpartition(".")[2]] = file.read()
    return _DRIVER.format(**sources, word=word, kind=run.kind, program=run.program, job=dict(run.job))


def _ended(answer: dict[str, Any], run: Run, word: str, wall_s: float) -> Ended:
    stdout, stderr = str(answer.get("stdout") or ""), str(answer.get("stderr") or "")
    status = answer.get("return_code")
    frame = None
    if run.kind != "program":
        before, found, after = stdout.rpartition(word)
        frame = after.split("\n")[0].encode("utf-8", "replace") if found else None
        stdout = before
    cap = run.limits.output_kib * 1024
    stopped = "wall" if answer.get("status") == "TimeLimitExceeded" else None
    if len(stdout) > cap:
        stopped = stopped or "output"
    return Ended(
        status=status if isinstance(status, int) else 1,
        stdout=stdout[:cap].encode("utf-8", "replace"),
        stderr=stderr[-65536:].encode("utf-8", "replace"),
        frame=frame,
        stopped=stopped,
        wall_s=wall_s,  # the service does not count processor time
    )
