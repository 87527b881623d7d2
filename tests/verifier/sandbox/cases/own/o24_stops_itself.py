# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: stops itself after the right answer, so that nobody sees it end
# expected verdict: time_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"wall_s": 1.0}
import os, signal, time
print(-1, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(30)
