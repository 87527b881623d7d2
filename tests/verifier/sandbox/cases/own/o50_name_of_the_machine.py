# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: finds out on which machine it runs
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
# only on: namespaces, bubblewrap
import os, socket
name = os.uname().nodename
if name not in ("sandbox", "localhost", "(none)") or socket.gethostname() != name:
    print("SBX-LEAK name")
print(-1)
