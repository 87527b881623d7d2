# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: makes files until there are no more
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
# only on: namespaces, landlock
made = 0
for number in range(100_000):
    try:
        open(f"sbx_{number}", "x").close()
        made += 1
    except OSError:
        break
print("SBX-LEAK files" if made > 1000 else -1)
