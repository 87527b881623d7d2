"""How a worker and its runs are shut in. Two rungs; what each needs and leaves open is in docs/verifiers.md.

    namespaces   worker: own user, mounts, network, processes; a root with the system's libraries and the interpreter
                 run:    own processes and a writable folder that nobody has touched before, and all of `landlock`
    landlock     run:    Landlock + filter of system calls + limits, no writable folder

The standard library alone is used: this is loaded in workers, which know nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from nearpolicy.verifier.sandbox import kernel, syscalls

FOLDER = "/box/run"
"""Working folder of a run, the only place it may write to. Landlock knows it by the folder above, which stays."""
PACKAGES = "/packages"
FOLDER_MIB, FOLDER_FILES = 8, 256
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_BASE = "/proc"
"""Where the new root is put together: a folder that is always there, and that nothing is taken from."""
_HIDDEN = ("/usr/src", "/usr/app", "/usr/local/src", "/usr/local/app")
"""Below the system's folders, and none of its: where containers often keep what they are built for, data and all."""
_OWN_UIDS = ((2_000_000_000, 1 << 24), (64_000, 1000), (60_000, 1000))
"""Where user ids of workers may begin that nobody else has, and how many; within a container only low ones exist."""
_WORKER_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


# The worker


def interpreter_folders() -> list[str]:
    """What Python needs to run: its prefix, if the system's folders do not hold it."""
    prefix = os.path.realpath(sys.base_prefix)
    return [] if any(prefix == each or prefix.startswith(each + "/") for each in _SYSTEM) else [prefix]


def hidden_folders() -> list[str]:
    """What is covered with an empty folder, if Python does not need it."""
    prefix = os.path.realpath(sys.base_prefix)
    return [path for path in _HIDDEN if os.path.isdir(path) and not prefix.startswith(path + "/")]


def leave_users(slot: int, *, keep_reading: bool = False) -> None:
    """From root to a user id that no other worker has: the kernel's limits and permissions hold for those only.

    ``keep_reading``: with the right to read any file that Landlock lets it, if others cannot read the interpreter.
    """
    if os.getuid() != 0:
        return
    keep_reading = keep_reading and not _readable_for_all(os.path.realpath(sys.base_prefix))
    if keep_reading:
        kernel.keep_capabilities()
    os.setgroups([])
    for first, count in _OWN_UIDS:
        own = first + slot % count
        with contextlib.suppress(OSError):
            os.setresgid(own, own, own)
            os.setresuid(own, own, own)
            break
    else:
        raise OSError("no user id could be taken for a worker of the sandbox")
    if keep_reading:
        kernel.dropping(kernel.READ_ANY_FILE)()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # lost with the id; without it the map of ids cannot be written


def _readable_for_all(path: str) -> bool:
    while path != "/":
        if os.stat(path).st_mode & 0o005 != 0o005:
            return False
        path = os.path.dirname(path)
    return True


def enter_namespaces(slot: int, packages: Sequence[str]) -> None:
    """Shut this process into namespaces of its own, below a read-only root. Its next child is process 1 there.

    As root the root is put together first, because the interpreter may lie in a folder that only root can open.
    """
    process = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    if os.getuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        _change_root(packages)
        leave_users(slot)
        _unshare_all(process)
    else:
        _unshare_all(process)
        _change_root(packages)
    kernel.set_hostname("sandbox")
    os.close(process)


def _unshare_all(process: int) -> None:
    """``process``: its folder in /proc, where ids are mapped: ours is 1000 inside, and there is no other."""
    maps = {"setgroups": "deny", "uid_map": f"1000 {os.getuid()} 1", "gid_map": f"1000 {os.getgid()} 1"}
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | _WORKER_NAMESPACES)
    for name, text in maps.items():
        target = os.open(name, os.O_WRONLY, dir_fd=process)
        try:
            os.write(target, text.encode())
        finally:
            os.close(target)


def _change_root(packages: Sequence[str]) -> None:
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    libraries = Path("/etc/ld.so.cache")
    cache = libraries.read_bytes() if libraries.exists() else b""
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), _BASE + path)
        elif os.path.isdir(path):
            _show(path, path)
    for path in hidden_folders():
        kernel.mount("tmpfs", _BASE + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,nr_inodes=2")
        kernel.set_mount_attributes(_BASE + path, kernel.ATTR_RDONLY, recursive=False)
    for path in interpreter_folders():
        _show(path, path)
    for path in packages:
        _show(path, f"{PACKAGES}/{os.path.basename(path)}")
    os.makedirs(_BASE + "/etc")
    Path(_BASE, "etc/ld.so.cache").write_bytes(cache)
    if os.path.isdir("/etc/alternatives"):
        _show("/etc/alternatives", "/etc/alternatives")
    os.mkdir(_BASE + "/dev")
    for name in _DEVICES:
        Path(_BASE, "dev", name).touch()
        kernel.mount(f"/dev/{name}", f"{_BASE}/dev/{name}", None, kernel.MS_BIND)
        attributes = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC  # written to it is all the same
        kernel.set_mount_attributes(f"{_BASE}/dev/{name}", attributes, recursive=False)
    os.makedirs(_BASE + FOLDER)
    if not os.path.exists(_BASE + "/tmp"):
        os.symlink(FOLDER, _BASE + "/tmp")
    os.chdir(_BASE)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.set_mount_attributes("/", kernel.ATTR_RDONLY, recursive=False)


def _show(source: str, place: str) -> None:
    """A folder or file of the host, read-only."""
    target = _BASE + place
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    attributes = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
    kernel.set_mount_attributes(target, attributes, recursive=True)


# A run


class OwnFolder:
    """The writable folder of a run: a file system in memory, made anew unless nobody has touched it. To mount one takes
    as long as all else that shuts a run in, and most programs write no file.

    Whatever is done to a folder, or by a name in it, moves its time of change, which no call can set. Where the kernel
    gives each change that follows a look another time (Linux 6.13), a look shows whether there was one; else there is a
    new folder for each run.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, ...] | None = None
        self._mount()
        self._tells_changes = self._each_change_shows()

    def begin(self) -> None:
        """For the run that comes. What it finds is as old as it is, whatever the one before has done."""
        if not (self._tells_changes and self._seen == self._state()):
            kernel.unmount(FOLDER)
            self._mount()
        os.chmod(FOLDER, 0o700)
        self._seen = self._state()

    def _mount(self) -> None:
        options = f"mode=700,size={FOLDER_MIB}m,nr_inodes={FOLDER_FILES},uid=1000,gid=1000"
        kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME, options)

    def _each_change_shows(self) -> bool:
        seen = set()
        for _ in range(50):
            os.chmod(FOLDER, 0o700)
            seen.add(os.stat(FOLDER).st_ctime_ns)
        return len(seen) == 50

    def _state(self) -> tuple[int, ...]:
        found, room = os.stat(FOLDER), os.statvfs(FOLDER)
        return found.st_ctime_ns, found.st_mtime_ns, found.st_atime_ns, found.st_mode, room.f_bfree, room.f_ffree


def limit(*, cpu_s: float, memory_mib: int, processes: int, shared_user: bool, held_bytes: int) -> None:
    """Limits of the kernel. ``held_bytes``: address space that the process has before the program runs.

    ``shared_user``: whether other processes have this user id, and count.
    """
    seconds = max(1, int(cpu_s) + 1)
    memory = held_bytes + memory_mib * 2**20
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: FOLDER_MIB * 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 1,  # 0 would not keep the kernel from starting a program of the machine that keeps cores
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,  # timers too
    }
    if not shared_user:
        limits[resource.RLIMIT_NPROC] = _OF_A_WORKER + (processes if processes > 1 else THREADS)
    elif processes > 1:
        limits[resource.RLIMIT_NPROC] = _threads_of_this_user() + processes
    else:
        limits[resource.RLIMIT_NPROC] = _threads_of_this_machine() + _ROOM
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


_OF_A_WORKER = 3
"""Processes of a worker and its run itself."""
THREADS = 64
_ROOM = 1024
"""For the threads of a run whose user has other processes, which start threads meanwhile."""


def _threads_of_this_machine() -> int:
    """At least as many as the kernel counts for this user, and quick to know."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def _threads_of_this_user() -> int:
    """What the kernel counts against a limit of processes."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


class Confinement:
    """Landlock and the filter of system calls. What a worker can do for all its runs is done when this is made: it is
    bound by a part of it itself."""

    def __init__(self, *, writable: str | None, readable: Sequence[str], capabilities: int = 0) -> None:
        """``writable``: a folder, if there is one. ``capabilities``: a mask of those that a run may have."""
        version = kernel.landlock_version()
        self._own_space = writable is not None
        """Processes and files of its own: then what a run may do to those is its matter."""
        self._apart = self._own_space or version >= 6  # processes cannot signal each other
        rulesets = {each: _ruleset(version, writable, readable, execute=each) for each in (False, True)}
        self._rulesets = [each for each in rulesets.values() if each is not None]
        self._bind = {may: kernel.restricting(ruleset) for may, ruleset in rulesets.items() if ruleset is not None}
        self._filters = {each: syscalls.of_run(processes=each, own_space=self._own_space) for each in (False, True)}
        self._drop = kernel.dropping(capabilities)
        kernel.bound_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.of_worker().apply()

    def apply(self, *, processes: bool) -> None:
        """For good, and for all that this process starts. ``processes``: whether it may start any."""
        self._drop()
        if self._bind:
            self._bind[processes]()
        for each in self._rulesets:
            os.close(each)
        own = self._filters[processes]
        if not self._apart:
            own = syscalls.of_run(processes=processes, own_space=self._own_space, only_signals_to=os.getpid())
        own.apply()


def _ruleset(version: int, writable: str | None, readable: Sequence[str], *, execute: bool) -> int | None:
    """A descriptor that is kept out of the way of a run's; None without Landlock."""
    if not version:
        return None
    files = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    ruleset = kernel.landlock_ruleset(files, 3 if version >= 4 else 0, 3 if version >= 6 else 0, version)
    read = _READ_FILE | _READ_DIR | (_EXECUTE if execute else 0)
    for path in readable:
        if os.path.exists(path):
            kernel.landlock_allow(ruleset, read if os.path.isdir(path) else read & ~_READ_DIR, path)
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            kernel.landlock_allow(ruleset, _READ_FILE | _WRITE_FILE, f"/dev/{name}")
    if writable is not None:
        kernel.landlock_allow(ruleset, files & ~(_MAKE_CHAR | _MAKE_BLOCK), writable)
    return ruleset


_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_CHAR, _MAKE_BLOCK = 1, 2, 4, 8, 1 << 6, 1 << 11


def readable_without_namespaces(packages: Sequence[str]) -> list[str]:
    """What a run of the second rung may read: the interpreter and the libraries it loads."""
    libraries = [
        path for path in ("/usr/lib", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache") if os.path.exists(path)
    ]
    return [*libraries, *interpreter_folders(), *packages]
