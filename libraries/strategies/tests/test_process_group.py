"""Joining and losing other processes, with real ones."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from running import PATIENCE_SECONDS, Forked, ended, free_port, ranks, wait_until

from rlhf_core.distributed.launch_env import LaunchEnv
from rlhf_core.errors import DeadlineError
from rlhf_strategies.process_group import ProcessGroup, _gloo_is_busy

CHILD = """
    import os, sys
    import torch
    from rlhf_core.errors import RlhfError
    from rlhf_strategies.process_group import ProcessGroup

    group = ProcessGroup(torch.device("cpu"), timeout_seconds=300)
    group.join()
    total = float(group.all_reduce(torch.tensor(group.rank + 1.0)))
    both = group.all_gather_objects({"rank": group.rank, "sum": total})
    print(both, flush=True)
    if group.rank == 1:
        os._exit(9)
    try:
        group.all_reduce(torch.ones(1))
    except RlhfError as error:
        print(type(error).__name__, error, flush=True)
"""

STOPS = """
    import os, signal
    from datetime import timedelta
    import torch
    import torch.distributed
    from rlhf_strategies import process_group
    from rlhf_strategies.process_group import LostRankError, ProcessGroup

    process_group._LEAVE_SECONDS = 600.0  # nobody may be waited for after a loss
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=2)
    group.join()
    group.all_reduce(torch.ones(1))
    torch.distributed.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=600))
    if group.rank == int(os.environ["STOPPED"]):
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        group.all_reduce(torch.ones(1))
    except LostRankError as error:
        print(error.ranks, flush=True)
    group.leave()
"""

ENDS = """
    import sys, time
    import torch
    import torch.distributed as dist
    from rlhf_strategies.process_group import ProcessGroup

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=20)
    group.join()
    sys.setswitchinterval(30)  # this thread keeps Python's lock until it waits for something
    dist.all_reduce(torch.ones(8), async_op=True)
    now = time.monotonic()
    while time.monotonic() < now + 0.2:  # gloo's thread is done, and needs the lock to let go of the tensor
        pass
    group.leave()
"""


def start_two(code: str, **environment: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    places = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, **environment, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]


def run_code(code: str) -> None:
    exec(textwrap.dedent(code), {})


def test_two_meet_and_a_dead_one_is_named():
    processes = [Forked(run_code, CHILD, env=place) for place in ranks(2)]
    with ended(*processes):
        outputs = [process.finish()[0] for process in processes]
    met = "[{'rank': 0, 'sum': 3.0}, {'rank': 1, 'sum': 3.0}]"
    assert [output.splitlines()[0] for output in outputs] == [met, met]
    assert processes[1].returncode == 9
    assert "LostRankError" in outputs[0]
    assert "rank 0 waited for an all-reduce, but rank 1 exited or is stuck" in outputs[0]
    assert "strategy.timeout_seconds" in outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_one_is_named_and_not_waited_for(stopped):
    """Nor does the store keep anybody, which rank 0 holds where no launcher does."""
    processes = start_two(STOPS, STOPPED=str(stopped))
    left = processes[1 - stopped]
    try:
        assert left.communicate(timeout=PATIENCE_SECONDS)[0] == f"({stopped},)\n"
        assert left.returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_process_that_has_left_may_end_at_once():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENDS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_nobody_comes():
    env = LaunchEnv(0, 2, master_addr="127.0.0.1", master_port=free_port())
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=1, env=env)
    with pytest.raises(DeadlineError, match=r"(?s)rank 0 of 2 could not connect.*all 2 processes started"):
        group.join()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_processes_of_one_machine_meet_on_the_loopback_interface_alone(monkeypatch, host):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    env = LaunchEnv(0, 2, master_addr=host, master_port=free_port())
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=5, env=env)
    assert group._rendezvous(timedelta(seconds=5))["store"].host == "127.0.0.1"


def test_alone_is_a_group_of_one_on_no_port():
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=5, env=LaunchEnv())
    group.join()
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert group.all_gather_objects("x") == ["x"]
        inner = ProcessGroup(torch.device("cpu"), timeout_seconds=5, env=LaunchEnv())
        inner.join()
        inner.leave()
        assert dist.is_initialized()  # a group that was there before is left alone
    finally:
        group.leave()
    assert not dist.is_initialized()


def test_errors_that_are_no_lost_peer_pass_unchanged():
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=5, env=LaunchEnv(world_size=2))
    with pytest.raises(RuntimeError, match="^a bug$"), group.guard("anything"):
        raise RuntimeError("a bug")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the names of threads are unknown")
def test_a_thread_of_gloo_that_works_is_seen_and_one_that_waits_is_not():
    ends, rests = threading.Event(), threading.Event()

    def work():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
        while not rests.is_set():
            time.process_time()
        ends.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(_gloo_is_busy, "the thread to be seen at work")
        rests.set()
        wait_until(lambda: not _gloo_is_busy(), "the thread to be seen waiting")
    finally:
        rests.set()
        ends.set()
        thread.join(PATIENCE_SECONDS)
