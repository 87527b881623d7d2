# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: makes links to places outside and reads and writes through them
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
for number, target in enumerate(("/etc/passwd", "/", "/proc/self/root", "../../..", "/dev/sda", "/dev/vda", "/dev/mem", "/dev/kmsg")):
    try:
        os.symlink(target, f"link{number}")
    except OSError:
        pass
    for path in (f"link{number}", target):
        try:
            with open(path, "rb") as file:
                if file.read(16):
                    print("SBX-LEAK read", target)
        except OSError:
            pass
print(-1)
