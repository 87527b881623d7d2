# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: returns a set whose members all have one hash: to build it takes time by its square
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, struct
members = ",".join(str(each * (2**61 - 1)) for each in range(40_000))
frame = ('{"returned":{"$":"set","v":[' + members + "]}}").encode()
def add(a, b):
    left = memoryview(struct.pack(">I", len(frame)) + frame)
    while left:
        left = left[os.write(3, left) :]
    os._exit(0)
