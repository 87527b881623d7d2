"""Processes that wait to be the ranks of a learner: they load torch and transformers once for all tests.

    pool.run(2, function, *arguments)    in each of two processes: join, function(ranks, *arguments), leave

``function`` is one of a module that the processes can import; arguments and results are pickled. An exception comes
back as the result (`Raised`), so that a test can look at those of all ranks.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
"""Bound on the wait for a process; far beyond what anything here takes."""


@dataclass(frozen=True)
class Raised:
    """What a rank has raised instead of giving a result."""

    kind: str
    text: str


class RankPool:
    """Starts processes when they are first needed."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=self._key)
        self._listener._listener._socket.settimeout(2 * TIMEOUT_S)  # for a process that cannot start
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Results by rank. ``timeout_s``: of one rank for another."""
        found = self.run_each(size, function, [arguments] * size, timeout_s=timeout_s)
        for rank, result in enumerate(found):
            if isinstance(result, Raised):
                raise AssertionError(f"rank {rank}: {result.kind}: {result.text}")
        return found

    def run_each(
        self,
        size: int,
        function: Callable[..., Any],
        arguments: Sequence[Sequence[Any]],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Any]:
        """With arguments, results and exceptions (`Raised`) by rank."""
        self._start(size - len(self._processes))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for rank in range(size):
            self._connections[rank].send_bytes(
                pickle.dumps((rank, size, address, timeout_s, function, tuple(arguments[rank])))
            )
        return [self._answer(rank, timeout_s) for rank in reversed(range(size))][::-1]

    def _answer(self, rank: int, timeout_s: float) -> Any:
        """Of the last rank first: one that has died leaves the list."""
        if not self._connections[rank].poll(2 * timeout_s + TIMEOUT_S):
            self.close()
            raise AssertionError(f"rank {rank} gave no answer")
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            self._processes.pop(rank).wait()
            self._connections.pop(rank)
            return Raised("EOFError", "the process is gone")

    def _start(self, count: int) -> None:
        """At the same time: each takes seconds to load torch."""
        host, port = self._listener.address
        own = dict(os.environ, OMP_NUM_THREADS="1", POOL_KEY=self._key.hex(), PYTHONPATH=os.pathsep.join(sys.path))
        command = [sys.executable, str(Path(__file__)), host, str(port)]
        started = {process.pid: process for process in (subprocess.Popen(command, env=own) for _ in range(count))}
        for _ in range(count):
            connection = self._listener.accept()
            self._connections.append(connection)
            self._processes.append(started[connection.recv()])

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._listener.close()
        self._processes, self._connections = [], []


def _serve(host: str, port: int) -> None:
    import torch

    from nearpolicy.launch.inline import settle
    from nearpolicy.learner.parallel import join, leave

    settle(1)
    connection = Client((host, port), authkey=bytes.fromhex(os.environ["POOL_KEY"]))
    connection.send(os.getpid())
    while True:
        try:
            rank, size, address, timeout_s, function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            ranks = join(rank, size, address, timeout_s, torch.device("cpu"))
            result = function(ranks, *arguments)
        except Exception as error:
            result = Raised(type(error).__name__, str(error))
        finally:
            leave()
        connection.send_bytes(pickle.dumps(result))


if __name__ == "__main__":
    from rank_pool import _serve  # by its name, under which what it sends is read

    _serve(sys.argv[1], int(sys.argv[2]))
