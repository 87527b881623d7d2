"""A worker runs one program after another: nothing that one does is seen by the next."""

from __future__ import annotations

import asyncio

import pytest
from hostile import why_not

from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.runs import Run

LOOK = b"""
import os, random, stat, sys, time
found = os.stat(".")
print(os.getcwd(), os.listdir("."), os.listxattr(".") if hasattr(os, "listxattr") else "", stat.filemode(found.st_mode))
print(found.st_nlink, found.st_size, os.statvfs(".").f_bfree, os.statvfs(".").f_ffree, random.random())
with open("first", "w") as file:
    print(os.fstat(file.fileno()).st_ino, os.umask(0o22))
print(os.stat("/dev/null").st_mtime_ns, time.time_ns() - found.st_ctime_ns < 10**9, sys._getframe().f_back is not None)
frame = sys._getframe()
while frame:
    print(sorted(str(value) for name, value in frame.f_locals.items() if name == "request"))
    frame = frame.f_back
"""
TRACES = {
    "a file": b"open('left', 'w').write('x' * 5000)",
    "a file that is gone": b"import os; open('left', 'w').close(); os.remove('left')",
    "folders": b"import os; os.makedirs('a/b/c')",
    "a mode": b"import os; os.chmod('.', 0o500)",
    "an attribute": b"import os\ntry: os.setxattr('.', 'user.word', b'x')\nexcept OSError: pass",
    "times": b"import os; os.utime('.', (1, 1))",
    "a file without a name": b"import os\ntry: os.open('.', os.O_TMPFILE | os.O_RDWR)\nexcept OSError: pass",
    "a file without a name, by Python": b"import tempfile; tempfile.TemporaryFile().write(b'x' * 5000)",
    "a full folder": b"for n in range(300):\n    try: open(str(n), 'w').close()\n    except OSError: break",
    "the time of a device": b"import os\ntry: os.utime('/dev/null', (1, 1))\nexcept OSError: pass",
    "a descriptor under way": b"""
import array, fcntl, os, socket
a, b = socket.socketpair()
fds = [os.open(path, os.O_RDONLY) for path in ('.', os.__file__)]
for fd in fds:
    fcntl.flock(fd, fcntl.LOCK_EX)
try:
    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [*fds, a.fileno(), b.fileno()]))])
except OSError:
    pass
""",
    "a mask, numbers": b"import os, random; os.umask(0); random.random(); os.environ['X'] = '1'",
}


@pytest.mark.parametrize("isolation", ["namespaces"])
def test_the_next_run_finds_what_the_first_one_found(isolation):
    if (reason := why_not(isolation)) is not None:
        pytest.skip(reason)

    async def found() -> tuple[str, dict[str, str]]:
        sandbox = Workers(isolation, 1)
        try:
            first = (await sandbox.run(Run(kind="program", program=LOOK))).stdout.decode()
            after = {}
            for name, program in TRACES.items():
                left = await sandbox.run(Run(kind="program", program=program))
                assert left.status == 0 and left.failure is None, (name, left.stderr)
                after[name] = (await sandbox.run(Run(kind="program", program=LOOK))).stdout.decode()
            return first, after
        finally:
            await sandbox.close()

    first, after = asyncio.run(found())
    assert first.startswith("/box/run [] [] drwx------")
    assert after == dict.fromkeys(TRACES, first)


ENDS = {
    "exit()": (b"print(1); exit()", 0, b"1\n"),
    "quit(3)": (b"print(1); quit(3)", 3, b"1\n"),
    "a signal of its own": (
        b"import os; print(1, flush=True); os.kill(os.getpid(), 11)",
        -1,
        b"1\n",
    ),
    "abort": (b"import os; print(1, flush=True); os.abort()", -1, b"1\n"),
    "a lock": (
        b"import fcntl\nwith open('/dev/null', 'w') as f: fcntl.flock(f, 2); fcntl.lockf(f, 2)",
        0,
        b"",
    ),
    "a file as memory": (
        b"import os, errno\nfd = os.open(os.__file__, os.O_RDONLY)\n"
        b"try: os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)\nexcept PermissionError: print('no')\n"
        b"print(os.preadv(fd, [bytearray(3)], 0))",
        0,
        b"no\n3\n",
    ),
    "less time": (b"import resource; resource.setrlimit(0, (1, 1)); print(resource.getrlimit(0)[0] > 1)", 0, b"True\n"),
    "another limit": (b"import resource; resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))", 0, b""),
}


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
def test_a_program_ends_as_it_would_anywhere_and_reaches_nothing_of_others(isolation):
    if (reason := why_not(isolation)) is not None:
        pytest.skip(reason)

    async def ended() -> dict[str, tuple[int, bytes]]:
        sandbox = Workers(isolation, 1)
        try:
            runs = {name: await sandbox.run(Run(kind="program", program=how[0])) for name, how in ENDS.items()}
        finally:
            await sandbox.close()
        assert [run.failure for run in runs.values()] == [None] * len(runs)
        return {name: (max(run.status, -1), run.stdout) for name, run in runs.items()}

    found = asyncio.run(ended())
    assert found == {name: (status, stdout) for name, (_, status, stdout) in ENDS.items()}
