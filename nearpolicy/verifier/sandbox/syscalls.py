"""The filter of system calls of a run, as a program for the kernel's packet filter (seccomp).

    another architecture -> the process is killed       clone3, calls newer than this list -> "not there"
    new processes, sockets, exec, namespaces, keys ... -> "not permitted"       all else -> allowed

A list of what is denied, not of what is allowed: an honest program that the C library changes under must not fail.
"""

from __future__ import annotations

import ctypes
import errno
import signal
import struct
from collections.abc import Iterable

from nearpolicy.verifier.sandbox import kernel

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST = 470
"""Calls from this number on are newer than this list: answered as by an old kernel."""

_DENIED = {  # name: (x86_64, aarch64); None where an architecture has no such call
    # processes and what they are
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "setsid": (112, 157), "process_mrelease": (448, 448), "setpgid": (109, 154),
    "personality": (135, 92), "setpriority": (141, 140), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30), "acct": (163, 89), "setuid": (105, 146), "setgid": (106, 144),
    "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "setgroups": (116, 159), "setfsuid": (122, 151), "setfsgid": (123, 152), "capset": (126, 91),
    # network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmmsg": (307, 269), "sendmsg": (46, 211),
    # namespaces, mounts, the machine
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "syslog": (103, 116),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "iopl": (172, None), "ioperm": (173, None),
    "vhangup": (153, 58), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "lookup_dcookie": (212, 18), "mknod": (133, None), "mknodat": (259, 33), "nfsservctl": (180, 42),
    # the machine's files, for everybody
    "sync": (162, 81), "syncfs": (306, 267), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "fadvise64": (221, 223),
    "cachestat": (451, 451),
    # what outlives a process, or is shared by name
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # wide interfaces into the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "userfaultfd": (323, 282),
    "seccomp": (317, 277), "modify_ldt": (154, None), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237), "uselib": (134, None),
    # memory that no limit counts: a pipe holds pages, and the large pages they are a part of; a table of all machines
    "vmsplice": (278, 75), "io_setup": (206, 0),
    # `open`, with its flags where a filter cannot read them
    "openat2": (437, 437),
}  # fmt: skip
_OWN_PROCESSES = {
    "execve",
    "execveat",
    "fork",
    "vfork",
    "setsid",
    "setpgid",
    "setpriority",
    "memfd_create",
    "sched_setaffinity",
}
"""Allowed where a task may start processes: compilers, shells."""
_ON_OTHERS = {"setsid", "setpgid", "setpriority", "sched_setaffinity"}
"""Of those, what reaches, or escapes, processes beyond the run, where it has no namespace of its own."""
_ON_FILES = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45),
}  # fmt: skip
"""What Landlock lets everybody do to files that are theirs, wherever they lie."""
_OF_WORKERS = {"mount", "umount2", "sendmsg", "capset", "landlock_restrict_self", "pidfd_send_signal", "seccomp"}
"""What a worker does between two runs, or for one, and a run may not."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRCTL = {"x86_64": 157, "aarch64": 167}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_SIGNAL = {"x86_64": (62, 234, 129, 297), "aarch64": (129, 131, 138, 240)}
"""kill, tgkill and their forms that carry a value: the process comes first."""
_TKILL = {"x86_64": 200, "aarch64": 130}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FCNTL = {"x86_64": 72, "aarch64": 25}
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
"""Who is signalled, and how, when something can be read."""
_FLOCK = {"x86_64": 73, "aarch64": 32}
_F_SETLK, _F_SETLKW, _F_OFD_SETLK, _F_OFD_SETLKW = 6, 7, 37, 38
_PREADV2 = {"x86_64": (327, 328), "aarch64": (286, 287)}
_SETRLIMIT = {"x86_64": 160, "aarch64": 164}
_RLIMIT_CPU = 0
_FATAL = (signal.SIGKILL, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV,
          16, signal.SIGSYS)  # fmt: skip
"""What ends a process as a rule, and process 1 of a namespace not, if it sends it to itself."""
_F_SETLEASE, _F_NOTIFY = 1024, 1026
"""Makes others wait for a file; tells what they do in a folder."""
_OF_FILE_SYSTEMS = (0x6600, 0x5800, 0x9400)
"""Families of ioctl that change a file, by its owner, through a descriptor that may only read it."""
_OPEN = {"x86_64": ((2, 24), (257, 32)), "aarch64": ((56, 32),)}
"""`open` and `openat`: number, and where its flags are found."""
_O_TMPFILE = 0o20000000
"""A file without a name changes nothing in its folder but the number of the next one: a word to the next run."""
_AF_UNIX = 1
_SOCK_STREAM, _SOCK_TYPE = 1, 0xF
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020080
_PR_SET_DUMPABLE, _PR_SET_MM, _PR_SET_SECCOMP = 4, 35, 22
_PR_SCHED_CORE, _PR_SET_MEMORY_MERGE = 62, 67
"""Keep others off a core; compare pages with those of others."""

_PRCTL_DENIED = (_PR_SET_DUMPABLE, _PR_SET_MM, _PR_SET_SECCOMP, _PR_SCHED_CORE, _PR_SET_MEMORY_MERGE)

_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_DENY = 0x00050000 | errno.EPERM
_PRETEND = 0x00050000
"""Nothing is done, and the call reports success."""
_NOT_THERE = 0x00050000 | errno.ENOSYS

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NUMBER, _ARCH, _FIRST, _SECOND, _THIRD, _SIXTH = 0, 4, 16, 24, 32, 56
"""Offsets of the call's number, the architecture and the low halves of its arguments in what a filter sees."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


class Filter:
    """A filter that is built once and applied to the process that calls `apply`, for good."""

    def __init__(self, code: bytes) -> None:
        self._code = code
        self.apply = kernel.filtering(_Program(len(code) // 8, code))


def of_worker() -> Filter:
    """What a worker needs as little as its runs. It is long, and the kernel takes time over it: once, this way."""
    machine = _known()
    return Filter(_assembled([*_refused(_DENIED.keys() - _OF_WORKERS - _OWN_PROCESSES), *_arguments(machine)]))


def of_run(*, processes: bool, own_space: bool, only_signals_to: int | None = None) -> Filter:
    """The rest, for a run; on top of `of_worker`.

    processes: whether new ones may be started. own_space: whether it is in namespaces of its own. only_signals_to: the
    one process that may be signalled, where nothing else keeps processes apart. Process 1 of a namespace is deaf to a
    SIGKILL of its own; here it ends by it, as it would anywhere else.
    """
    machine = _known()
    names = _OF_WORKERS | (set() if processes else _OWN_PROCESSES)
    if not own_space:
        names |= _ON_OTHERS | _ON_FILES.keys()
    code = [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _NOT_THERE), *_refused(names)]
    may_clone = (_ANY_BIT, 0, 1, _CLONE_NAMESPACES) if processes else (_ANY_BIT, 1, 0, _CLONE_THREAD)
    code += _where(_CLONE[machine], [(_LOAD, 0, 0, _FIRST), may_clone, (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)])
    code += _unless(_PRCTL[machine], _FIRST, _PRCTL_DENIED)
    # Its limit of processor time stays as it is, whatever it is told: who dies of a lower one looks like one that was
    # felled from outside.
    own = [(_LOAD, 0, 0, _FIRST), (_EQUAL, 0, 1, _RLIMIT_CPU), (_RETURN, 0, 0, _PRETEND), (_RETURN, 0, 0, _ALLOW)]
    code += _where(_SETRLIMIT[machine], own)
    asked = [(_LOAD, 0, 0, _THIRD), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _PRETEND), (_RETURN, 0, 0, _ALLOW)]
    of_time = [(_LOAD, 0, 0, _SECOND), (_EQUAL, 0, len(asked), _RLIMIT_CPU), *asked, (_RETURN, 0, 0, _ALLOW)]
    code += _where(_PRLIMIT[machine], of_time)
    if not processes:
        # A lock on a file of the machine is seen by all runs. A single process needs none: it gets what it asks for.
        code += _where(_FLOCK[machine], [(_RETURN, 0, 0, _PRETEND)])
        locks = (_F_SETLK, _F_SETLKW, _F_OFD_SETLK, _F_OFD_SETLKW)
        tests = [step for each in locks for step in ((_EQUAL, 0, 1, each), (_RETURN, 0, 0, _PRETEND))]
        # Without a return of what is allowed: more is asked about it below.
        code += [*_where(_FCNTL[machine], [(_LOAD, 0, 0, _SECOND), *tests]), (_LOAD, 0, 0, _NUMBER)]
    if not own_space:
        denied = [step for each in _OF_FILE_SYSTEMS for step in ((_EQUAL, 0, 1, each), (_RETURN, 0, 0, _DENY))]
        test = [(_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xFF00), *denied]
        # Without a return of what is allowed: more is asked about it below.
        code += [*_where(_IOCTL[machine], test), (_LOAD, 0, 0, _NUMBER)]
    if only_signals_to is None:
        for number in _SIGNAL[machine][:2]:
            code += _where(number, _ends_if_first(number == _SIGNAL[machine][0]))
    else:
        for number in _SIGNAL[machine]:
            code += _only(number, _FIRST, only_signals_to)
        code += _unless(_FCNTL[machine], _SECOND, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX))
        code += _unless(_IOCTL[machine], _SECOND, (_FIOSETOWN, _SIOCSPGRP))
        code += _where(_TKILL[machine], [(_RETURN, 0, 0, _DENY)])
    return Filter(_assembled(code))


def supported() -> bool:
    return kernel.MACHINE in _ARCHITECTURE


def _known() -> str:
    if kernel.MACHINE not in _ARCHITECTURE:
        raise OSError(f"there is no list of system calls for the architecture {kernel.MACHINE}")
    return kernel.MACHINE


_Step = tuple[int, int, int, int]
"""Code, where to jump if true and if false, argument."""


def _assembled(code: list[_Step]) -> bytes:
    start: list[_Step] = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[kernel.MACHINE]), (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _NEWEST), (_RETURN, 0, 0, _NOT_THERE),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *step) for step in [*start, *code, (_RETURN, 0, 0, _ALLOW)])


def _refused(names: Iterable[str]) -> list[_Step]:
    column = 0 if kernel.MACHINE == "x86_64" else 1
    numbers = sorted(n for name in names if (n := (_DENIED | _ON_FILES)[name][column]) is not None)
    return [step for number in numbers for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY))]


def _arguments(machine: str) -> list[_Step]:
    """Calls that are denied with some arguments only."""
    code = _unless(_IOCTL[machine], _SECOND, (_TIOCSTI, _TIOCLINUX))
    for number, flags in _OPEN[machine]:
        nameless = [(_LOAD, 0, 0, flags), (_ANY_BIT, 0, 1, _O_TMPFILE), (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
        code += _where(number, nameless)
    code += _unless(_FCNTL[machine], _SECOND, (_F_SETLEASE, _F_NOTIFY))
    code += _only(_PRLIMIT[machine], _FIRST, 0)
    for number in _PREADV2[machine]:  # its flags can ask what is in memory: which files others have read
        code += _only(number, _SIXTH, 0)
    # A pair of datagram sockets could send to an address; a pair of streams is what event loops wake themselves with.
    # Of another family it would be none, but have the kernel load what it knows about that family.
    stream = _only(_SOCKETPAIR[machine], _SECOND, _SOCK_STREAM, mask=_SOCK_TYPE)[1:]
    local = [(_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _DENY)]
    return code + _where(_SOCKETPAIR[machine], [*local, *stream])


def _where(number: int, then: list[_Step]) -> list[_Step]:
    """``then``, which ends in a return, if the call has this number."""
    return [(_EQUAL, 0, len(then), number), *then]


def _ends_if_first(plain: bool) -> list[_Step]:
    """kill(1, SIGKILL), or tgkill(1, _, SIGKILL), ends the caller; so does any other of `_FATAL`."""
    # Which of them: each test jumps over those behind it and the return, to the question who is meant.
    fatal = [(_EQUAL, len(_FATAL) - place, 0, number) for place, number in enumerate(_FATAL)]
    return [
        (_LOAD, 0, 0, _SECOND if plain else _THIRD), *fatal, (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST), (_EQUAL, 0, 1, 1), (_RETURN, 0, 0, _KILL_PROCESS), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip


def _unless(number: int, argument: int, denied: tuple[int, ...]) -> list[_Step]:
    """This call is denied if its argument is one of these."""
    tests = [step for each in denied for step in ((_EQUAL, 0, 1, each), (_RETURN, 0, 0, _DENY))]
    return _where(number, [(_LOAD, 0, 0, argument), *tests, (_RETURN, 0, 0, _ALLOW)])


def _only(number: int, argument: int, allowed: int, mask: int = 0xFFFFFFFF) -> list[_Step]:
    """This call is denied unless its argument is this one."""
    test = [(_AND, 0, 0, mask), (_EQUAL, 1, 0, allowed), (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
    return _where(number, [(_LOAD, 0, 0, argument), *test])
