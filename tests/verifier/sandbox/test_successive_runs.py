"""A worker runs one program after another: nothing that one does is seen by the next."""

from __future__ import annotations

import asyncio
import time

import pytest
from hostile import why_not

from nearpolicy.verifier.sandbox import kernel
from nearpolicy.verifier.sandbox.pool import Workers
from nearpolicy.verifier.sandbox.runs import Run

LOOK = b"""
import os, random, stat
found = os.stat(".")
print(os.getcwd(), os.listdir("."), os.listxattr(".") if hasattr(os, "listxattr") else "", stat.filemode(found.st_mode))
print(found.st_nlink, found.st_size, os.statvfs(".").f_bfree, os.statvfs(".").f_ffree, random.random())
with open("first", "w") as file:
    print(os.fstat(file.fileno()).st_ino, os.umask(0o22))
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
    "a mask, numbers": b"import os, random; os.umask(0); random.random(); os.environ['X'] = '1'",
}


async def ticks(count: int) -> None:
    """Of the clock that files are stamped by."""
    for _ in range(count):
        now = time.clock_gettime_ns(kernel.CLOCK_REALTIME_COARSE)
        while time.clock_gettime_ns(kernel.CLOCK_REALTIME_COARSE) == now:
            await asyncio.sleep(0)


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
                await ticks(2)  # else the folder is made anew because it is as young as the run
                left = await sandbox.run(Run(kind="program", program=program))
                assert left.status == 0 and left.failure is None, (name, left.stderr)
                after[name] = (await sandbox.run(Run(kind="program", program=LOOK))).stdout.decode()
            return first, after
        finally:
            await sandbox.close()

    first, after = asyncio.run(found())
    assert first.startswith("/box/run [] [] drwx------")
    assert after == dict.fromkeys(TRACES, first)
