# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: sends a regular expression into a search that never ends, where no signal handler runs
# expected verdict: time_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"cpu_s": 0.5, "wall_s": 6}
import re
re.match(r"(a+)+$", "a" * 64 + "b")
print(int(input()) ** 2)
