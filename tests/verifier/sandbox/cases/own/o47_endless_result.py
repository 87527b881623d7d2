# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: returns a generator, and a string of 100 MB
# expected verdict: output_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
def add(a, b):
    return "x" * 100_000_000
