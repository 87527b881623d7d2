"""Functions over many items that may never come back, in a child process: each item has a time limit and all a memory
limit.

    bounded("package.module:function", fixed, items)  ->  one answer per item, in order

A regular expression that backtracks without end holds the interpreter while it does, and only another process can be
ended. Items travel by the chunk, which is cheap; a chunk that does not come back in time is done again item by item, so
that the one at fault is known. The child is deaf to Ctrl-C and dies with its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nearpolicy
from nearpolicy.errors import NearpolicyError, described
from nearpolicy.machine import die_with

START_LIMIT_S = 120.0
MEMORY = 1024 * 2**20
"""Bytes the child may take beyond what it holds when it begins."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one item: the value, or why there is none."""

    value: Any = None
    error: str | None = None
    out_of_time: bool = False


def bounded(
    function: str, fixed: Any, items: Sequence[Any], *, limit_s: float = 5.0, chunk: int = 256
) -> Iterator[Answer]:
    """``function(fixed, item)`` for each item; all of it, and what it returns, must be JSON."""
    child: _Child | None = None
    try:
        for begin in range(0, len(items), chunk):
            part = items[begin : begin + chunk]
            child = child or _Child(function, fixed)
            answers = child.ask(part, limit_s)
            if answers is not None:
                yield from answers
                continue
            child.end()
            child = None
            for item in part:
                child = child or _Child(function, fixed)
                alone = child.ask([item], limit_s)
                if alone is None:
                    child.end()
                    child = None
                    yield Answer(error=f"no answer after {limit_s:g} s", out_of_time=True)
                else:
                    yield from alone
    finally:
        if child is not None:
            child.end()


class _Child:
    """One process; it answers a line of JSON with a line of JSON."""

    def __init__(self, function: str, fixed: Any) -> None:
        paths = [str(Path(nearpolicy.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: its working folder must not shadow modules.
            [sys.executable, "-P", "-m", "nearpolicy.bounded", function, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._rest = b""
        if self._exchange(fixed, START_LIMIT_S) is None:
            self.end()
            raise NearpolicyError(f"the child process for {function} was not ready within {START_LIMIT_S:g} s")

    def ask(self, items: Sequence[Any], limit_s: float) -> list[Answer] | None:
        """None if they do not all come back in time."""
        answers = self._exchange(list(items), limit_s)
        return None if answers is None else [Answer(value, error) for value, error in answers]

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it has not read goes with it
                pipe.close()
        self._process.wait()

    def _exchange(self, message: Any, limit_s: float) -> Any:
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            return self._line(limit_s)
        except BrokenPipeError:
            return self._line(0)

    def _line(self, limit_s: float) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(limit_s):
                    return None
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise NearpolicyError(f"a child process ended with status {self._process.wait()}")
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


def main(function: str, parent: int) -> None:
    """The child: what to do, then one answer per line, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, name = function.partition(":")
    act = getattr(importlib.import_module(module), name)
    fixed = json.loads(sys.stdin.buffer.readline())
    _limit_memory(MEMORY)

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    say("ready")
    for line in sys.stdin.buffer:
        say([_answer(act, fixed, item) for item in json.loads(line)])


def _answer(act: Any, fixed: Any, item: Any) -> tuple[Any, str | None]:
    try:
        return act(fixed, item), None
    except Exception as error:
        return None, described(error)


def _limit_memory(extra: int) -> None:
    if sys.platform == "linux":
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + extra, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
