# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of priority_of_others
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"processes": 4}
# only on: landlock
import os
pid = os.fork()
if pid == 0:
    os._exit(3)
_, status = os.waitpid(pid, 0)
print(int(input()) ** 2 * os.waitstatus_to_exitcode(status) // 3)
