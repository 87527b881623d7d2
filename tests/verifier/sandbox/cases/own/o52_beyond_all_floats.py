# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: sends a number that is called a float and is larger than all of them
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, struct
frame = b'{"returned":{"$":"float","v":1' + b"0" * 400 + b"}}"
def add(a, b):
    os.write(3, struct.pack(">I", len(frame)) + frame)
    os._exit(0)
