"""System calls that Python has no function for; the standard library alone is used, because the sandbox loads this too.

Every function raises `OSError` with the name of the call. Numbers of calls that came after 2019 are the same on every
architecture.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_PIDFD = 0x00001000

MS_NOSUID, MS_NODEV, MS_NOATIME = 2, 4, 1024
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
READ_ANY_FILE = 1 << 2
"""CAP_DAC_READ_SEARCH."""
SECCOMP_MODE_FILTER = 2

MACHINE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE, -1)
_CLONE3, _CLOSE_RANGE, _MOUNT_SETATTR = 435, 436, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
# Without releasing the lock of the interpreter: the copy of this process must find it held by its only thread.
_holding = ctypes.PyDLL(None, use_errno=True)


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


class Call:
    """A call whose arguments are ready: the copy of a process pays for every page that it touches."""

    def __init__(self, name: str, function: Any, *arguments: Any) -> None:
        self._name, self._function, self._arguments = name, function, arguments

    def __call__(self) -> None:
        if self._function(*self._arguments) < 0:
            _checked(self._name, -1)


def _text(value: str | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def set_hostname(name: str) -> None:
    data = os.fsencode(name)
    _checked("sethostname", _libc.sethostname(data, ctypes.c_size_t(len(data))))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    found = _libc.mount(_text(source), _text(target), _text(kind), ctypes.c_ulong(flags), _text(data))
    _checked(f"mount on {target}", found)


def unmount(target: str) -> None:
    _checked(f"umount of {target}", _libc.umount2(_text(target), MNT_DETACH))


def set_mount_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Set ``ATTR_*`` of a mount, and of all below it if ``recursive`` (Linux 5.12)."""
    asked = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    flags = _AT_RECURSIVE if recursive else 0
    found = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, _text(target), flags, asked, ctypes.c_size_t(32)
    )  # fmt: skip
    _checked(f"mount_setattr of {target}", found)


def pivot_root(new: str, old: str) -> None:
    if _PIVOT_ROOT < 0:
        raise OSError(f"pivot_root is not known for the architecture {MACHINE}")
    _checked("pivot_root", _libc.syscall(ctypes.c_long(_PIVOT_ROOT), _text(new), _text(old)))


class Clone:
    """Copies of this process in new namespaces; what a call needs is allocated once."""

    def __init__(self, flags: int) -> None:
        self._pidfd = ctypes.c_int(-1)
        wanted = [flags | CLONE_PIDFD, ctypes.addressof(self._pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0]
        self._arguments = (ctypes.c_uint64 * 11)(*wanted)

    def __call__(self) -> tuple[int, int]:
        """(0, -1) in the copy; its process id and a descriptor of it here."""
        number, size = ctypes.c_long(_CLONE3), ctypes.c_size_t(88)
        pid = _checked("clone3", _holding.syscall(number, self._arguments, size))
        return (pid, self._pidfd.value) if pid else (0, -1)


def close_from(lowest: int) -> None:
    """Close every descriptor from ``lowest`` up."""
    found = _libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(lowest), ctypes.c_uint(0xFFFFFFFF), 0)
    _checked("close_range", found)


def prctl(option: int, value: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _checked(f"prctl {option}", _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero))


def filtering(program: ctypes.Structure) -> Call:
    """Apply a filter of system calls, for good. Needs `PR_SET_NO_NEW_PRIVS` first."""
    return Call(
        "seccomp", _libc.prctl, ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(SECCOMP_MODE_FILTER),
        ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0),
    )  # fmt: skip


def keep_capabilities() -> None:
    """Over the next change of the user id."""
    prctl(PR_SET_KEEPCAPS, 1)


def holds(capabilities: int) -> bool:
    """Whether this process has these capabilities, of the first 32, in effect."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    found = ctypes.create_string_buffer(24)
    _checked("capget", _libc.capget(header, found))
    return struct.unpack("IIIIII", found.raw[:24])[0] & capabilities == capabilities


def bound_capabilities() -> None:
    """None can be gained any more; those that are held stay until they are dropped."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one this kernel knows, or not ours to drop
            continue


def dropping(kept: int) -> Call:
    """All capabilities but those of the mask ``kept``, for good."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    return Call(
        "capset", _libc.capset, header, ctypes.create_string_buffer(struct.pack("IIIIII", kept, kept, 0, 0, 0, 0))
    )


# Landlock


def landlock_version() -> int:
    """The version of the interface (Linux 5.13 has 1), 0 if there is none."""
    found = _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, found)


def landlock_ruleset(files: int, network: int, scoped: int, version: int) -> int:
    """A descriptor of a ruleset that handles these accesses, as many fields of it as ``version`` knows."""
    size = 8 if version < 4 else 16 if version < 6 else 24
    asked = ctypes.create_string_buffer(struct.pack("QQQ", files, network, scoped))
    found = _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), asked, ctypes.c_size_t(size), ctypes.c_uint(0))
    return _checked("landlock_create_ruleset", found)


def landlock_allow(ruleset: int, access: int, path: str) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, parent))
        found = _libc.syscall(ctypes.c_long(_LANDLOCK_ADD), ctypes.c_int(ruleset), 1, rule, ctypes.c_uint(0))
        _checked(f"landlock_add_rule for {path}", found)
    finally:
        os.close(parent)


def restricting(ruleset: int) -> Call:
    """Bind this process by a ruleset, for good."""
    arguments = ctypes.c_long(_LANDLOCK_RESTRICT), ctypes.c_int(ruleset), ctypes.c_uint(0)
    return Call("landlock_restrict_self", _libc.syscall, *arguments)
