# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of files_of_others
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
# only on: landlock
import os, stat
found = stat.S_ISREG(os.stat(os.__file__).st_mode)
print(int(input()) ** 2 * found)
