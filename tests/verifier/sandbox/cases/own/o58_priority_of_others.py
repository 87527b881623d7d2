# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: slows what else its user runs, and leaves a process of another session
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"processes": 4}
# only on: landlock
import os
attempts = [
    lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    lambda: os.setpriority(os.PRIO_USER, 0, 19),
    lambda: os.sched_setaffinity(os.getppid(), {0}),
]
for number, attempt in enumerate(attempts):
    try:
        attempt()
        print("SBX-LEAK did", number)
    except OSError:
        pass
if os.fork() == 0:
    try:
        os.setsid()
        os.write(1, b"SBX-LEAK a session")
    except OSError:
        pass
    import time
    time.sleep(60)
print(-1)
