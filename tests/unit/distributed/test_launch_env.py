"""The place that torchrun's environment gives a process."""

from __future__ import annotations

import pytest

from rlhf_core.distributed.launch_env import LaunchEnv, read_launch_env
from rlhf_core.errors import UserInputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_alone_without_a_launcher():
    assert read_launch_env({}) == LaunchEnv()
    assert read_launch_env({"PATH": "/bin", "SLURM_PROCID": "0", "SLURM_NTASKS": "7"}) == LaunchEnv()


def test_torchrun():
    env = read_launch_env(TORCHRUN)
    assert env == LaunchEnv(3, 4, 1, "node1", 29500)


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
