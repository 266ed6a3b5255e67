"""`--num-processes 2`: the same run in two processes, and what happens when one goes wrong."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest
from run_files import RLHF, command, metrics, samples, start, write_run

pytest.importorskip("rlhf_colossalai.ddp", reason="the strategy ddp is not installed")
DDP = {"strategy": "ddp", "train": {"episodes": 2, "prompts_per_episode": 6, "train_batch_size": 12}}
FLAGS = ("--num-processes", "2")


def begin(tmp_path, changes):
    """A long run of two processes, under way; the command's process and the pids of its ranks."""
    run = write_run(tmp_path, {**changes, "train": {**DDP["train"], "episodes": 100_000}})
    process = subprocess.Popen(
        [RLHF, "train", str(run), "--output", str(tmp_path / "run"), *FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    while not (metrics_file.exists() and metrics_file.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no update within 200 s"
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    return process, [each for each in children if "rlhf_core.entry.launched" in " ".join(each.cmdline())]


def test_two_processes_make_the_run_of_one(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def spread(rollouts):\n    return [sum(r.completion_ids) % 7 / 7 for r in rollouts]\n")
    changes = {**DDP, "eval": {"num_prompts": 5}, "rewards": [{"name": f"{reward}:spread"}]}
    run = write_run(tmp_path, changes)
    done = command("train", run, "--output", tmp_path / "two", *FLAGS, timeout=280)
    assert done.returncode == 0, done.stderr
    one = start({**changes, "strategy": "single"}, tmp_path / "one")
    assert [line["sample_id"] for line in samples(tmp_path / "two")] == list(range(24))
    assert samples(tmp_path / "two")[:12] == samples(one.run_folder)[:12]
    for ours, theirs in zip(metrics(tmp_path / "two")[:1], metrics(one.run_folder)[:1], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["eval_before"] == one.summary["eval_before"]
    assert (tmp_path / "two/model/model.safetensors").is_file()


DIES_IN_ITS_FORWARD_PASS = """
import os, signal
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as Wrapped

forward = Wrapped.forward


def mortal(self, *args, **kwargs):
    if os.environ["RANK"] == "1" and Path(__file__).with_name("now").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, *args, **kwargs)


Wrapped.forward = mortal


def spread(rollouts):
    return [sum(r.completion_ids) % 7 / 7 for r in rollouts]
"""


def test_a_killed_rank_ends_the_run_by_name(tmp_path):
    """Also when the other notices in a call of the wrapped model itself: here, when it copies rank 0's buffers."""
    reward = tmp_path / "reward.py"
    reward.write_text(DIES_IN_ITS_FORWARD_PASS)
    strategy = {"name": "ddp", "broadcast_buffers": True}
    process, ranks = begin(tmp_path, {**DDP, "strategy": strategy, "rewards": [{"name": f"{reward}:spread"}]})
    assert len(ranks) == 2
    (tmp_path / "now").touch()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    assert "rank 1" in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert not [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_ctrl_c_stops_all_processes_with_a_checkpoint(tmp_path):
    process, ranks = begin(tmp_path, DDP)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert (tmp_path / "run/checkpoints/last").is_file()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"
    assert not [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_input_that_is_wrong_in_every_process_leaves_nothing(tmp_path):
    run = write_run(tmp_path, {**DDP, "engine": {"max_cache_tokens": 64, "max_new_tokens": 128}})
    done = command("train", run, "--output", tmp_path / "run", *FLAGS, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "engine.max_cache_tokens" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_hook_object_cannot_travel(tmp_path):
    from rlhf_core.errors import UserInputError

    class Hook:
        def rlhf_fit_start(self):
            """Never called."""

    with pytest.raises(UserInputError, match="Hook cannot travel"):
        start(DDP, tmp_path / "run", num_processes=2, hooks=[Hook()])
    assert not (tmp_path / "run").exists()
