# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: puts the result channel in the place of stdout and prints into it
# expected verdict: runtime_error or wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os
os.dup2(3, 1)
def add(a, b):
    print('{"returned": 5}', flush=True)
    return a - b
