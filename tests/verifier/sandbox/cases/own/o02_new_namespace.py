# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: enters a user namespace of its own, where it would have every right
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
    if libc.unshare(flags) == 0:
        print("SBX-LEAK unshare", hex(flags))
print(-1)
