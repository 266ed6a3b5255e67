"""What a hostile program tries, as a table.

Each source is run with `PRELUDE` before it. `attempt(f)` prints `BROKEN` where `f` succeeds and `held` where it is
refused; names in capitals between at-signs are put in by the test. `expect` is what has to come of it: `held`
(every attempt was refused, and at least one was made), `ran` (it prints `done`), or the limit that ends it.
"""

from dataclasses import dataclass

PRELUDE = r"""
import ctypes, errno, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function):
    try:
        got = function()
    except BaseException as error:
        print("held", type(error).__name__, flush=True)
    else:
        print("BROKEN", repr(got)[:200], flush=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def syscall(number, *arguments):
    return call("syscall", ctypes.c_long(number), *arguments)
def read(path):
    return open(path, "rb").read(200)
def write(path, mode="ab"):
    with open(path, mode) as file:
        file.write(b"intruder")
"""


@dataclass(frozen=True)
class Attack:
    source: str
    expect: str = "held"
    landlock: bool = True
    """Whether the weaker mode promises it, too."""
    namespaces: bool = True
    """False: the other mode ends such a program."""


ATTACKS = {
    # files
    "read a private file": Attack("attempt(lambda: read('@SECRET@'))"),
    "read a file of the system's": Attack("attempt(lambda: read('/etc/passwd')); attempt(lambda: read('/etc/shadow'))"),
    "list folders outside": Attack("attempt(lambda: os.listdir('@FOLDER@'))"),
    "write outside": Attack("attempt(lambda: write('@FOLDER@/intruder', 'xb')); attempt(lambda: write('@SECRET@'))"),
    "truncate outside": Attack("attempt(lambda: os.truncate('@OPEN_FILE@', 0))"),
    "write to the system": Attack("attempt(lambda: write('/usr/intruder')); attempt(lambda: os.unlink('/bin/sh'))"),
    "write to the interpreter": Attack(
        "import json; attempt(lambda: write(json.__file__)); attempt(lambda: write('/proc/self/exe', 'r+b'))"
    ),
    "make the system writable": Attack(
        "attempt(lambda: call('mount', None, b'/usr', None, 32 | 4096, None))\n"
        "attempt(lambda: call('mount', b'none', b'/sandbox', b'tmpfs', 0, None))\n"
        "attempt(lambda: call('umount2', b'/usr', 2))\n"
        "attempt(lambda: syscall(442, -100, b'/usr', 0, struct.pack('QQQQ', 0, 1, 0, 0), 32))"
    ),
    "swap the program": Attack("attempt(lambda: write(sys.argv[0])); attempt(lambda: os.rename(sys.argv[0], 'x'))"),
    "follow a link out": Attack("os.symlink('@SECRET@', 'link'); attempt(lambda: read('link'))"),
    "link a file in": Attack("attempt(lambda: os.link('@OPEN_FILE@', 'link'))"),
    "leave by chroot": Attack(
        "os.mkdir('inner'); attempt(lambda: os.chroot('inner'))\nattempt(lambda: read('../../../../@SECRET@'))"
    ),
    "leave by the root's parent": Attack("attempt(lambda: read('/../../..@SECRET@'))"),
    "make a device": Attack("attempt(lambda: os.mknod('disk', 0o060666, os.makedev(254, 0)))"),
    "open by handle": Attack(
        "numbers = (304, 303) if os.uname().machine == 'x86_64' else (265, 264)\n"
        "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 136); where = ctypes.c_int()\n"
        "attempt(lambda: syscall(numbers[1], -100, b'/usr', handle, ctypes.byref(where), 0))\n"
        "attempt(lambda: syscall(numbers[0], -100, handle, 0))"
    ),
    "change what is known of a file outside": Attack(
        "import fcntl\n"
        "attempt(lambda: os.chmod('@OPEN_FILE@', 0o777)); attempt(lambda: os.utime('@OPEN_FILE@', (1, 1)))\n"
        "attempt(lambda: os.chown('@OPEN_FILE@', -1, os.getgid()))\n"
        "attempt(lambda: os.setxattr('@OPEN_FILE@', 'user.intruder', b'x'))\n"
        "attempt(lambda: os.removexattr('@OPEN_FILE@', 'user.kept'))\n"
        "attempt(lambda: syscall(452, -100, b'@OPEN_FILE@', 0o777, 0))\n"
        "arguments = struct.pack('QII', 0, 0, 0)\n"
        "attempt(lambda: syscall(463, -100, b'@OPEN_FILE@', 0, b'user.intruder', arguments, 16))\n"
        "attempt(lambda: syscall(466, -100, b'@OPEN_FILE@', 0, b'user.kept'))\n"
        "attempt(lambda: syscall(469, -100, b'@OPEN_FILE@', bytes(24), 24, 0))"
    ),
    "change attributes through an open file": Attack(
        "import fcntl\nfile = open('own', 'w')\n"
        "for number in (0x40086602, 0x401C5820, 0x40087602, 0x40806685):\n"
        "    attempt(lambda: fcntl.ioctl(file, number, bytes(128)))\n"
        "for number in (1024, 1026, 1031):\n    attempt(lambda: fcntl.fcntl(file, number, 1))"
    ),
    "watch files": Attack(
        "number = 294 if os.uname().machine == 'x86_64' else 26\nattempt(lambda: syscall(number, 0))"
    ),
    # /proc
    "look into the first process": Attack(
        "for name in ('environ', 'mem', 'root/etc/passwd', 'cwd/..', 'fd/0', 'maps'):\n"
        "    attempt(lambda: read('/proc/1/' + name))"
    ),
    "see other processes": Attack(
        "attempt(lambda: os.stat('/proc/@PID@/environ') and read('/proc/@PID@/environ'))\n"
        "attempt(lambda: [name for name in os.listdir('/proc') if name.isdecimal()][3])"
    ),
    "set the kernel's switches": Attack(
        "attempt(lambda: write('/proc/sys/kernel/core_pattern', 'wb')); attempt(lambda: write('/proc/sysrq-trigger'))\n"
        "attempt(lambda: write('/sys/kernel/uevent_helper')); attempt(lambda: read('/proc/kcore'))"
    ),
    "see the environment": Attack("attempt(lambda: os.environ['ATTACK_SECRET'])\nprint(os.environ)"),
    "use inherited files": Attack(
        "for each in range(3, 256):\n    attempt(lambda: os.read(each, 10)); attempt(lambda: os.write(each, b'{}'))"
    ),
    # other processes
    "signal the parent": Attack("attempt(lambda: os.kill(@PID@, 0)); attempt(lambda: os.kill(@PID@, 9))"),
    "signal the parent by other ways": Attack(
        "import fcntl\n"
        "numbers = (424, 129, 200) if os.uname().machine == 'x86_64' else (424, 138, 130)\n"
        "attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(@PID@), 0))\n"
        "attempt(lambda: syscall(numbers[1], @PID@, 0, ctypes.create_string_buffer(128)))\n"
        "attempt(lambda: syscall(numbers[2], @PID@, 0))\n"
        "def by_input():\n"
        "    ends = socket.socketpair()\n"
        "    fcntl.fcntl(ends[0], fcntl.F_SETOWN, @PID@); fcntl.fcntl(ends[0], 10, signal.SIGUSR1)\n"
        "    fcntl.fcntl(ends[0], fcntl.F_SETFL, os.O_ASYNC); ends[1].send(b'x')\n"
        "    return fcntl.fcntl(ends[0], fcntl.F_GETOWN)\n"
        "attempt(by_input)"
    ),
    "kill the watcher": Attack(
        "for number in (9, 19, 15, 2):\n    os.kill(1, number)\nprint('done')", "ran", landlock=False
    ),
    "limit other processes": Attack(
        "def limit(pid): resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))\n"
        "attempt(lambda: limit(1)); attempt(lambda: limit(os.getppid()))\n"
        "attempt(lambda: resource.prlimit(@PID@, resource.RLIMIT_CPU)); print('done')"
    ),
    "slow other processes down": Attack(
        "ioprio_set = 251 if os.uname().machine == 'x86_64' else 30\n"
        "for pid in (1, os.getppid()):\n"
        "    attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))\n"
        "    attempt(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))\n"
        "    attempt(lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)))\n"
        "    attempt(lambda: syscall(ioprio_set, 1, pid, 3 << 13))\n"
        "attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19))"
    ),
    "trace": Attack(
        "number = 101 if os.uname().machine == 'x86_64' else 117\n"
        "for pid in (1, @PID@, os.getppid()):\n    attempt(lambda: syscall(number, 16, pid, 0, 0))"
    ),
    "read another's memory": Attack(
        "number = 310 if os.uname().machine == 'x86_64' else 270; some = ctypes.create_string_buffer(16)\n"
        "attempt(lambda: syscall(number, os.getppid(), some, 1, some, 1, 0))\n"
        "attempt(lambda: syscall(438, 0, 0, 0))"
    ),
    # network
    "connect to this machine": Attack("attempt(lambda: socket.create_connection(('127.0.0.1', @PORT@), 2))"),
    "send datagrams": Attack(
        "attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@)))"
    ),
    "listen": Attack("attempt(lambda: socket.create_server(('', 0)))"),
    "connect to a unix socket": Attack("attempt(lambda: socket.socket(socket.AF_UNIX).connect('@SOCKET@'))"),
    "connect to an abstract socket": Attack(r"attempt(lambda: socket.socket(socket.AF_UNIX).connect('\0@ABSTRACT@'))"),
    "datagrams to a private unix socket": Attack(
        "attempt(lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '@DATAGRAMS@'))\n"
        "attempt(lambda: socket.socketpair(type=socket.SOCK_SEQPACKET)[0].connect('@DATAGRAMS@'))\n"
        "attempt(lambda: socket.socketpair()[0].sendto(b'x', '@DATAGRAMS@'))\n"
        "attempt(lambda: socket.socketpair()[0].connect('@DATAGRAMS@'))\n"
        "attempt(lambda: socket.socketpair()[0].bind('own'))"
    ),
    "talk to the kernel by sockets": Attack(
        "attempt(lambda: socket.socket(16, socket.SOCK_RAW, 0)); attempt(lambda: socket.socket(38, 5, 0))"
    ),
    "sockets by io_uring": Attack("attempt(lambda: syscall(425, 8, ctypes.create_string_buffer(120)))"),
    # what outlives a process
    "System V shared memory": Attack(
        "attempt(lambda: call('shmget', 0, 2**20, 0o1666)); attempt(lambda: call('msgget', 77, 0o1666))"
    ),
    "fill shared memory": Attack(
        "def fill():\n"
        "    for each in range(100): open(f'/dev/shm/intruder{each}', 'wb').write(bytes(2**22))\n"
        "attempt(fill)"
    ),
    "files in memory": Attack("attempt(lambda: os.memfd_create('x'))"),
    "kernel keys": Attack(
        "numbers = (248, 250) if os.uname().machine == 'x86_64' else (217, 219)\n"
        "attempt(lambda: syscall(numbers[0], b'user', b'x', b'y', 1, -4))\n"
        "attempt(lambda: syscall(numbers[1], 0, -3, 1))"
    ),
    "stay behind": Attack(
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '@MARK@'])\n    os._exit(0)\ntime.sleep(0.2); print('done')",
        "ran",
    ),
    "hold the output open": Attack(
        "if os.fork() == 0:\n    signal.signal(15, signal.SIG_IGN); time.sleep(1000)\nprint('done')", "ran"
    ),
    # rights
    "become root": Attack(
        "attempt(lambda: os.setuid(0)); attempt(lambda: os.setgroups([0]))\n"
        "attempt(lambda: subprocess.run(['su', '-c', 'id'], check=True, stdin=subprocess.DEVNULL))\n"
        "attempt(lambda: os.chown('.', 0, 0)); attempt(lambda: os.sethostname('x'))"
    ),
    "new namespaces": Attack(
        "attempt(lambda: call('unshare', 0x10000000)); attempt(lambda: call('unshare', 0x00020000))\n"
        "number = 56 if os.uname().machine == 'x86_64' else 220\n"
        "attempt(lambda: syscall(number, 0x10000000 | 17, 0, 0, 0, 0))\n"
        "attempt(lambda: syscall(435, struct.pack('Q' * 11, 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88))"
    ),
    "the kernel's machinery": Attack(
        "numbers = (321, 298, 323) if os.uname().machine == 'x86_64' else (280, 241, 282)\n"
        "some = ctypes.create_string_buffer(128)\n"
        "for number in numbers:\n    attempt(lambda: syscall(number, 0, some, 128, -1, 0))"
    ),
    "raise the limits": Attack(
        "for each in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):\n"
        "    attempt(lambda: resource.setrlimit(each, (resource.RLIM_INFINITY,) * 2))\n"
        "attempt(lambda: os.nice(-20))\n"
        "attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))"
    ),
    "forge how it ended": Attack(
        "for each in range(256):\n"
        '    try: os.write(each, b\'{"exit_code": 0, "stopped_for": ""}\\n\')\n    except OSError: pass\n'
        "print('held'); sys.stdout.flush(); os._exit(3)",
        "exit 3",
    ),
    # resources
    "fork bomb": Attack(
        "born = 0\nwhile born < 1000:\n"
        "    try:\n        pid = os.fork()\n    except OSError:\n        break\n"
        "    if pid == 0: time.sleep(1000)\n    born += 1\n"
        "print('held' if born < 16 else 'BROKEN', born, flush=True)"
    ),
    "thread bomb": Attack(
        "started = 0\ntry:\n    while started < 1000:\n"
        "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); started += 1\n"
        "except RuntimeError: pass\n"
        "print('held' if started < 16 else 'BROKEN', started, flush=True); os._exit(0)"
    ),
    "zombies": Attack(
        "for _ in range(300):\n    try:\n        if os.fork() == 0:\n            if os.fork() == 0: os._exit(0)\n"
        "            os._exit(0)\n    except OSError: pass\nprint('done')",
        "ran",
    ),
    "memory": Attack("attempt(lambda: bytearray(10**9))"),
    "memory in many processes": Attack(
        "for _ in range(6):\n    if os.fork() == 0: kept = b'x' * (60 * 2**20); time.sleep(1000)\ntime.sleep(1000)",
        "memory",
        landlock=False,
    ),
    "memory that only the kernel knows": Attack(
        "attempt(lambda: mmap.mmap(-1, 2**20))\nattempt(lambda: mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**20))"
    ),
    "memory without a first thread": Attack(
        "number = 60 if os.uname().machine == 'x86_64' else 93\n"
        "def fill(): time.sleep(0.5); kept = b'x' * (60 * 2**20); time.sleep(1000)\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0: threading.Thread(target=fill).start(); syscall(number, 0)\n"
        "time.sleep(1000)",
        "memory",
        landlock=False,
    ),
    "processor in processes that ended": Attack(
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        while time.process_time() < 0.2: pass\n"
        "        os._exit(0)\n"
        "    os.wait()",
        "processor",
        landlock=False,
    ),
    "processor in many processes": Attack(
        "for _ in range(6):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
        "processor",
        landlock=False,
    ),
    "processor, deaf to signals": Attack(
        "for each in range(1, 64):\n"
        "    try: signal.signal(each, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        "processor",
    ),
    "sleep": Attack("time.sleep(1000)", "time"),
    "stop itself": Attack("os.kill(os.getpid(), signal.SIGSTOP)", "time"),
    "close everything and stay": Attack("os.closerange(0, 256); time.sleep(1000)", "time"),
    "output without end": Attack("while True: sys.stdout.write('x' * 2**16)", "output"),
    "errors without end": Attack("while True: sys.stderr.write('x' * 2**16)", "output"),
    "fill the folder": Attack(
        "def fill():\n    for each in range(1000): open(f'f{each}', 'wb').write(bytes(2**20))\nattempt(fill)",
        landlock=False,
    ),
    "many files": Attack(
        "def fill():\n    for each in range(10**4): open(f'f{each}', 'wb').close()\nattempt(fill)", landlock=False
    ),
    "a file without end": Attack(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nattempt(lambda: open('f', 'wb').truncate(2**40))\n"
        "attempt(lambda: open('f', 'wb').write(bytes(2**24)))"
    ),
    "1,500 folders deep": Attack(
        "for _ in range(1500): os.mkdir('d'); os.chdir('d')\n"
        "try: os.chmod('.', 0)\nexcept PermissionError: pass  # in the weaker mode\nprint('done')",
        "ran",
    ),
    "memory in sockets": Attack(
        "for _ in range(2): os.fork()\n"
        "kept = [end for _ in range(120) for end in socket.socketpair()]\n"
        "for each in kept:\n"
        "    each.setblocking(False)\n"
        "    try:\n"
        "        while True: each.send(bytes(2**16))\n"
        "    except BlockingIOError: pass\n"
        "time.sleep(1000)",
        "memory",
        landlock=False,
    ),
    "memory in sockets besides the limit": Attack(
        "kept, filled = [], 0\n"
        "try:\n    while True: kept += socket.socketpair()\n"
        "except OSError: pass\n"
        "for each in kept:\n"
        "    each.setblocking(False)\n"
        "    try:\n        while True: filled += each.send(bytes(2**16))\n"
        "    except BlockingIOError: pass\n"
        "held = filled > 2**20 and resource.getrlimit(resource.RLIMIT_AS)[0] + filled <= 200 * 2**20\n"
        "print('held' if held else 'BROKEN', len(kept), filled)\n"
        "for _ in range(4): kept.pop().close()\n"
        "pair = socket.socketpair(); attempt(lambda: socket.send_fds(pair[0], [b'x'], [1]))",
        namespaces=False,
    ),
    "larger buffers": Attack(
        "for each in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):\n"
        "    attempt(lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, each, 2**24))\n"
        "import fcntl; attempt(lambda: fcntl.fcntl(os.pipe()[1], 1031, 2**20))"
    ),
    "memory kept by pipes": Attack(
        "numbers = (278, 275, 276) if os.uname().machine == 'x86_64' else (75, 76, 77)\n"
        "kept = bytes(4096); into = os.pipe()[1]\n"
        "address = ctypes.cast(kept, ctypes.c_void_p).value\n"
        "attempt(lambda: syscall(numbers[0], into, struct.pack('QQ', address, len(kept)), 1, 0))\n"
        "file = open(sys.argv[0], 'rb')\n"
        "attempt(lambda: syscall(numbers[1], file.fileno(), None, into, None, 10, 0))\n"
        "attempt(lambda: os.sendfile(into, file.fileno(), 0, 10))\n"
        "first = os.pipe(); os.write(first[1], b'x')\n"
        "attempt(lambda: syscall(numbers[2], first[0], into, 1, 0))"
    ),
    "dump core": Attack(
        "print('held' if resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) else 'BROKEN')\n"
        "attempt(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))\n"
        "attempt(lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 1)))\n"
        "number = 160 if os.uname().machine == 'x86_64' else 164\n"
        "attempt(lambda: syscall(number, 4, struct.pack('QQ', 0, 0)))"
    ),
    "what any program may do": Attack(
        "import asyncio, fcntl, multiprocessing, shutil, sqlite3\n"
        "assert asyncio.run(asyncio.sleep(0, 'slept')) == 'slept'\n"
        "one, other = multiprocessing.Pipe(); one.send('x'); assert other.recv() == 'x'\n"
        "open('a', 'w').write('x'); shutil.copyfile('a', 'b'); assert open('b').read() == 'x'\n"
        "with open('a') as file: fcntl.flock(file, fcntl.LOCK_EX); os.set_blocking(os.dup(file.fileno()), False)\n"
        "sqlite3.connect('db').execute('create table t (x)')\n"
        "for each in range(16): resource.getrlimit(each)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50)); os.nice(1); sys.stdout.isatty()\n"
        "assert open('/dev/zero', 'rb').read(3) == bytes(3)\n"
        "os.sched_setaffinity(0, os.sched_getaffinity(0)); print('done')",
        "ran",
    ),
    "the second set of system calls": Attack(
        "print('held', flush=True)\n"
        "if os.uname().machine == 'x86_64': libc.syscall(ctypes.c_long(0x40000000 + 39)); print('BROKEN')"
    ),
}
