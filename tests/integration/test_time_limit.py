"""`train.max_hours` and SIGUSR1 end runs of one and two processes with a checkpoint, from which they continue."""

from __future__ import annotations

import json
import signal

import pytest
from run_files import command, lines, write_run
from running import ended, rlhf, wait_until

pytestmark = pytest.mark.usefixtures("no_plots")
SIZES = {"prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
ENDLESS = {"train": {"episodes": 100_000, **SIZES}, "checkpoint": {"every_episodes": None}}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--strategy", "fsdp", "--num-processes", "2"),
    ],
    ids=["one", "two"],
)
@pytest.mark.slow
def test_sigusr1_is_a_wish_however_often_it_arrives(tmp_path, flags):
    folder = tmp_path / "run"
    process = rlhf("train", write_run(tmp_path, ENDLESS), "--output", folder, *flags)

    def updated():
        process.assert_runs()
        return (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size

    with ended(process):
        wait_until(updated, "an update")
        for _ in range(3):
            process.send_signal(signal.SIGUSR1)
        out, err = process.finish()
    assert process.returncode == 130, err
    assert "Traceback" not in out + err and "--resume auto" in err
    assert (summary(folder)["status"], summary(folder)["stopped"]["by"]) == ("interrupted", "signal")
    episodes = lines(folder / "metrics.jsonl")[-1]["episode"] + 1
    done = command("train", "--output", folder, "--resume", "auto", "--set", f"train.episodes={episodes + 1}")
    assert done.returncode == 0, done.stderr
    assert summary(folder)["status"] == "done"


@pytest.mark.slow
def test_two_processes_stop_together_at_the_limit(tmp_path):
    """Rank 0's clock decides for both. A limit that is over at once leaves an episode to each session."""
    changes = {**ENDLESS, "train": {"episodes": 3, **SIZES}, "strategy": "fsdp"}
    run, two = write_run(tmp_path, changes), tmp_path / "two"
    limited = ("train", run, "--output", two, "--resume", "auto", "--num-processes", "2", "--set")
    for episode in (1, 2):
        stopped = command(*limited, "train.max_hours=1e-9")
        assert stopped.returncode == 130, stopped.stderr
        assert f"stopped after episode {episode} of 3" in stopped.stderr
        assert summary(two)["stopped"]["by"] == "train.max_hours"
    done = command(*limited, "train.max_hours=1e-9")
    assert done.returncode == 0, done.stderr
    assert summary(two)["status"] == "done"
    assert [line["episode"] for line in lines(two / "metrics.jsonl")] == [0, 0, 1, 1, 2, 2]
