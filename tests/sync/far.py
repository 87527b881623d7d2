"""Other processes for tests of transports: each is started once, and runs functions that it is sent.

far = Far()
answer = far.ask(function, *arguments)   # runs there at once
answer.result(timeout=...)
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cloudpickle

ANSWER_S = 60.0


class Far:
    """One helper process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._open: list[Future[Any]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a function there, after those that were sent before."""
        answer: Future[Any] = Future()
        with self._lock:
            self._open.append(answer)
            _write(self._process.stdin, cloudpickle.dumps((function, arguments)))
        return answer

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.ask(function, *arguments).result(ANSWER_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """It has nothing to put in order."""
        self.kill()

    def _listen(self) -> None:
        while (message := _read(self._process.stdout)) is not None:
            ok, value = cloudpickle.loads(message)
            answer = self._open.pop(0)
            answer.set_result(value) if ok else answer.set_exception(value)
        for answer in self._open:
            answer.set_exception(ConnectionError("the helper has ended"))


def _write(stream: Any, message: bytes) -> None:
    stream.write(struct.pack("<q", len(message)) + message)
    stream.flush()


def _read(stream: Any) -> bytes | None:
    size = stream.read(8)
    return stream.read(struct.unpack("<q", size)[0]) if len(size) == 8 else None


def main(parent: int) -> None:
    from nearpolicy.machine import die_with, prepare_environment

    die_with(parent)
    prepare_environment()
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print does not come between answers
    while (message := _read(asked)) is not None:
        try:
            function, arguments = cloudpickle.loads(message)
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, error)
        try:
            _write(answers, cloudpickle.dumps(answer))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
