"""Everything a run listens at is on loopback, unless the user names an address: shown by listing its sockets."""

import os
import subprocess
import time

import psutil
import pytest
from run_files import RLHF, write_run

LOOPBACK = ("127.", "::1", "::ffff:127.")


def listeners(process):
    """(address, port) -> command, of this process and all below it."""
    found = {}
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for each in family:
        try:
            for connection in each.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = " ".join(each.cmdline())[:120]
        except psutil.Error:  # it ended while we looked
            continue
    return found


def watch(command, log, environment=None):
    """Run to the end; every place that was listened at, and the exit code."""
    seen = {}
    with log.open("wb") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {}))
        try:
            while process.poll() is None:
                seen |= listeners(process)
                time.sleep(0.25)
        finally:
            for each in [*process.children(recursive=True), process] if process.is_running() else ():
                each.kill()
            process.wait()
    return seen, process.returncode


def assert_loopback(seen):
    assert seen, "nothing was seen to listen: the test looks in the wrong place"
    elsewhere = {place: who for place, who in seen.items() if not place[0].startswith(LOOPBACK)}
    assert not elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, ["--strategy", "ddp", "--num-processes", "2"]),
        ({}, ["--strategy", "fsdp", "--num-processes", "2"]),
        ({"transport": {"name": "ray", "num_makers": 1, "num_trainers": 2}, "strategy": {"name": "ddp"}}, []),
    ],
    ids=["ddp", "fsdp", "ray"],
)
def test_a_run_listens_on_loopback_only(tmp_path, changes, flags):
    run_file = write_run(tmp_path, {"train": {"episodes": 2}, **changes})
    log = tmp_path / "log"
    seen, code = watch([RLHF, "train", run_file, "--output", tmp_path / "run", *flags], log)
    assert code == 0, log.read_text()
    assert_loopback(seen)


@pytest.mark.slow
def test_a_run_of_one_process_listens_nowhere(tmp_path):
    log = tmp_path / "log"
    seen, code = watch([RLHF, "train", write_run(tmp_path, {}), "--output", tmp_path / "run"], log)
    assert code == 0, log.read_text()
    assert seen == {}


@pytest.mark.slow
def test_a_reward_server_listens_on_loopback_only(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = psutil.Popen([RLHF, "serve-reward", "length", "--port", "0"], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while not (seen := listeners(server)):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert_loopback(seen)
    finally:
        server.terminate()
        server.wait(60)
