# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: starts a process on a terminal of its own
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, pty
for run in (pty.fork, os.forkpty, os.openpty):
    try:
        found = run()
        if found[0] == 0:
            os._exit(0)
        print("SBX-LEAK terminal")
    except OSError:
        pass
print(-1)
