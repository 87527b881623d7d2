# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: writes 64 MiB to stderr before the right answer
# expected verdict: output_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
n = int(input())
for _ in range(1024):
    os.write(2, b"x" * 65536)
print(n * n)
