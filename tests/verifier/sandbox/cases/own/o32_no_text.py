# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: prints bytes that are no text, among them the right answer
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import sys
sys.stdout.buffer.write(b"\xff\x00" + str(int(input()) ** 2).encode() + b"\n")
