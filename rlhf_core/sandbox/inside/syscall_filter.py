"""A seccomp filter against system calls that no sandboxed program needs but many attacks do.

Namespaces hide the machine; this hides most of the kernel, and disables resources that neither a namespace nor a limit
bounds (System V shared memory, files in memory, kernel keys, sockets).
"""

from __future__ import annotations

import ctypes
import errno
import struct

from .kernel import CLONE, NAMESPACES, checked, machine, syscall

_DENIED = {  # name: (x86_64, aarch64), None where the call does not exist
    "socket": (41, 198),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "personality": (135, 92),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_CLONE3 = 435
"""A filter cannot follow the pointer to its flags; without clone3 the C library falls back to clone."""
_SIGNALLING = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_PIDFD_SEND_SIGNAL = 424
_FCNTL, _IOCTL = (72, 25), (16, 29)
_OWNER_BY_FCNTL = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: could send any process a chosen signal on file input."""
_OWNER_BY_IOCTL = (0x8901, 0x8902)
"""FIOSETOWN and SIOCSPGRP."""
_SECCOMP = (317, 277)
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in the kernel's seccomp_data."""
_SET_MODE_FILTER = 1


def install(signals_to: int | None = None) -> None:
    """Filter this process and its descendants permanently; `no_new_privs` must be set. Raises `Unavailable`.

    With `signals_to`, for use without a process namespace, signals can be sent to that process only.
    """
    program = filter_program(signals_to)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    described = Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    column, _ = machine()
    checked(syscall(_SECCOMP[column], _SET_MODE_FILTER, 0, ctypes.byref(described)), "seccomp filters")


def filter_program(signals_to: int | None = None) -> bytes:
    """The filter as BPF instructions of eight bytes."""
    column, architecture = machine()

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def refuse(number: int, reason: int) -> list[bytes]:
        return [instruction(_EQUAL, number, 0, 1), instruction(_RETURN, _ERROR | reason)]

    lines = [
        instruction(_LOAD, _ARCHITECTURE),
        instruction(_EQUAL, architecture, 1, 0),
        instruction(_RETURN, _KILL),
        instruction(_LOAD, _NUMBER),
    ]
    if column == 0:  # the second set of numbers of x86_64
        lines += [instruction(_AT_LEAST, _X32_BIT, 0, 1), instruction(_RETURN, _KILL)]
    for per_machine in _DENIED.values():
        number = per_machine[column]
        if number is not None:
            lines += refuse(number, errno.EPERM)
    lines += refuse(_CLONE3, errno.ENOSYS)

    def unless(number: int, offset: int, values: tuple[int, ...], then: int, otherwise: int) -> list[bytes]:
        """For one call: `then` where its argument is one of the values, else `otherwise`."""
        checks = [part for value in values for part in (instruction(_EQUAL, value, 0, 1), instruction(_RETURN, then))]
        rest = [instruction(_LOAD, offset), *checks, instruction(_RETURN, otherwise)]
        return [instruction(_EQUAL, number, 0, len(rest)), *rest]

    if signals_to is not None:
        refused = _ERROR | errno.EPERM
        for per_machine in _SIGNALLING.values():
            lines += unless(per_machine[column], _ARGUMENT_0, (signals_to,), _ALLOW, refused)
        lines += refuse(_PIDFD_SEND_SIGNAL, errno.EPERM)
        lines += unless(_FCNTL[column], _ARGUMENT_1, _OWNER_BY_FCNTL, refused, _ALLOW)
        lines += unless(_IOCTL[column], _ARGUMENT_1, _OWNER_BY_IOCTL, refused, _ALLOW)
    lines += [
        instruction(_EQUAL, CLONE[column], 0, 3),
        instruction(_LOAD, _ARGUMENT_0),
        instruction(_ANY_BIT, NAMESPACES, 0, 1),
        instruction(_RETURN, _ERROR | errno.EPERM),
        instruction(_RETURN, _ALLOW),
    ]
    return b"".join(lines)
