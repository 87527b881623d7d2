# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: computes a power that fits into no machine, in one operation
# expected verdict: time_limit or memory_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"cpu_s": 0.7, "wall_s": 6}
x = 9 ** 9
print(x ** x)
