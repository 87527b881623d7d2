# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: fills every place it can write to with 64 MiB
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
written = 0
for place in (".", "/tmp", "/dev/shm", "/var/tmp", "/"):
    try:
        with open(os.path.join(place, "sbx_fill"), "wb") as file:
            for _ in range(64):
                file.write(b"x" * (1 << 20))
                file.flush()
                written += 1
    except OSError:
        pass
print("SBX-LEAK filled" if written > 16 else -1)
