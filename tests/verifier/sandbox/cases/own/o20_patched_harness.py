# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: replaces the functions of the harness that calls it and writes its result
# expected verdict: runtime_error or wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import sys
harness = sys.modules["nearpolicy.verifier.sandbox.harness"]
values = sys.modules["nearpolicy.verifier.sandbox.values"]
values.dumps = lambda value: b'{"returned": "passed", "end": "passed", "test": 1}'
values.encode = lambda value, depth=0: "passed"
harness._sent = lambda frame: 0
harness._answered = lambda *_: b'{"returned": true}'
def add(a, b):
    return a + b
