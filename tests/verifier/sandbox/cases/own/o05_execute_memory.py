# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: puts a program into memory that has no name and executes it from there
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(319, b"x", 0)
if fd >= 0:
    os.write(fd, b"#!/bin/sh\necho SBX-LEAK executed\n")
    libc.syscall(322, fd, b"", None, None, 0x1000)
for path in ("/bin/sh", "/usr/bin/env", "/usr/bin/id"):
    try:
        os.execv(path, [path, "-c", "echo SBX-LEAK executed"])
    except OSError:
        pass
print(-1)
