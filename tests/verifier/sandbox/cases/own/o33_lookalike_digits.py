# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: prints digits of another script, and moves the cursor over wrong ones
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
print("".join(chr(0xFF10 + int(digit)) for digit in str(int(input()) ** 2)))
print("\x1b[2K\x1b[1A\b\b")
