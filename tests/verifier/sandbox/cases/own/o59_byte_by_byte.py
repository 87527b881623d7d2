# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: writes single bytes, each a message of its own, to keep the judge busy
# expected verdict: time_limit or output_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"cpu_s": 1, "wall_s": 2}
import fcntl, os
fcntl.fcntl(2, fcntl.F_SETFL, os.O_DIRECT)
while True:
    os.write(2, b"x")
