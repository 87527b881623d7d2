# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of name_of_the_machine
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
# only on: namespaces, bubblewrap
import os
os.uname().sysname
print(int(input()) ** 2)
