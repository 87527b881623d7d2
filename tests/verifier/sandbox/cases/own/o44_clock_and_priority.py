# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: sets the clock, and takes a higher priority
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, time
for name, action in (("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0)), ("priority", lambda: os.nice(-20)),
                     ("scheduler", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))):
    try:
        action()
        print("SBX-LEAK", name)
    except OSError:
        pass
print(-1)
