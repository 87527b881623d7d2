# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: prints the right answer and sends itself a signal that ends it by default
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, signal, time
print(int(input()) ** 2, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
