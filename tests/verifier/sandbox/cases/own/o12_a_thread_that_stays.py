# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: prints the right answer and leaves a thread that never ends
# expected verdict: time_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"wall_s": 1.0}
import threading, time
print(int(input()) ** 2, flush=True)
threading.Thread(target=time.sleep, args=(60,)).start()
