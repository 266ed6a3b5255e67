"""Runs untrusted programs: code written by a model is hostile input.

`run_program` runs Python source in a separate process tree, isolated by the kernel, and returns its output and exit
status. It uses the standard library only, so that both rewards and environment tools can use it.

There are two modes. `namespaces` (Linux 5.12 or newer with user namespaces, `/proc` included) restricts a program in:

- files: it can read the system's programs and libraries, the Python interpreter and its packages, but no other files
  of the machine (home folders, run folders, files of other programs). It can write to one in-memory folder, limited in
  bytes and files, which is discarded afterwards.
- processes: it sees only its own processes, cannot signal, trace, limit or slow down any other, and is killed with all
  of its descendants. If the process that watches it fails, only this program counts as failed.
- network: it cannot reach any network and can open only connected socket pairs. Message queues, kernel keys, and shared
  memory without a file in the folder (`mmap.mmap(-1, n)`) are disabled.
- privileges: it runs as `nobody` (if the run was started by root) or as the user, without capabilities, in a separate
  namespace (if started by a user). Set-uid programs do not raise its privileges. It inherits neither environment
  variables nor open files.
- resources: wall-clock time, processor time and memory (summed over its processes, with each socket of a pair counted
  as its full buffer), number of processes, file size and output. It does not write core files, and a crash does not
  start the program of `core_pattern`. The exception is an ordinary user with a hard limit of core files (`ulimit -Hc`)
  of 0, since a limit of 1 prevents the crash program and cannot be set then: start the run with a hard limit of 1 or
  more. (`PR_SET_DUMPABLE` does not help, since `execve` resets it.)

Not prevented: exploits of kernel bugs, timing side channels, and reading the machine's speed, kernel version and
processors. A program may use the processor up to its limit. Memory is checked every 50 ms, and between two checks each
process may use up to `memory_bytes` plus the full buffers of 256 sockets. Data in pipes is not counted, but the kernel
limits it to 64 MiB per user (`fs.pipe-user-pages-soft`). Processor time of a process whose parent ignores its exit is
not counted. The contents of the interpreter's `site-packages` are readable.

`CommandRun` runs any command, such as an agent with its own programs, in the mode `namespaces` with these differences:

- files: it starts in a working folder with files of the caller, which gets the regular files in it back. Home and
  temporary folder share the limits of the private folder. The caller may name more paths to read.
- network: a separate loopback interface. TCP sockets are allowed, without options that enlarge their buffers or attach
  filters. At most one port leads out: its listening socket is passed to the caller, which accepts the connections.
- memory: `memory_bytes` limits resident memory and page tables, summed over the processes, since Node reserves address
  space that it does not use. Between two checks, 50 ms apart, a command may use as much memory as it can write to in
  that time. The kernel's records of mappings (up to 16 MiB per process) and of open files (1024 per process) are not
  counted. Buffers of sockets share the system's `tcp_mem`.
- processes: a process that runs a second after the command has ended counts as a failure and is named.

`landlock` is the weaker mode, for containers that forbid namespaces (Linux 6.2 or newer). Files, sockets, signals and
tracing are restricted as above, with these differences: the folder is on disk and its total size is not limited. Memory
and processor time are limited per process. The process limit counts all processes of the user, so most programs cannot
start any. Signals can be sent only to the program's first process. Names and sizes of files outside can be read. A
process may have at most 64 open files, and full buffers of as many sockets are subtracted from its `memory_bytes`
(20 MiB with Linux's defaults). Open files cannot be sent (`socket.sendmsg` fails), so that no other sockets exist.
Modes, owners, times and attributes of files cannot be changed, even in the program's own folder, since Landlock does
not restrict these calls: `shutil.copyfile` works there, `shutil.copy` fails.
"""

from __future__ import annotations

from .command import CommandRun, SandboxedCommand, save_folder
from .inside.files import FolderError, FolderFile, check_path
from .run import Limits, Mode, ProgramResult, SandboxError, missing, run_program

__all__ = [
    "CommandRun",
    "FolderError",
    "FolderFile",
    "Limits",
    "Mode",
    "ProgramResult",
    "SandboxError",
    "SandboxedCommand",
    "check_path",
    "missing",
    "run_program",
    "save_folder",
]
