# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of more_time
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"cpu_s": 0.5, "wall_s": 6}
import resource
resource.getrlimit(resource.RLIMIT_CPU)
print(int(input()) ** 2)
