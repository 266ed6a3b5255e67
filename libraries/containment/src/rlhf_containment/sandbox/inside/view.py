"""The file system that a sandboxed program sees, built in memory in a separate mount namespace.

The new root starts empty, readable paths are bind-mounted into it, and the old root is unmounted.
"""

from __future__ import annotations

import os
from typing import Any

from .kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC, enter_root, make_read_only, mount
from .system import DEVICES, FILES, FOLDERS, interpreter_paths, is_below, links_to

PRIVATE = "/sandbox"
"""The only writable folder."""
PROGRAM, INPUT = "/program.py", "/input"
WORK, HOME, TEMPORARY = f"{PRIVATE}/work", f"{PRIVATE}/home", "/tmp"
"""A command's working folder, its home and its temporary folder, which are all in the private folder."""
_ETC = {
    "/etc/passwd": "nobody:x:65534:65534:nobody:" + HOME + ":/bin/sh\n",
    "/etc/group": "nogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Files that a command's programs need to name their user and this machine."""
_BASE = "/tmp"  # a folder that always exists: the new root is mounted over it, invisible outside this namespace
_ROOT_FILES = 4096


def enter(job: dict[str, Any], user: int) -> None:
    """Build the file system and make it the root. `user` owns the private folder.

    Raises `Unavailable` or `OSError`.
    """
    is_command = "command" in job
    texts = _ETC if is_command else {PROGRAM: job["source"], INPUT: job["stdin"]}
    contents = {path: text.encode(errors="replace") for path, text in texts.items()}
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    readable = [*FOLDERS, *FILES, *interpreter_paths(job["prefixes"]), *job.get("readable", ())]
    opened = {path: os.open(path, os.O_PATH) for path in (*readable, *DEVICES) if _is_mountable(path)}
    links = {path: os.readlink(path) for path in FOLDERS if os.path.islink(path)}
    links |= {path: target for path, target in links_to(job["executable"]) if not is_below(path, readable)}
    size = 2**20 + sum(map(len, contents.values()))
    mount("root", _BASE, "tmpfs", MS_NOSUID, f"size={size},nr_inodes={_ROOT_FILES},mode=0755")
    _mount_private_folder(job, user)
    if is_command:
        _make_folders_of_a_command(user)
    for path, descriptor in opened.items():
        _bind(path, descriptor)
        os.close(descriptor)
    for path, target in links.items():
        _link(path, target)
    _make_links()
    for path, content in contents.items():
        os.makedirs(os.path.dirname(_BASE + path), exist_ok=True)
        with open(_BASE + path, "xb") as file:
            file.write(content)
        os.chmod(_BASE + path, 0o444)
    enter_root(_BASE)
    make_read_only("/", recursive=False)


def _is_mountable(path: str) -> bool:
    return os.path.exists(path) and not (path in FOLDERS and os.path.islink(path))


def _bind(path: str, descriptor: int) -> None:
    target = _BASE + path
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            open(target, "xb").close()
    mount(f"/proc/self/fd/{descriptor}", target, None, MS_BIND | MS_REC)
    if path not in DEVICES:
        make_read_only(target, recursive=True)


def _link(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(_BASE + path), exist_ok=True)
    if not os.path.lexists(_BASE + path):
        os.symlink(target, _BASE + path)


def _mount_private_folder(job: dict[str, Any], user: int) -> None:
    """Mount the writable folder, a tmpfs of limited size."""
    os.mkdir(_BASE + PRIVATE)
    options = f"size={job['max_folder_bytes']},nr_inodes={job['max_files'] + 1},mode=0700,uid={user},gid={user}"
    mount("private", _BASE + PRIVATE, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _make_folders_of_a_command(user: int) -> None:
    """Create the folders of a command in the private folder, and mount its temporary folder where programs expect it.

    Paths that the command may read can be below it, which a link to the private folder would not allow.
    """
    temporary = f"{PRIVATE}{TEMPORARY}"
    for path in (WORK, HOME, temporary):
        os.mkdir(_BASE + path, mode=0o700)
        os.chown(_BASE + path, user, user)
    os.mkdir(_BASE + TEMPORARY)
    mount(_BASE + temporary, _BASE + TEMPORARY, None, MS_BIND)


def _make_links() -> None:
    """Mount a `/proc` with only the sandbox's processes, and create symbolic links.

    These are `fd`, the standard streams and `zero` in `/dev`, and the temporary folders, such as `/tmp`, which point to
    the writable folder.
    """
    os.mkdir(_BASE + "/proc")
    mount("proc", _BASE + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{_BASE}/dev/{name}")
    _link("/dev/zero", "full")  # which reads the same, but cannot be mapped
    for path in ("/dev/shm", "/tmp", "/var/tmp"):
        _link(path, PRIVATE)
