# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: prints the right answer and ends by a signal that a first process would not hear
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, signal
print(int(input()) ** 2, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGTERM)
signal.alarm(1)
signal.pause()
