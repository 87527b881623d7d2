# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: has a shell answer for it
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import os, subprocess
for run in (lambda: subprocess.run(["/bin/sh", "-c", "echo SBX-LEAK shell"]), lambda: os.system("echo SBX-LEAK system"),
            lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "echo SBX-LEAK spawn"], {}), lambda: os.popen("echo SBX-LEAK popen").read()):
    try:
        run()
    except (OSError, subprocess.SubprocessError):
        pass
print(-1)
