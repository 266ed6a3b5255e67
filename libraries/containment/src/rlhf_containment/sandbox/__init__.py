"""Runs untrusted programs: code written by a model is hostile input.

`run_program` runs Python source in a separate process tree, isolated by the kernel, and returns its output and how it
ended. Standard library only, so that both rewards and tools of environments can use it.

Two modes. `namespaces` (Linux 5.12 or newer with user namespaces, `/proc` included) keeps all of this out:

- files: it sees the system's programs and libraries, the Python interpreter and its packages, read-only, and nothing
  else of the machine: no home folder, no run folder, no other program's files. It writes to one folder in memory,
  limited in bytes and files, that is discarded with it.
- processes: it sees only its own, cannot signal, trace, limit or slow down any other, and is ended with all its
  descendants. A process that watches it and fails is a failure of this program only.
- network: it has none, and no socket can be opened but connected pairs; message queues, kernel keys, and shared memory
  without a file in the folder (`mmap.mmap(-1, n)`) are off.
- rights: it runs as `nobody` (started as root) or as the user without any capability in a separate namespace (started
  as a user); set-uid programs give it no rights; it inherits no environment and no open file.
- resources: wall-clock time, processor time and memory (over all its processes, each socket of a pair counted as its
  full buffer), processes, file size, output. It leaves no core file, and a crash starts no program of `core_pattern`,
  unless the hard limit of core files (`ulimit -Hc`) is 0 for an ordinary user: the limit that prevents it is 1, and
  cannot be set then: start the run with a hard limit of 1 or more. (`PR_SET_DUMPABLE` does not prevent it: `execve`
  sets it back.)

Not kept out: what a hole in the kernel gives; how fast the machine is, its kernel's version and its processors; timing
side channels; the processor, up to its limit, and, for 50 ms between two looks, memory up to `memory_bytes` in each
of its processes and full buffers in up to 256 sockets of each. Data in pipes is not counted: the kernel limits it to
64 MiB for each user (`fs.pipe-user-pages-soft`). Processor time of a process whose parent ignores its end is not
counted. What the interpreter's `site-packages` holds is readable.

`landlock` is the weaker mode, for containers that forbid namespaces (Linux 6.2 or newer): files, sockets, signals and
tracing as above, but the folder is on the disk and not limited as a whole, memory and processor time are limited in
each process rather than in all, processes are counted with all others of the user (so that most programs can start
none) and signal none but the first, and names and sizes of files outside can be asked for. A process has at most 64
open files, and the full buffers of as many sockets are taken off its `memory_bytes` (20 MiB with Linux's defaults); so
that no other sockets are kept, open files cannot be sent (`socket.sendmsg` fails). Modes, owners, times and attributes
of files cannot be changed, not even in the program's own folder, as Landlock does not restrict these calls:
`shutil.copyfile` works there, `shutil.copy` fails.
"""

from __future__ import annotations

from .run import Limits, Mode, ProgramResult, SandboxError, missing, run_program

__all__ = ["Limits", "Mode", "ProgramResult", "SandboxError", "missing", "run_program"]
