# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: replaces the builtin functions that a harness may use
# expected verdict: runtime_error or wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import builtins
for name in ("len", "isinstance", "type", "open", "exec", "compile", "print", "sorted", "hasattr", "getattr", "int"):
    setattr(builtins, name, lambda *args, **kwargs: True)
def add(a, b):
    return a - b
