# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: changes what Landlock lets everybody change: rights, times and attributes of files that are theirs
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
# only on: landlock
import errno, fcntl, os
gone = "/no-such-folder/file"
attempts = [
    lambda: os.chmod(gone, 0o777), lambda: os.chown(gone, -1, -1), lambda: os.utime(gone), lambda: os.truncate(gone, 0),
    lambda: os.setxattr(gone, "user.x", b"1"), lambda: os.removexattr(gone, "user.x"),
]
for number, attempt in enumerate(attempts):
    try:
        attempt()
    except OSError as error:
        if error.errno != errno.EPERM:
            print("SBX-LEAK allowed where there is a file", number)
try:
    fcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x80086601, b"        ")
    print("SBX-LEAK the attributes of a file")
except OSError as error:
    if error.errno != errno.EPERM:
        print("SBX-LEAK asked the file system", error.errno)
print(-1)
