# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: none: the honest twin of full_disk
# expected verdict: passed
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import io
buffer = io.BytesIO(b"x" * (1 << 20))
print(int(input()) ** 2 + len(buffer.read()) - (1 << 20))
