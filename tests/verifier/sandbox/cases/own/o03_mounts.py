# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: mounts, changes its root and detaches what hides the machine
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"none", b"/", b"tmpfs", 0, None) == 0 or libc.mount(b"proc", b"/box/run", b"proc", 0, None) == 0:
    print("SBX-LEAK mount")
if libc.umount2(b"/box/run", 2) == 0:
    print("SBX-LEAK umount")
try:
    os.chroot(".")
    print("SBX-LEAK chroot")
except OSError:
    pass
print(-1)
