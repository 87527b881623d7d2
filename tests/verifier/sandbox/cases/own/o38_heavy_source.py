# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: is a program that takes for ever to read
# expected verdict: runtime_error or memory_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
source = "x = " + "(" * 50 + "1" + ")" * 50 + "\n"
exec("a = " + "[" * 5000 + "]" * 5000)
