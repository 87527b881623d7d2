# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: attaches to its parents as a debugger and reads their memory by call
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
for pid in {os.getppid(), 1, os.getpid() - 1, os.getpid() - 2}:
    if pid <= 0 or pid == os.getpid():
        continue
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("SBX-LEAK ptrace", pid)
    buffer = ctypes.create_string_buffer(64)
    mine, theirs = Vector(ctypes.addressof(buffer), 64), Vector(0x400000, 64)
    if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
        print("SBX-LEAK memory of", pid)
print(-1)
