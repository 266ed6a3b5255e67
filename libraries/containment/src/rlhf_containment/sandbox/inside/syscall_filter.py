"""A seccomp filter against system calls that sandboxed programs do not need but many attacks do.

Namespaces hide the machine. The filter hides most of the kernel, refuses calls that change other processes of the same
user, and disables resources that neither a namespace nor a limit bounds (System V shared memory, in-memory files,
kernel keys, sockets other than connected pairs, memory referenced only by a pipe, shared memory without a file).
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Mapping, Sequence

from .kernel import CLONE, NAMESPACES, checked, machine, syscall

_DENIED = {  # name: (x86_64, aarch64), None if the architecture lacks the call
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),
    "splice": (275, 76),
    "vmsplice": (278, 75),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "ioprio_set": (251, 30),
    "landlock_create_ruleset": (444, 444),
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
    "open_tree_attr": (467, 467),
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
    "quotactl_fd": (443, 443),
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
"""A filter cannot follow the pointer to its flags. Without clone3 the C library falls back to clone."""
_DENIED_ON_FILES = {  # calls that change modes, owners, times and attributes, which Landlock does not restrict
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
_DENIED_WITHOUT_COUNT = {"sendmsg": (46, 211), "sendmmsg": (307, 269)}
"""Calls that send open files. A socket in transit belongs to no process, so process limits do not bound its buffer."""
_ARGUMENTS = (16, 24, 32)
"""Offsets in the kernel's seccomp_data of the low halves of the first three arguments. Integers use only that half."""
_POINTER_2_HIGH = 36
_ITSELF = ({_ARGUMENTS[0]: (0,)},)
_CORE_FILES = 4
"""RLIMIT_CORE. Only the value 1 also prevents a pipe in `core_pattern`, so it must not be lowered to 0."""
_OTHER_LIMITS = tuple(each for each in range(16) if each != _CORE_FILES)
_FCNTL_COMMANDS = (*range(8), 9, 11, 36, 37, 38, 1025, 1030, 1032, 1034)
"""Excludes choosing the receiver of signals on input (F_SETOWN, F_SETSIG), leases and larger pipes."""
_IOCTL_COMMANDS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2. File systems define many more."""
_CONNECTED = tuple(1 | flags for flags in (0, 0x800, 0x80000, 0x80800))
"""SOCK_STREAM, non-blocking and close-on-exec or not. Datagrams from a pair could be sent to any socket by its path."""
_ALLOWED_ONLY = {  # name: numbers, errno of a refusal, alternatives {offset: values} of which one must match
    "prlimit64": (
        (302, 261),
        errno.EPERM,
        (
            {_ARGUMENTS[0]: (0,), _ARGUMENTS[1]: _OTHER_LIMITS},
            {_ARGUMENTS[0]: (0,), _ARGUMENTS[2]: (0,), _POINTER_2_HIGH: (0,)},
        ),
    ),
    "setrlimit": ((160, 164), errno.EPERM, ({_ARGUMENTS[0]: _OTHER_LIMITS},)),
    "setpriority": ((141, 140), errno.EPERM, ({_ARGUMENTS[0]: (0,), _ARGUMENTS[1]: (0,)},)),
    "sched_setparam": ((142, 118), errno.EPERM, _ITSELF),
    "sched_setscheduler": ((144, 119), errno.EPERM, _ITSELF),
    "sched_setaffinity": ((203, 122), errno.EPERM, _ITSELF),
    "sched_setattr": ((314, 274), errno.EPERM, _ITSELF),
    "socketpair": ((53, 199), errno.EPERM, ({_ARGUMENTS[1]: _CONNECTED},)),
    "fcntl": ((72, 25), errno.EPERM, ({_ARGUMENTS[1]: _FCNTL_COMMANDS},)),
    "ioctl": ((16, 29), errno.EOPNOTSUPP, ({_ARGUMENTS[1]: _IOCTL_COMMANDS},)),
}
_Rules = dict[str, tuple[tuple[int, int], int, tuple[Mapping[int, Sequence[int]], ...]]]
_OF_SOCKETS = ("socket", "connect", "bind", "listen", "accept", "accept4", "setsockopt")
_WITH_SOCKETS: _Rules = {  # TCP, and options that neither enlarge buffers nor attach filters
    "socket": (
        (41, 198),
        errno.EAFNOSUPPORT,
        ({_ARGUMENTS[0]: (socket.AF_INET, socket.AF_INET6), _ARGUMENTS[1]: _CONNECTED, _ARGUMENTS[2]: (0, 6)},),
    ),
    "setsockopt": (
        (54, 208),
        errno.EPERM,
        (
            {_ARGUMENTS[1]: (socket.SOL_SOCKET,), _ARGUMENTS[2]: (2, 9, 13, 15, 20, 21)},
            {_ARGUMENTS[1]: (socket.IPPROTO_TCP,), _ARGUMENTS[2]: (1, 3, 4, 5, 6, 9, 12, 18)},
            {_ARGUMENTS[1]: (socket.IPPROTO_IPV6,), _ARGUMENTS[2]: (26,)},
        ),
    ),
}
_MMAP = (9, 222)
_MMAP_FLAGS, _SHARED_OR_VALIDATED, _ANONYMOUS = 40, 1, 0x20
"""Shared memory without a file outlives the mapping of its pages, so that no process reports all of it."""
_SIGNALLING = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_PIDFD_SEND_SIGNAL = (424, 424)
_SECCOMP = (317, 277)
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _JUMP, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4
"""Offsets in the kernel's seccomp_data."""
_SET_MODE_FILTER = 1


def install(signals_to: int | None = None, *, opens_sockets: bool = False) -> None:
    """Filter system calls of this process and its descendants permanently. Raises `Unavailable`.

    `no_new_privs` must be set.

    Args:
        signals_to: for use without namespaces, the only process that may receive signals. Calls that change modes,
            owners, times and attributes of files or send open files are refused, too.
        opens_sockets: whether TCP sockets are allowed, for use in a network namespace.
    """
    program = filter_program(signals_to, opens_sockets=opens_sockets)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    described = Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    column, _ = machine()
    checked(syscall(_SECCOMP[column], _SET_MODE_FILTER, 0, ctypes.byref(described)), "seccomp filters")


def filter_program(signals_to: int | None = None, *, opens_sockets: bool = False) -> bytes:
    """Return the filter as BPF instructions of eight bytes."""
    column, architecture = machine()
    lines = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if column == 0:  # the second set of numbers of x86_64
        lines += [_instruction(_AT_LEAST, _X32_BIT, 0, 1), _instruction(_RETURN, _KILL)]
    denied = dict(_DENIED)
    allowed_only: _Rules = {**_ALLOWED_ONLY}
    if opens_sockets:
        denied = {name: numbers for name, numbers in denied.items() if name not in _OF_SOCKETS}
        allowed_only |= _WITH_SOCKETS
    if signals_to is not None:
        denied |= _DENIED_ON_FILES | _DENIED_WITHOUT_COUNT | {"pidfd_send_signal": _PIDFD_SEND_SIGNAL}
        receiver = ({_ARGUMENTS[0]: (signals_to,)},)
        allowed_only |= {name: (numbers, errno.EPERM, receiver) for name, numbers in _SIGNALLING.items()}
    for per_machine in denied.values():
        number = per_machine[column]
        if number is not None:
            lines += _refuse(number, errno.EPERM)
    lines += _refuse(_CLONE3, errno.ENOSYS)
    for numbers, reason, alternatives in allowed_only.values():
        lines += _allow_only(numbers[column], reason, alternatives)
    lines += [
        _instruction(_EQUAL, _MMAP[column], 0, 5),
        _instruction(_LOAD, _MMAP_FLAGS),
        _instruction(_ANY_BIT, _SHARED_OR_VALIDATED, 0, 2),
        _instruction(_ANY_BIT, _ANONYMOUS, 0, 1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, CLONE[column], 0, 3),
        _instruction(_LOAD, _ARGUMENTS[0]),
        _instruction(_ANY_BIT, NAMESPACES, 0, 1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int, reason: int) -> list[bytes]:
    return [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _ERROR | reason)]


def _allow_only(number: int, reason: int, alternatives: Sequence[Mapping[int, Sequence[int]]]) -> list[bytes]:
    """Allow a call if each word of an alternative has one of its values, else refuse it with the errno `reason`."""
    body: list[bytes] = []
    for words in alternatives:
        rest = [_instruction(_RETURN, _ALLOW)]
        for offset, values in words.items():
            # An equal value jumps over the other values and over the jump to the next alternative.
            checks = [_instruction(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
            rest = [_instruction(_LOAD, offset), *checks, _instruction(_JUMP, len(rest)), *rest]
        body += rest
    body.append(_instruction(_RETURN, _ERROR | reason))
    return [_instruction(_EQUAL, number, 0, len(body)), *body]
