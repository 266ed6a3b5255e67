"""The filter on both architectures, by interpreting it, and its numbers against the kernel's headers."""

import errno
import re
import struct
from pathlib import Path

import pytest

from rlhf_containment.sandbox.inside import kernel, syscall_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, EOPNOTSUPP = (0x00050000 | each for each in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP))
MACHINES = ("x86_64", "aarch64")
TABLES = (
    *(syscall_filter._DENIED, syscall_filter._DENIED_ON_FILES),
    *(syscall_filter._DENIED_WITHOUT_COUNT, syscall_filter._SIGNALLING),
)
NUMBERS = {name: numbers for table in TABLES for name, numbers in table.items()} | {
    name: numbers for name, (numbers, *_) in syscall_filter._ALLOWED_ONLY.items()
}
NUMBERS |= {"mmap": syscall_filter._MMAP, "clone": kernel.CLONE}
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
OWN, OTHER = 4321, 1


def verdict(filter_bytes, architecture, number, *arguments):
    """What the kernel would return for a call: an interpreter of the filter's instructions."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    at = word = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", filter_bytes, at * 8)
        at += 1
        if code == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        elif code == 0x05:
            at += value
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[code]
            at += if_true if holds else if_false


CALLS = [  # name, arguments, with namespaces, without
    ("prlimit64", (0, 7, 0x7F00), ALLOW, ALLOW),
    ("prlimit64", (0, 4, 0), ALLOW, ALLOW),
    ("prlimit64", (0, 4, 0x7F00), EPERM, EPERM),
    ("prlimit64", (0, 4, 0x7F00000000), EPERM, EPERM),
    ("prlimit64", (OTHER, 7, 0), EPERM, EPERM),
    ("prlimit64", (OTHER, 4, 0), EPERM, EPERM),
    ("setrlimit", (7, 0x7F00), ALLOW, ALLOW),
    ("setrlimit", (4, 0x7F00), EPERM, EPERM),
    ("setpriority", (0, 0, 19), ALLOW, ALLOW),
    ("setpriority", (0, OTHER, 19), EPERM, EPERM),
    ("setpriority", (2, 0, 19), EPERM, EPERM),
    ("sched_setaffinity", (0, 8, 0x7F00), ALLOW, ALLOW),
    ("sched_setaffinity", (OTHER, 8, 0x7F00), EPERM, EPERM),
    ("socketpair", (1, 0x80801, 0), ALLOW, ALLOW),
    ("socketpair", (1, 2, 0), EPERM, EPERM),
    ("socketpair", (1, 0x80005, 0), EPERM, EPERM),
    ("fcntl", (0, 1030, 3), ALLOW, ALLOW),
    ("fcntl", (0, 8, OTHER), EPERM, EPERM),
    ("fcntl", (0, 1031, 2**20), EPERM, EPERM),
    ("ioctl", (0, 0x5401, 0x7F00), ALLOW, ALLOW),
    ("ioctl", (0, 0x40086602, 0x7F00), EOPNOTSUPP, EOPNOTSUPP),
    ("fchmod", (3, 0o777), ALLOW, EPERM),
    ("fchmodat2", (3, 0x7F00, 0o777, 0), ALLOW, EPERM),
    ("utimensat", (3, 0x7F00, 0, 0), ALLOW, EPERM),
    ("kill", (OTHER, 9), ALLOW, EPERM),
    ("kill", (OWN, 9), ALLOW, ALLOW),
    ("socket", (1, 1, 0), EPERM, EPERM),
    ("sendmsg", (3, 0x7F00, 0), ALLOW, EPERM),
    ("sendmmsg", (3, 0x7F00, 1, 0), ALLOW, EPERM),
    ("mmap", (0, 4096, 3, 0x22, 2**32 - 1, 0), ALLOW, ALLOW),
    ("mmap", (0, 4096, 3, 0x01, 3, 0), ALLOW, ALLOW),
    ("mmap", (0, 4096, 3, 0x21, 2**32 - 1, 0), EPERM, EPERM),
    ("mmap", (0, 4096, 3, 0x8023, 2**32 - 1, 0), EPERM, EPERM),
]


@pytest.mark.parametrize("name", MACHINES)
def test_each_call_is_allowed_or_refused(name, monkeypatch):
    column, architecture = kernel._MACHINES[name]
    monkeypatch.setattr(syscall_filter, "machine", lambda: (column, architecture))
    filters = syscall_filter.filter_program(), syscall_filter.filter_program(signals_to=OWN)
    for call, arguments, *expected in CALLS:
        found = [verdict(each, architecture, NUMBERS[call][column], *arguments) for each in filters]
        assert found == expected, (call, arguments)
    for each in filters:
        assert verdict(each, architecture, 435) == ENOSYS
        assert verdict(each, architecture, kernel.CLONE[column], kernel.CLONE_NEWUSER | 17) == EPERM
        assert verdict(each, architecture, kernel.CLONE[column], 17) == ALLOW
        assert verdict(each, architecture + 1, 0) == KILL


@pytest.mark.parametrize("column", range(2), ids=MACHINES)
def test_numbers_are_those_of_the_kernels_headers(column):
    header = Path(HEADERS[column])
    if not header.is_file():
        pytest.skip(f"no {header}")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    wrong = {
        name: (numbers[column], defined[name])
        for name, numbers in NUMBERS.items()
        if name in defined and str(numbers[column]) != defined[name]
    }
    assert not wrong
