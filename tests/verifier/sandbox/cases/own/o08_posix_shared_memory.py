# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: leaves a named segment of POSIX shared memory
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
from multiprocessing import shared_memory
try:
    shared_memory.SharedMemory("sbx_probe", create=True, size=4096)
    print("SBX-LEAK segment")
except OSError:
    pass
print(-1)
