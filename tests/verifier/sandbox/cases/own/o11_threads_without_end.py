# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: starts threads until there are no more, each of which never ends
# expected verdict: time_limit or runtime_error or memory_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"wall_s": 1.5}
import threading, time
started = 0
while started < 5000:
    try:
        threading.Thread(target=time.sleep, args=(60,)).start()
    except (RuntimeError, MemoryError):
        break
    started += 1
print("SBX-LEAK threads" if started >= 5000 else -1, flush=True)
