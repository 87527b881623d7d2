# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of more_memory
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: {"memory_mib": 256}
held = [bytearray(1 << 20) for _ in range(64)]
print(int(input()) ** 2)
