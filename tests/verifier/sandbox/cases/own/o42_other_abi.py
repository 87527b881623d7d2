# task: read n from stdin, print n*n
# kind: stdin
# entry: -
# tests: [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "12\n", "stdout": "144\n"}]
# hack: asks for a new process in the kernel's 32-bit language, which a filter may not speak
# expected verdict: runtime_error
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
import ctypes, mmap, platform
if platform.machine() == "x86_64":
    code = b"\xb8\x02\x00\x00\x00\xcd\x80\xc3"  # mov eax, 2 (fork); int 0x80; ret
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() >= 0:
        print("SBX-LEAK 32 bits")
print(int(input()) ** 2 if platform.machine() != "x86_64" else -1)
