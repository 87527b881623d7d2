# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: sends a result that is nested 100,000 deep
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, struct
def add(a, b):
    text = b"[" * 100000 + b"]" * 100000
    for start in range(0, 200004, 4096):
        os.write(3, (struct.pack(">I", 200000) + text)[start : start + 4096])
    os._exit(0)
