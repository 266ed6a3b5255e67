"""The places that torchrun's and SLURM's environments give a process."""

from __future__ import annotations

import pytest

from rlhf_core.distributed.launch_env import LaunchEnv, first_host, read_launch_env
from rlhf_core.errors import UserInputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}


def test_alone_without_a_launcher():
    assert read_launch_env({}) == LaunchEnv()
    assert read_launch_env({"PATH": "/bin", "SLURM_JOB_ID": "7"}) == LaunchEnv()


def test_torchrun():
    env = read_launch_env(TORCHRUN)
    assert env == LaunchEnv("torchrun", 3, 4, 1, "node1", 29500)


def test_slurm():
    env = read_launch_env({**SLURM, "SLURM_JOB_NODELIST": "gpu[007-010,012]"})
    assert env == LaunchEnv("slurm", 5, 8, 1, "gpu007", 15000 + 123456 % 20000)


def test_slurm_step_wins_over_job_and_master_variables_over_guesses():
    env = read_launch_env({**SLURM, "SLURM_STEP_NUM_TASKS": "6", "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert (env.world_size, env.master_addr, env.master_port) == (6, "head", 4000)


def test_torchrun_wins_under_slurm():
    assert read_launch_env({**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"RANK": "-1"}, "not a whole number"),
        ({"WORLD_SIZE": "four"}, "'four' is not a whole number"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK"),
    ],
)
def test_half_an_environment_is_an_error_that_names_it(change, message):
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UserInputError, match=message) as caught:
        read_launch_env(environ)
    assert "->" in str(caught.value)


def test_one_process_of_torchrun_needs_no_meeting_place():
    assert read_launch_env({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-009,12],cpu1", "gpu007"), ("r[3]c,r4c", "r3c"), ("a-b-1", "a-b-1")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first
