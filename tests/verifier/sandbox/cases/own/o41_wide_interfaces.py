# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: asks for the widest interfaces of the kernel: io_uring, BPF, userfaultfd, perf
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(256)
for number in (425, 321, 323, 298, 311, 246, 175, 447, 250, 135):
    if number != 135 and libc.syscall(number, 8, buffer, 0, 0, 0) >= 0:
        print("SBX-LEAK call", number)
if libc.syscall(135, 0x0040000) >= 0:
    print("SBX-LEAK personality")
print(-1)
