# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: raises what ends a program from inside the function
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
def add(a, b):
    if a == 2:
        return 5
    raise KeyboardInterrupt
