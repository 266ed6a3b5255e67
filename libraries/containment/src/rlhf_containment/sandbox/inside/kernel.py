"""System calls that Python's standard library does not wrap, through the C library. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_SIGCHLD = 17
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Per architecture: index into pairs of system call numbers, and audit code. Numbers above 423 are the same on both."""
CLONE, _PIVOT_ROOT = (56, 220), (155, 41)
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """The machine lacks something that the sandbox needs. The text names it."""


def checked(result: int, feature: str) -> int:
    """Return the result of a system call. Raises `Unavailable` with the system's reason if it is negative."""
    if result < 0:
        raise Unavailable(f"{feature} ({os.strerror(ctypes.get_errno())})")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make a system call by number. Arguments are integers, bytes, None or ctypes references."""
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *converted))


def machine() -> tuple[int, int]:
    """Return this machine's entry in `_MACHINES`. Raises `Unavailable` on an unknown architecture."""
    name = platform.machine()
    if name not in _MACHINES:
        raise Unavailable(f"support for system calls of {name} processors")
    return _MACHINES[name]


def clone(flags: int) -> int:
    """Fork into new namespaces. Returns 0 in the child and its process id in the parent."""
    return checked(syscall(CLONE[machine()[0]], flags | _SIGCHLD, 0, 0, 0, 0), "user namespaces")


def prctl(option: int, value: int) -> int:
    """Call prctl(2) with one argument."""
    return int(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    encoded = [each.encode() if each is not None else None for each in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    checked(result, f"mounting {kind or 'a part of the system'} at {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


def make_read_only(path: str, *, recursive: bool) -> None:
    """Make a mount read-only and ignore its set-uid bits.

    With `recursive`, the same applies to all mounts below it, and devices on them cannot be used.
    """
    attributes = _MountAttributes(_ATTR_RDONLY | _ATTR_NOSUID | (_ATTR_NODEV if recursive else 0), 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    size = ctypes.sizeof(attributes)
    result = syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size)
    checked(result, f"making {path} read-only")


def enter_root(path: str) -> None:
    """Make the mount `path` the root and unmount the old root."""
    os.chdir(path)
    checked(syscall(_PIVOT_ROOT[machine()[0]], b".", b"."), "changing the root")
    checked(int(_libc.umount2(b".", MNT_DETACH)), "leaving the old root")
    os.chdir("/")


def drop_rights(user: int | None) -> None:
    """Switch to `user` (None keeps the current one) and drop all capabilities permanently."""
    for capability in range(_LAST_CAPABILITY + 1):
        prctl(PR_CAPBSET_DROP, capability)  # fails for capabilities that do not exist
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    checked(int(_libc.capset(ctypes.byref(header), ctypes.byref(none))), "giving up capabilities")
    checked(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def close_from(first: int, keep: Sequence[int] = ()) -> None:
    """Close all file descriptors from `first` upward except those in `keep`."""
    start = first
    for each in sorted(keep):
        os.closerange(start, each)
        start = each + 1
    os.closerange(start, max(start, os.sysconf("SC_OPEN_MAX")))
