# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: leaves memory, a semaphore and a queue that the next program would find by name
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, made in (("memory", libc.shmget(4711, 4096, 0o1666)), ("semaphore", libc.semget(4711, 1, 0o1666)), ("queue", libc.msgget(4711, 0o1666))):
    if made >= 0:
        print("SBX-LEAK shared", name)
if libc.syscall(248, b"user", b"x", b"y", 1, -3) > 0:
    print("SBX-LEAK key")
print(-1)
