# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of memory_in_pipes
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
reading, writing = os.pipe()
os.write(writing, b"x" * 4096)
os.sendfile(writing, os.open(os.__file__, os.O_RDONLY), 0, 10)
print(int(input()) ** 2 * len(os.read(reading, 4096)) // 4096)
