# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: returns a list that holds itself, and one that grows while it is read
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
class Endless(list):
    pass
def add(a, b):
    found = Endless()
    found.append(found)
    return found
