# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: raises its own limit of processor time before it computes for ever
# expected verdict: time_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"cpu_s": 0.5, "wall_s": 6}
import resource
for limit in (resource.RLIM_INFINITY, 100):
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    except (ValueError, OSError):
        pass
while True:
    pass
