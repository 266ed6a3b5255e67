"""Landlock, the kernel's access rules for unprivileged processes, for files and signals in the weaker mode."""

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
_ALL = (1 << 15) - 1
"""All file rights of version 3. Version 5 adds one for devices."""
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_NETWORK = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_TRUNCATES, _CONNECTS, _CONTROLS, _SIGNALS = 3, 4, 5, 6
"""First versions that restrict truncation, TCP, device ioctls, and signals."""


def version() -> int:
    """Version of the kernel's Landlock. Zero or negative if it is disabled."""
    return syscall(_CREATE, None, 0, _VERSION_FLAG)


def check() -> None:
    """Raise `Unavailable` if the kernel's Landlock is disabled or cannot forbid truncating files."""
    if (current := version()) < _TRUNCATES:
        found = f"version {current}" if current > 0 else "none"
        raise Unavailable(f"Landlock version {_TRUNCATES} or newer, Linux 6.2 (found: {found})")


def restrict(readable: Sequence[str], devices: Sequence[str], folder: str) -> None:
    """Restrict this process and its descendants permanently to some paths.

    `no_new_privs` must be set. Raises `Unavailable`.

    Args:
        readable: files and folders to read and execute.
        devices: files to read and write.
        folder: folder in which all operations are allowed.
    """
    current = version()
    rights = _ALL | (_IOCTL if current >= _CONTROLS else 0)
    attributes = struct.pack("=Q", rights)
    if current >= _CONNECTS:
        attributes += struct.pack("=Q", _NETWORK)
    if current >= _SIGNALS:
        attributes += struct.pack("=Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = checked(syscall(_CREATE, attributes, len(attributes), 0), "a Landlock ruleset")
    for path in readable:
        _allow(ruleset, path, _READ)
    for path in devices:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    _allow(ruleset, folder, rights)
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
