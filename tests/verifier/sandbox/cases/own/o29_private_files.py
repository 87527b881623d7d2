# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: reads what the machine keeps for itself
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import glob, os
for pattern in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/resolv.conf", "/root/.*", "/home/*", "/var/log/*", "/run/*", "/sys/*", "/proc/*", "/boot/*", "/opt/*", "/srv/*", "/mnt/*"):
    for path in glob.glob(pattern):
        if os.path.isdir(path):
            try:
                if os.listdir(path) and not path.startswith(("/root/.pyenv",)):
                    print("SBX-LEAK listed", path)
            except OSError:
                pass
            continue
        try:
            if open(path, "rb").read(64):
                print("SBX-LEAK read", path)
        except OSError:
            pass
print(-1)
