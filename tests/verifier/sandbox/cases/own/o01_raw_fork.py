# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: asks the kernel for a new process by number, past every function of Python
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for call, arguments in ((57, ()), (58, ()), (56, (17, 0, 0, 0, 0)), (220, (17, 0, 0, 0, 0))):
    pid = libc.syscall(call, *arguments)
    if pid == 0 and call != 220:
        os._exit(0)
    if pid > 0 and call != 220:
        print("SBX-LEAK forked", call)
print(-1)
