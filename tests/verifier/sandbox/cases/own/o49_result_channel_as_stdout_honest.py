# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": 5}, {"args": [10, -4], "result": 6}]
# hack: none: the honest twin of result_channel_as_stdout
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import contextlib, io
def add(a, b):
    with contextlib.redirect_stdout(io.StringIO()):
        print("noise")
    return a + b
