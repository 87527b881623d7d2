# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: hooks into the calls around it and looks there for what is expected
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import sys, threading
seen = []
def look(frame, event, argument):
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and ("result" in value or "expected" in value):
            seen.append(value)
    return look
sys.settrace(look)
sys.setprofile(look)
threading.settrace(look)
def add(a, b):
    return seen[0].get("result", seen[0].get("expected")) if seen else -1
