"""The place that torchrun's environment gives a process."""

from __future__ import annotations

import pytest

from rlhf_core.distributed.launch_env import LaunchEnv, read_launch_env
from rlhf_core.entry.train import train
from rlhf_core.errors import UserInputError
from rlhf_testing.runs import tiny_run

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_alone_without_a_launcher():
    assert read_launch_env({}) == LaunchEnv()
    assert read_launch_env({"PATH": "/bin", "SLURM_PROCID": "0", "SLURM_NTASKS": "7"}) == LaunchEnv()


def test_torchrun():
    env = read_launch_env(TORCHRUN)
    assert env == LaunchEnv(3, 4, 1, "node1", 29500)


def test_processes_of_a_bare_srun_are_refused_and_no_run_of_their_own(monkeypatch, tmp_path):
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UserInputError, match=r"(?s)srun started 2 processes.*one torchrun per machine"):
        train(tiny_run(), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    train(tiny_run(), dry_run=True)


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
