# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of stops_itself
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"wall_s": 1.0}
import os, signal
os.kill(os.getpid(), signal.SIGCONT)
print(int(input()) ** 2)
