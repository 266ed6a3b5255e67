"""Landlock, the kernel's own access rules for a process without rights: the weaker mode's files and signals."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from .kernel import Unavailable, checked, syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_ALL = (1 << 16) - 1
"""Every right on files of version 5."""
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_NETWORK = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_NEEDED_VERSION = 6


def check() -> None:
    """Raise `Unavailable` where the kernel's Landlock is off or knows no signals (before Linux 6.12)."""
    version = syscall(_CREATE, None, 0, _VERSION_FLAG)
    if version < _NEEDED_VERSION:
        found = f"version {version}" if version > 0 else "none"
        raise Unavailable(f"Landlock version {_NEEDED_VERSION} or newer, Linux 6.12 (found: {found})")


def restrict(readable: Sequence[str], devices: Sequence[str], folder: str) -> None:
    """Allow this process and all it starts to read some paths and to do as it likes in one folder; nothing else.

    `no_new_privs` must be set. Raises `Unavailable`.
    """
    attributes = struct.pack("=QQQ", _ALL, _NETWORK, _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = checked(syscall(_CREATE, attributes, len(attributes), 0), "a Landlock ruleset")
    for path in readable:
        _allow(ruleset, path, _READ)
    for path in devices:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    _allow(ruleset, folder, _ALL)
    checked(syscall(_RESTRICT, ruleset, 0), "Landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_A_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        checked(syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0), f"a Landlock rule for {path}")
    finally:
        os.close(descriptor)
