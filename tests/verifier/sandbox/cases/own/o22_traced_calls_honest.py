# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: none: the honest twin of traced_calls
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import sys
calls = []
sys.settrace(lambda frame, event, argument: calls.append(event))
def add(a, b):
    sys.settrace(None)
    return a + b
