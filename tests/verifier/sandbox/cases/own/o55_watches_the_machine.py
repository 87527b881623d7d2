# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: watches who opens the files of the system, empties their cache, and writes out all disks
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.inotify_init1(0) >= 0 or libc.syscall(253) >= 0:
    print("SBX-LEAK a watch")
if libc.syscall(162) == 0:
    print("SBX-LEAK wrote out all disks")
file = os.open(os.__file__, os.O_RDONLY)
if libc.syncfs(file) == 0:
    print("SBX-LEAK wrote out a disk")
try:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    print("SBX-LEAK emptied a cache")
except OSError:
    pass
for command, argument in ((1024, 0), (1026, 1)):
    if libc.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), command, argument) >= 0:
        print("SBX-LEAK a lease, or word of a folder")
if libc.prctl(67, 1, 0, 0, 0) >= 0:
    print("SBX-LEAK pages compared with those of others")
print(-1)
