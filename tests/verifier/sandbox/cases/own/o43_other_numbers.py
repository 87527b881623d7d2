# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: asks for calls by numbers with the mark of another convention, and by ones that are not given out yet
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (0x40000000 | 57, 0x40000000 | 41, 1000, 100_000, 471):
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0:
        print("SBX-LEAK call", number)
print(-1)
