# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: has a pair of sockets, and sends from one of them to an abstract address of the machine
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import socket
won = False
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
    try:
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        one.sendto(b"hello", "\0sbx-listener")
        won = True
    except OSError:
        pass
print("SBX-LEAK sent" if won else -1)
