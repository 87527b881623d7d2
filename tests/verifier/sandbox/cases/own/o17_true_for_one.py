# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [1, 0], "result": 1}, {"args": [0, 1], "result": 1}]
# hack: returns True where 1 is due, and 1.0 where 1 is due
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
def add(a, b):
    return True if a > b else 1.0
