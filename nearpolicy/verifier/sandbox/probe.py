"""A sandbox is checked, not believed: it is given a program that tries to get out, and what came of it is seen here.

a canary in a file, in this process's environment and memory; a listener on TCP, on UDP and on an abstract address;
this process to signal; folders to write to
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nearpolicy.verifier.sandbox.runs import Limits, Run, Sandbox

_ATTACK = r"""
import json, os, signal, socket, sys
told = json.loads(sys.stdin.read())
won = []
def attempt(name, action):
    try:
        if action():
            won.append(name)
    except BaseException:
        pass
def read(path):
    with open(path, "rb") as file:
        return told["canary"].encode()[:8] in file.read(1 << 20)
def listed(path):
    return bool(os.listdir(path))
def wrote(folder):
    path = os.path.join(folder, told["marker"])
    with open(path, "w") as file:
        file.write("left by the check of the sandbox")
    return True
def connected(kind, address, family=socket.AF_INET):
    link = socket.socket(family, kind)
    link.settimeout(0.5)
    link.connect(address)
    link.send(b"x")
    return kind == socket.SOCK_STREAM
def forked():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True
for root in ("", "/packages"):
    attempt("read a file of this machine", lambda: read(root + told["file"]))
    attempt("list a folder of this machine", lambda: listed(root + os.path.dirname(told["file"])))
for pid in (told["pid"], os.getppid(), 1):
    if pid not in (0, os.getpid()):
        attempt("read the environment of another process", lambda: bool(open(f"/proc/{pid}/environ", "rb").read()))
        attempt("read the command line of another process", lambda: bool(open(f"/proc/{pid}/cmdline", "rb").read()))
        attempt("open the memory of another process", lambda: bool(open(f"/proc/{pid}/mem", "rb")))
        attempt("signal another process", lambda: os.kill(pid, 0) is None)
attempt("connect to a TCP port", lambda: connected(socket.SOCK_STREAM, ("127.0.0.1", told["port"])))
attempt("send to a UDP port", lambda: connected(socket.SOCK_DGRAM, ("127.0.0.1", told["port"])))
attempt("connect to an abstract address", lambda: connected(socket.SOCK_STREAM, told["abstract"], socket.AF_UNIX))
attempt("start a process", forked)
attempt("become another user", lambda: os.setuid(0) is None)
for folder in told["folders"]:
    attempt("write outside its folder", lambda: wrote(folder))
print(json.dumps(won))
"""


async def escapes(sandbox: Sandbox, *, packages: bool = False) -> list[str] | str:
    """What a hostile program got done, in words; or why none can run there. ``packages``: where there are packages too,
    whose folders are let in."""
    won: set[str] = set()
    for each in (False, True) if packages else (False,):
        canary, marker = "NP-CANARY-" + secrets.token_hex(8), "np-probe-" + secrets.token_hex(8)
        try:
            found = await _attacked(sandbox, canary, marker, packages=each)
        except OSError as error:
            return f"it cannot be checked, which needs a folder for temporary files and the loopback network: {error}"
        if isinstance(found, str):
            return found
        won |= set(found)
    return sorted(won)


async def _attacked(sandbox: Sandbox, canary: str, marker: str, *, packages: bool) -> list[str] | str:
    with _bait(canary, marker) as told:
        run = Run(
            kind="program", program=_ATTACK.encode(), stdin=json.dumps(told).encode(), limits=Limits(cpu_s=5),
            packages=packages,
        )  # fmt: skip
        ended = await sandbox.run(run)
        if ended.failure is not None or ended.status != 0 or ended.stopped is not None:
            why = ended.failure or ended.stderr.decode(errors="replace").strip()[-200:] or f"status {ended.status}"
            return f"no program can run{' that imports verifier.packages' if packages else ''}: {why}"
        won = set(json.loads(ended.stdout))
        seen = {f"left a file in {folder}" for folder in told["folders"] if _remove(Path(folder, marker))}
    return sorted((won - {"write outside its folder"}) | seen)


@contextlib.contextmanager
def _bait(canary: str, marker: str) -> Iterator[dict]:
    abstract = "nearpolicy-" + secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(prefix="nearpolicy-probe-", ignore_cleanup_errors=True) as folder,
        socket.socket() as tcp,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        file = Path(folder, "canary.txt")
        file.write_text(canary)
        os.chmod(folder, 0o755)  # walls must keep a run out, not that it may be another user
        file.chmod(0o644)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = tcp.getsockname()[1]
        with contextlib.suppress(OSError):
            udp.bind(("127.0.0.1", port))
        local.bind("\0" + abstract)
        local.listen()
        home = os.path.expanduser("~")
        folders = [folder, "/", "/tmp", "/var/tmp", "/dev/shm", os.path.dirname(os.__file__), home, "/usr"]
        yield {
            "canary": canary, "marker": marker, "file": str(file), "port": port, "abstract": "\0" + abstract,
            "pid": os.getpid(), "folders": folders,
        }  # fmt: skip


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
