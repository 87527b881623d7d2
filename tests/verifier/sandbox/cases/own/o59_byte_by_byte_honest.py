# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of byte_by_byte
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"cpu_s": 1, "wall_s": 2}
import os
n = int(input())
for digit in str(n * n):
    os.write(1, digit.encode())
