# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: announces a result of 4 GiB and begins to send it
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
def add(a, b):
    os.write(3, b"\xff\xff\xff\xff" + b"[" * 60000)
    os._exit(0)
