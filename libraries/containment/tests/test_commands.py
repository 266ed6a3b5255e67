"""Commands in the sandbox: what they can read, reach and leave."""

import os
import sys
import threading

import pytest

from rlhf_containment.sandbox import (
    CommandRun,
    FolderError,
    FolderFile,
    Limits,
    SandboxedCommand,
    SandboxError,
    check_path,
    missing,
    save_folder,
)

needs_namespaces = pytest.mark.skipif(missing("namespaces") is not None, reason=str(missing("namespaces")))
LIMITS = Limits(timeout_seconds=60.0, cpu_seconds=30, memory_bytes=2**28, max_processes=64)
PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def run(script, *, limits=LIMITS, on_listening=None, **options):
    command = SandboxedCommand(command=["sh", "-c", script], limits=limits, variables=PATH, **options)
    return CommandRun(command).run(on_listening)


def python(source, **options):
    return CommandRun(SandboxedCommand(command=[sys.executable, "-c", source], limits=LIMITS, **options)).run()


@needs_namespaces
def test_the_folder_goes_in_and_comes_back():
    files = {"a/b.txt": FolderFile(b"1\n"), "go": FolderFile(b"#!/bin/sh\ncat a/b.txt > c; chmod 700 c\n", True)}
    result = run("./go && rm go && ln -s /etc/passwd link && mkfifo pipe && mkdir empty && chmod 0 a", files=files)
    assert result.succeeded
    assert result.files == {"a/b.txt": FolderFile(b"1\n"), "c": FolderFile(b"1\n", True)}


@needs_namespaces
def test_it_reads_what_is_named_and_nothing_else(tmp_path):
    tmp_path.chmod(0o755)
    for name in ("shown", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    listed = f"cat {tmp_path}/shown/text; cat {tmp_path}/hidden/text; echo x > {tmp_path}/shown/text; ls /etc"
    result = run(listed, readable=[str(tmp_path / "shown")])
    assert result.output.startswith("shown") and "hidden" not in result.output
    assert "Read-only" in result.error_output
    assert "shadow" not in result.output and os.environ.get("HOME", "/root") not in run("env").output


@needs_namespaces
def test_temporary_files_are_not_part_of_the_folder():
    result = run("echo b > $HOME/b && echo c > $TMPDIR/c && ls $TMPDIR $HOME")
    assert "b" in result.output.split() and "c" in result.output.split() and result.files == {}


@needs_namespaces
def test_the_port_leads_to_the_one_who_listens():
    def answer(listener):
        def serve():
            with listener, listener.accept()[0] as connection:
                connection.sendall(connection.recv(10).upper())

        threading.Thread(target=serve).start()

    asks = "import socket; s = socket.create_connection(('127.0.0.1', 8123), 5); s.sendall(b'ping'); print(s.recv(9))"
    command = SandboxedCommand(command=[sys.executable, "-c", asks], limits=LIMITS, port=8123)
    assert CommandRun(command).run(answer).output == "b'PING'\n"


@needs_namespaces
def test_sockets_are_of_tcp_and_keep_their_buffers():
    source = """
import errno, socket
def fails(function, *arguments):
    try: function(*arguments)
    except OSError as error: return errno.errorcode[error.errno]
print(fails(socket.socket, socket.AF_UNIX), fails(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
print(fails(socket.socket, 16, 3), fails(socket.socket, socket.AF_INET, socket.SOCK_STREAM, 262))
with socket.socket() as own:
    print(fails(own.setsockopt, socket.SOL_SOCKET, socket.SO_RCVBUF, 2**30))
    print(fails(own.setsockopt, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), fails(own.bind, ('', 0)))
    print(fails(own.connect, ('127.0.0.1', 22)), fails(socket.create_connection, ('10.1.1.1', 80), 2))
"""
    found = ["EAFNOSUPPORT"] * 4 + ["EPERM", "None", "None", "ECONNREFUSED", "ENETUNREACH"]
    assert python(source).output.split() == found


@needs_namespaces
def test_memory_is_what_is_used_not_what_is_reserved():
    assert python("import mmap; mmap.mmap(-1, 2**34, flags=mmap.MAP_PRIVATE); print(1)").output == "1\n"
    assert python("a = b'1' * 2**29; import time; time.sleep(30)").stopped_for == "memory"
    both = f"for i in 1 2; do {sys.executable} -c 'a = b\"1\" * 2**27; import time; time.sleep(30)' & done; wait"
    assert run(both, limits=LIMITS).stopped_for == "memory"


@needs_namespaces
def test_page_tables_count_as_memory():
    source = """
import mmap, time
huge = mmap.mmap(-1, 2**38, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)  # MAP_NORESERVE
for place in range(0, 2**38, 2**21): huge[place]
time.sleep(30)
"""
    assert python(source).stopped_for == "memory"


@needs_namespaces
def test_memory_is_limited_after_the_command_has_ended():
    source = """
almost = [b'1' * (2**24 + number) for number in range(11)]
open('ready', 'x').close()
while True: almost.append(b'1' * 2**24)
"""
    script = f"{sys.executable} grow.py & while ! test -e ready; do sleep 0.01; done"
    assert run(script, files={"grow.py": FolderFile(source.encode())}).stopped_for == "memory"


@needs_namespaces
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("truncate -s 900K a; for i in 1 2 3; do ln a $i; done", "has more than 1048576 bytes"),
        (
            "p=a; while [ ${#p} -lt 900 ]; do p=$p/aaaaaaaaaaaaaaaaaaaa; done; mkdir -p $p && cd $p && "
            "mkdir -p $p && cd $p && touch b",
            "has a path of more than 1024 bytes",
        ),
    ],
)
def test_a_folder_that_cannot_be_sent(script, problem):
    limits = Limits(timeout_seconds=60.0, max_folder_bytes=2**20, max_files=2000)
    result = run(script, limits=limits)
    assert (result.stopped_for, result.problem, result.files) == ("folder", problem, {})


@needs_namespaces
def test_a_process_that_stays_is_named_and_killed():
    result = run("sleep 77 & setsid sleep 77 & exit 3")
    assert (result.stopped_for, result.problem, result.exit_code) == ("child", "sleep, sleep", 3)
    assert run("sleep 0.3 & exit 3").stopped_for == ""


@needs_namespaces
def test_stop_ends_it_from_another_thread():
    started = CommandRun(SandboxedCommand(command=["sh", "-c", "sleep 60"], variables=PATH, limits=LIMITS, port=8123))
    result = started.run(lambda listener: (listener.close(), started.stop()))
    assert result.exit_code == 137
    never = CommandRun(SandboxedCommand(command=["sh", "-c", "sleep 60"], variables=PATH, limits=LIMITS))
    never.stop()
    assert never.run().exit_code == 137


@needs_namespaces
def test_what_cannot_start_says_why():
    with pytest.raises(SandboxError, match="cannot start 'gone'"):
        CommandRun(SandboxedCommand(command=["gone"])).run()
    with pytest.raises(SandboxError, match="cannot start .*No space left"):
        run("true", files={"a": FolderFile(bytes(2**21))}, limits=Limits(max_folder_bytes=2**20))


@pytest.mark.parametrize("path", ["", "/a", "a//b", "../a", "a/..", "./a", "a\0", "a" * 2000, "é" * 600, "\ud800"])
def test_paths_that_are_not_safe(path, tmp_path):
    with pytest.raises(FolderError):
        check_path(path)
    with pytest.raises(FolderError):
        save_folder({path: FolderFile(b"")}, tmp_path)
    with pytest.raises(SandboxError, match="it must be relative"):
        CommandRun(SandboxedCommand(command=["true"], files={path: FolderFile(b"")})).run()
