# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: looks for secrets in the environment behind Python's back
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
for name in (b"SBX_SECRET_CANARY", b"OPENAI_API_KEY", b"HF_TOKEN", b"AWS_SECRET_ACCESS_KEY", b"PYTHONPATH"):
    if libc.getenv(name):
        print("SBX-LEAK", name)
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
index = 0
while environ[index]:
    if b"CANARY" in environ[index]:
        print("SBX-LEAK", environ[index])
    index += 1
print(-1)
