# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: closes every descriptor before it returns
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
os.closerange(0, 256)
def add(a, b):
    return a + b
