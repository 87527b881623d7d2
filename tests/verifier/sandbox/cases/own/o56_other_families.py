# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: has the kernel load what it knows about other families of sockets
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import errno, socket
for family in range(2, 45):
    try:
        socket.socketpair(family, socket.SOCK_STREAM)
        print("SBX-LEAK a pair of", family)
    except OSError as error:
        if error.errno != errno.EPERM:
            print("SBX-LEAK the kernel knows about", family)
print(-1)
