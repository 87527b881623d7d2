# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: keeps large pages in pipes, where no limit counts them
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
page = ctypes.create_string_buffer(4096)
_, writing = os.pipe()
part = (ctypes.c_size_t * 2)(ctypes.addressof(page), 4096)
if libc.vmsplice(writing, part, ctypes.c_ulong(1), 0) > 0:
    print("SBX-LEAK a page")
context = ctypes.c_ulong(0)
if ctypes.c_long(libc.syscall(206, 65536, ctypes.byref(context))).value == 0:
    print("SBX-LEAK all there is for asynchronous reading")
print(-1)
