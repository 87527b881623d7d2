# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: prints the right answer and blank lines without end
# expected verdict: output_limit
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
print(int(input()) ** 2)
while True:
    print("\n" * 4096)
