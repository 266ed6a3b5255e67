"""Functions called as the ranks of a process group: rank 0 here, the others as actors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from rlhf_core.errors import CheckpointError, RlhfError, UserInputError
from rlhf_ray.calls import ActorLostError
from rlhf_ray.config import RayConfig
from rlhf_ray.launching import check_options
from rlhf_ray.transport import RayTransport

TARGETS = '''
"""Functions that ranks call."""

import os
import signal
from pathlib import Path

import torch
from rlhf_core.errors import CheckpointError
from rlhf_strategies.process_group import ProcessGroup


def joined(action):
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=60.0)
    group.join()
    try:
        return action(group)
    finally:
        group.leave()


def add(folder):
    def action(group):
        total = group.all_reduce(torch.tensor([float(group.rank + 1)]))
        (Path(folder) / str(group.rank)).write_text(f"{total.item()} {os.getpid()}")

    joined(action)


def fail(kind):
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=60.0)
    group.join()
    if group.rank == 1:
        if kind == "raises":
            raise CheckpointError("it is missing", where="there", hint="look elsewhere")
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_gather_objects(group.rank)


def fail_early(kind):
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=3600.0)
    if group.rank == 1 or kind == "all":
        raise CheckpointError("it is missing", where="there")
    group.join()


def gpus(folder):
    (Path(folder) / os.environ["RANK"]).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
'''


@pytest.fixture
def targets(site: Path, local_ray: None) -> str:
    (site / "ranked.py").write_text(dedent(TARGETS))
    return "ranked"


@pytest.mark.parametrize(
    ("options", "num_processes", "message"),
    [
        ({}, 1, "a single process needs no cluster"),
        ({"num_makers": 2, "sync": "chunked"}, 2, "num_makers, sync is for runs"),
    ],
)
def test_options_without_an_effect_are_refused(options, num_processes, message) -> None:
    with pytest.raises(UserInputError, match=message):
        check_options(RayConfig(**options), num_processes)


@pytest.mark.slow
def test_ranks_find_each_other(targets: str, tmp_path: Path) -> None:
    """Rank 0 is this process, which is not a rank afterwards."""
    RayTransport(RayConfig()).launch(f"{targets}:add", 3, arguments=[str(tmp_path)])
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & os.environ.keys()
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [total for total, _ in found] == ["6.0"] * 3
    assert [int(pid) == os.getpid() for _, pid in found] == [True, False, False]


@pytest.mark.slow
def test_the_error_of_a_rank_is_raised_with_its_name(targets: str) -> None:
    with pytest.raises(CheckpointError, match="it is missing") as caught:
        RayTransport(RayConfig()).launch(f"{targets}:fail", 2, arguments=["raises"])
    assert caught.value.where == "rank-1, there"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "where"), [("one", "rank-1, there"), ("all", "there")])
def test_an_error_before_the_ranks_have_joined(targets: str, kind: str, where: str) -> None:
    """Rank 0 does not wait for the hour that the group allows, and its own error is not that of another rank."""
    with pytest.raises(CheckpointError, match="it is missing") as caught:
        RayTransport(RayConfig()).launch(f"{targets}:fail_early", 2, arguments=[kind])
    assert caught.value.where == where


@pytest.mark.slow
def test_a_killed_rank_is_named(targets: str) -> None:
    with pytest.raises(ActorLostError, match="its process exited") as caught:
        RayTransport(RayConfig()).launch(f"{targets}:fail", 2, arguments=["dies"])
    assert caught.value.where == "rank-1"


@pytest.mark.slow
def test_missing_resources_are_named(targets: str) -> None:
    config = RayConfig(trainer_cpus=10_000, start_timeout_seconds=2.0)
    with pytest.raises(RlhfError, match="waited 2 s for rank-1 to start: they reserve 20000 CPU"):
        RayTransport(config).launch(f"{targets}:add", 2, arguments=["-"])


@pytest.mark.slow
def test_rank_0_uses_the_gpu_that_ray_reserved_for_it(tmp_path: Path, site: Path) -> None:
    """Ray counts two GPUs here, which do not exist."""
    (site / "ranked.py").write_text(dedent(TARGETS))
    script = f"""
from rlhf_ray import local_ray
from rlhf_ray.config import RayConfig
from rlhf_ray.transport import RayTransport

with local_ray(num_cpus=2, num_gpus=2):
    RayTransport(RayConfig(trainer_gpus=1)).launch("ranked:gpus", 2, arguments=[{str(tmp_path)!r}])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    assert {(tmp_path / str(rank)).read_text() for rank in range(2)} == {"0", "1"}
